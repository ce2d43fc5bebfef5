"""Two replicas and a master: which weights each group reads, and where the next bank is written.

The master is the user's module; the optimizer owns it and no forward of training ever reads it. Replicas are
real copies of the module, so that a forward and its backward see one set of tensors and nothing is swapped under
autograd. Group g reads what `schedule.staleness.reads` says: z_g through a replica that holds a copy of the
master, or a bank. Invariant: a replica is written only when every group that reads it has finished its last
backward, so `delay + 1` replicas are enough.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from slipstream.errors import UserError
from slipstream.lists import copy_
from slipstream.pipeline.fsdp import sharded_modules
from slipstream.schedule.staleness import Read, reads

Prepare = Callable[[nn.Module], nn.Module | None]
Synchronous = Callable[[int], bool]


def local(tensor: Tensor) -> Tensor:
    """The part of a tensor that lives on this rank, without autograd."""
    plain = tensor.detach()
    return plain.to_local() if isinstance(plain, DTensor) else plain


def sharded_as(parameter: Tensor, part: Tensor) -> Tensor:
    """This rank's part of a tensor that is cut as `parameter` is; `part` itself where that is not cut."""
    if not isinstance(parameter, DTensor):
        return part
    return DTensor.from_local(
        part, parameter.device_mesh, parameter.placements, shape=parameter.shape, stride=parameter.stride()
    )


@dataclass
class Replica:
    """A module whose weights are a bank (or the master), and the groups that still read it."""

    module: nn.Module
    call: Callable[..., object]  # the module as `prepare` returned it: compiled, sharded
    parameters: list[nn.Parameter]
    weights: list[Tensor]  # the same storage, as plain local tensors
    shards: list[FSDPModule] = field(default_factory=list)  # its parts that FSDP2 shards
    readers: set[int] = field(default_factory=set)


@dataclass(frozen=True)
class Target:
    """A replica to write when z_index is ready, and whether it takes the master or the (corrected) bank."""

    replica: Replica
    read: Read


