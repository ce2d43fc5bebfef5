"""A copy of a stage's module whose weights are one version, and what it takes to make one as `prepare` wants it.

FSDP2 has to be told when to reduce gradients and when to give weights back. A bank does not change while a group reads
it, so its weights are gathered once: they stay whole from one microbatch to the next (unless the user chose
`reshard_after_forward`) and are given back after the group's last backward, before the next bank is written into them.
Weights that stay whole beyond that would be read again, stale.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from slipstream.errors import UserError
from slipstream.optim.sharded import local
from slipstream.torch_late import is_dtensor, is_fsdp

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

Prepare = Callable[[nn.Module], nn.Module | None]
_DICTS = (dict, OrderedDict)
Part = tuple[int, bool]  # of a group: its number, whether it is the fresh part (z_g) or the old one (a bank)


def sharded_as(parameter: Tensor, part: Tensor) -> Tensor:
    """This rank's part of a tensor that is cut as `parameter` is; `part` itself where that is not cut."""
    if not is_dtensor(parameter):
        return part
    return type(parameter).from_local(
        part, parameter.device_mesh, parameter.placements, shape=parameter.shape, stride=parameter.stride()
    )


@dataclass
class Replica:
    """A module whose weights are a bank (or the master), and the parts of groups that still read it."""

    module: nn.Module
    call: Callable[..., object]  # the module as `prepare` returned it: compiled, sharded
    parameters: list[nn.Parameter]
    weights: list[Tensor]  # the same storage, as plain local tensors
    shards: list[FSDPModule] = field(default_factory=list)  # its parts that FSDP2 shards
    readers: set[Part] = field(default_factory=set)
    freed: dict[int, int] = field(default_factory=dict)  # bytes of a weight's storage while it has none
    spent: bool = False  # no microbatch to come reads what it holds

    @property
    def owns_memory(self) -> bool:
        """Whether each weight has a storage to itself, which may be given back; views of one buffer have not, and
        weights that are recorded stay where they are."""
        if getattr(self.call, "fixed_addresses", False):
            return False
        return all(weight.untyped_storage().nbytes() == weight.nbytes for weight in self.weights)

    def free(self, indices: Iterable[int] | None = None) -> None:
        """Give the memory of weights back (all: None); the tensors stay, and mean nothing until they are written."""
        for i in range(len(self.weights)) if indices is None else indices:
            storage = self.weights[i].untyped_storage()
            if i not in self.freed and storage.nbytes():
                self.freed[i] = storage.nbytes()
                storage.resize_(0)

    def allocate(self, indices: Iterable[int] | None = None) -> None:
        for i in list(self.freed) if indices is None else indices:
            if i in self.freed:
                self.weights[i].untyped_storage().resize_(self.freed.pop(i))


def copied(module: nn.Module) -> nn.Module:
    """A deep copy. Most of what a module holds are empty dicts, for hooks it has not: they are copied here, which takes
    half the time."""
    held = [value for part in module.modules() for value in vars(part).values()]
    try:
        return copy.deepcopy(
            module, {id(each): type(each)() for each in held if type(each) in _DICTS and not each}
        )
    except (TypeError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "deepcopy" not in str(error):
            raise  # the module is not to blame: there is no memory, say
        raise UserError(
            f"The module cannot be copied, and each weight version is a copy: {error}. Hand in the plain module, "
            "unwrapped, without locks, groups or files, and with parametrizations in the place of the old weight_norm."
        ) from error


def blank_like(replica: Replica) -> Replica:
    """Memory for one more set of weights, of zeros, that no forward reads."""
    parameters = [nn.Parameter(torch.zeros_like(p), requires_grad=False) for p in replica.parameters]
    return Replica(replica.module, replica.call, parameters, [local(p) for p in parameters])


def check_replicas(
    master: Replica, replicas: Sequence[Replica], count: int, dtype: torch.dtype | None
) -> None:
    """Everything has values, and every replica is laid out as the master."""
    if len(replicas) != count:
        raise UserError(
            f"There are {len(replicas)} ready replicas; the delay, the cutover and the correction call for {count}."
        )
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
    return (shape, tensor.device_mesh, tensor.placements) if is_dtensor(tensor) else (shape,)


@torch.no_grad()
def copy_fixed(master: nn.Module, replica: nn.Module) -> None:
    """Give a replica that was made without values what no update will give it: frozen parameters and buffers."""
    for own, other in zip(master.parameters(), replica.parameters(), strict=True):
        if not own.requires_grad:
            local(other).copy_(local(own))
    for own, other in zip(master.buffers(), replica.buffers(), strict=True):
        local(other).copy_(local(own))


def caches(module: nn.Module) -> set[str]:
    """Buffers that the module itself does not save."""
    saved = module.state_dict()
    return {name for name, _ in module.named_buffers() if name not in saved}


def make_replica(module: nn.Module, bank_dtype: torch.dtype | None, prepare: Prepare | None) -> Replica:
    if bank_dtype is not None:
        for parameter in module.parameters():
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(bank_dtype)
    prepared = None if prepare is None else prepare(module)
    call = module if prepared is None else prepared
    parameters = [p for p in module.parameters() if p.requires_grad]
    # The root need not be one that `fully_shard` was applied to.
    shards: list[FSDPModule] = [part for part in module.modules() if is_fsdp(part)]
    return Replica(module, call, parameters, [local(p) for p in parameters], shards)


def before_backward(modules: Sequence[FSDPModule], last: bool) -> None:
    """Gradients are reduced, and weights given back, in the backward of a group's last microbatch only."""
    for module in modules:
        module.set_is_last_backward(last)
        module.set_requires_gradient_sync(last, recurse=False)
        module.set_reshard_after_backward(last, recurse=False)


def give_back(modules: Sequence[FSDPModule]) -> None:
    """Free the whole weights; the next forward gathers what is written into the shards by then."""
    for module in modules:
        module.reshard()


def sum_gradients(modules: Sequence[FSDPModule]) -> None:
    """Over data ranks, where the loss has been divided by the global number of tokens already."""
    for module in modules:
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # gloo cannot scale on the way