class Versions:
    """The weights of one stage: `master`, and a replica for each group that is under way."""

    def __init__(
        self,
        master: nn.Module,
        synchronous: Synchronous,
        *,
        delay: int = 1,
        bank_dtype: torch.dtype | None = None,
        prepare: Prepare | None = None,
        ready: Sequence[nn.Module] | None = None,
    ) -> None:
        """`ready`: the replicas themselves, laid out as the master is; else they are copies of it, each prepared before
        the next is made, so that one that is to be sharded is never whole beside another."""
        self.module = master
        self.delay = delay
        self.synchronous = synchronous
        self.names = [name for name, p in master.named_parameters() if p.requires_grad]
        caches = _caches(master)  # here, under their own names: `prepare` may wrap layers
        without_values = ready is not None or any(p.is_meta for p in master.parameters())
        self.replicas = (
            [_replica(copy.deepcopy(master), bank_dtype, prepare) for _ in range(delay + 1)]
            if ready is None
            else [_replica(module, None, None) for module in ready]
        )
        self.master = _replica(master, None, prepare)
        check_replicas(self.master, self.replicas, delay + 1, bank_dtype if ready is not None else None)
        if without_values:
            for replica in self.replicas:
                copy_fixed(self.master.module, replica.module)
        self.owned = list(range(len(self.names)))  # fewer where the optimizer is sharded
        self.partial = False  # the master holds what is owned, and nothing for the rest
        self._reading: dict[int, Replica] = {}
        self.buffers = [name for name, _ in master.named_buffers() if name not in caches]
        self._unchecked = [name for name in self.buffers if name not in _caches(master)]
        self.targets(0)
        self.spread()

    def spread(self) -> None:
        """Before the first group: every replica as the master is."""
        for replica in self.replicas:
            copy_(replica.weights, self.master.weights)

    def reads(self, group: int) -> Read:
        """What `group` reads: the master or the bank of an index."""
        return reads(group, self.synchronous, self.delay)

    def replica(self, group: int) -> Replica:
        """The replica that `group` reads; it has been published."""
        return self._reading[group]

    def release(self, group: int) -> None:
        """The last backward of `group` is done: nothing of it reads its replica any more."""
        replica = self._reading.pop(group)
        replica.readers.discard(group)
        refuse_changed_buffers(self._unchecked, self.module, replica.module)
        self._unchecked = []  # the first group tells

    def targets(self, index: int) -> list[Target]:
        """Where z_index and b_index go, and note their readers. Called once for each index, in order."""
        wanted: dict[Read, list[int]] = {}
        last = index + self.delay
        for group in range(index, last + 1):
            read = self.reads(group)
            if read.index == index:
                # b_0 is z_0, so the readers of both share a replica.
                wanted.setdefault(Read("master", 0) if index == 0 else read, []).append(group)
        found = []
        for read, groups in wanted.items():
            replica = next(r for r in self.replicas if not r.readers)
            replica.readers.update(groups)
            for group in groups:
                self._reading[group] = replica
            found.append(Target(replica, read))
        return found

    def banks(self) -> dict[int, Replica]:
        """The replica of each group that has its weights and is not finished."""
        return dict(self._reading)

    def apart(self, boundary: int) -> dict[int, Replica]:
        """A replica for each group from `boundary` on, shared with no other; what is not published yet has one too.

        Only at rest: a group in flight must not change its replica.
        """
        found: dict[int, Replica] = {}
        for group in range(boundary, boundary + self.delay + 1):
            replica = self._reading.get(group)
            if replica is None or any(replica is taken for taken in found.values()):
                free = next(
                    r
                    for r in self.replicas
                    if not r.readers and not any(r is taken for taken in found.values())
                )
                if replica is not None:
                    copy_(free.weights, replica.weights)
                    replica.readers.discard(group)
                    free.readers.add(group)
                    self._reading[group] = free
                replica = free
            found[group] = replica
        return found

    def restore(self, banks: dict[int, dict[int, Tensor]]) -> None:
        """Take saved banks (parameter -> tensor), by the group that reads them; groups that share one share a replica.

        A bank may be a replica's own memory, loaded in place: it stays where it is.
        """
        for replica in self.replicas:
            replica.readers.clear()
        self._reading = {}
        holders: dict[int, Replica] = {}
        for bank in {id(bank): bank for bank in banks.values()}.values():
            own = next((r for r in self.replicas if _same_memory(r.weights, bank)), None)
            if own is not None:
                holders[id(bank)] = own
        for group, bank in banks.items():
            if id(bank) not in holders:
                taken = list(holders.values())
                holders[id(bank)] = next(r for r in self.replicas if not any(r is held for held in taken))
            replica = holders[id(bank)]
            replica.readers.add(group)
            self._reading[group] = replica
            copy_([replica.weights[i] for i in bank], list(bank.values()))


def _same_memory(weights: Sequence[Tensor], bank: dict[int, Tensor]) -> bool:
    pairs = [(weights[i], tensor) for i, tensor in bank.items() if tensor.numel()]
    return bool(pairs) and all(own.data_ptr() == tensor.data_ptr() for own, tensor in pairs)


def check_replicas(
    master: Replica, replicas: Sequence[Replica], count: int, dtype: torch.dtype | None
) -> None:
    """Everything has values, and every replica is laid out as the master."""
    if len(replicas) != count:
        raise UserError(f"There are {len(replicas)} ready replicas; the delay calls for {count}.")
    for replica in (master, *replicas):
        for name, parameter in replica.module.named_parameters():
            if parameter.is_meta:
                raise UserError(
                    f"'{name}' is on the meta device still: it has no values. Let prepare shard the module, then "
                    "call to_empty and initialise it."
                )
    names = [name for name, p in master.module.named_parameters() if p.requires_grad]
    for replica in replicas:
        if [name for name, p in replica.module.named_parameters() if p.requires_grad] != names:
            raise UserError("A ready replica has other trainable parameters than the master.")
        for name, own, other in zip(names, master.parameters, replica.parameters, strict=True):
            if _laid_out(own) != _laid_out(other):
                raise UserError(
                    f"'{name}' is {_laid_out(own)} in the master and {_laid_out(other)} in a replica. Lay them out "
                    "alike."
                )
            if dtype is not None and other.dtype != dtype:
                raise UserError(f"'{name}' is {other.dtype} in a ready replica, and bank_dtype is {dtype}.")


def _laid_out(tensor: Tensor) -> tuple[object, ...]:
    shape = tuple(tensor.shape)
    return (shape, tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else (shape,)


@torch.no_grad()
def copy_fixed(master: nn.Module, replica: nn.Module) -> None:
    """Give a replica that was made without values what no update will give it: frozen parameters and buffers."""
    for own, other in zip(master.parameters(), replica.parameters(), strict=True):
        if not own.requires_grad:
            local(other).copy_(local(own))
    for own, other in zip(master.buffers(), replica.buffers(), strict=True):
        local(other).copy_(local(own))


def _caches(module: nn.Module) -> set[str]:
    """Buffers that the module itself does not save."""
    saved = module.state_dict()
    return {name for name, _ in module.named_buffers() if name not in saved}


def _trainable(module: nn.Module) -> list[nn.Parameter]:
    return [p for p in module.parameters() if p.requires_grad]


def _prepared(module: nn.Module, prepare: Prepare | None) -> Callable[..., object]:
    if prepare is None:
        return module
    prepared = prepare(module)
    return module if prepared is None else prepared


def _replica(module: nn.Module, bank_dtype: torch.dtype | None, prepare: Prepare | None) -> Replica:
    if bank_dtype is not None:
        for parameter in module.parameters():
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(bank_dtype)
    call = _prepared(module, prepare)
    parameters = _trainable(module)
    return Replica(module, call, parameters, [local(p) for p in parameters], sharded_modules(module))


@contextlib.contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Inside, `module` is in evaluation mode; afterwards each of its parts is in the mode it was in."""
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, training in modes:
            part.training = training


def split_shared(module: nn.Module) -> list[list[str]]:
    """Give every name its own Parameter and say which names were one: the tied weights inside this module.

    Tied weights are separate tensors at every depth: their gradients are summed by the update, not by autograd,
    whose order of summation would depend on where the model is cut.
    """
    names: dict[int, list[str]] = {}
    places: set[tuple[int, str]] = set()
    for name, parameter in module.named_parameters(remove_duplicate=False):
        path, _, leaf = name.rpartition(".")
        place = id(module.get_submodule(path)), leaf
        if place not in places:  # a module that is used twice holds its parameters once
            places.add(place)
            names.setdefault(id(parameter), []).append(name)
    ties = [shared for shared in names.values() if len(shared) > 1]
    for shared in ties:
        original = module.get_parameter(shared[0])
        for name in shared[1:]:
            path, _, leaf = name.rpartition(".")
            twin = nn.Parameter(original.detach().clone(), requires_grad=original.requires_grad)
            for marker, value in vars(original).items():  # such as a parameter's role
                setattr(twin, marker, value)
            setattr(module.get_submodule(path), leaf, twin)
    return ties


def check_layers(module: nn.Module) -> None:
    """Refuse layers that the rule cannot follow: batch statistics change in the forward, so a replica and a restart
    would each have their own, and sparse gradients have no norm, no reduction and no look-ahead."""
    for name, child in module.named_modules():
        name = name or type(child).__name__
        if getattr(child, "track_running_stats", False) and getattr(child, "running_mean", None) is not None:
            raise UserError(
                f"'{name}' changes its running statistics in the forward, which weight versions cannot follow. Use a "
                "norm without running statistics (LayerNorm, RMSNorm, GroupNorm) or track_running_stats=False."
            )
        if isinstance(child, nn.Embedding | nn.EmbeddingBag) and child.sparse:
            raise UserError(
                f"'{name}' makes sparse gradients, which the update does not take. Set sparse=False."
            )


def refuse_changed_buffers(names: Sequence[str], master: nn.Module, replica: nn.Module) -> None:
    """The same for any other module, once its forwards have run."""
    for name in names:
        before, after = master.get_buffer(name), replica.get_buffer(name)
        if not torch.equal(before, after) and not before.isnan().any():  # not a number is never equal
            raise UserError(
                f"The forward changed the buffer '{name}', which weight versions cannot follow: each copy of the "
                "module has its own. Keep it outside the module, or make it persistent=False if it is a cache."
            )
