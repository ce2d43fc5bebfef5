"""A master without memory of its own: bfloat16 weights that are there anyway, and 16 bits that make them float32.

The upper half of z_g is the replica that the fresh part of a group reads; this file keeps the lower one. An update
makes the master whole a bucket at a time, steps it, publishes from it and takes it apart again: 4 bytes of each
parameter become 2, and what error feedback extrapolates from is a bucket instead of a model. It takes an optimizer that
may be stepped for some parameters and then for others (`steps_apart`).

How a float32 is cut is `kernels/halves.py`'s. Every copy of a float32 master into bfloat16 weights is rounded as the
upper half is, so a master in halves and a plain one give the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer

from slipstream.errors import UserError
from slipstream.kernels.halves import join, split
from slipstream.lists import copy_
from slipstream.optim.muon import Muon
from slipstream.pipeline.replica import Replica
from slipstream.torch_late import is_dtensor
from slipstream.torch_private import has_step_hooks

BUCKET_ELEMENTS = 1 << 24
MOST_BUCKETS = 16  # of a large stage: more would only make matrices of one shape miss each other
STEPS_APART = (torch.optim.AdamW, torch.optim.Adam, torch.optim.NAdam, torch.optim.SGD)


@dataclass(frozen=True)
class Halves:
    """A float32 tensor as it is kept."""

    high: Tensor
    low: Tensor

    def whole(self) -> Tensor:
        """In memory of its own."""
        found = torch.empty(self.high.shape, dtype=torch.float32, device=self.high.device)
        join([self.high], [self.low], [found])
        return found


def whole(value: Tensor | Halves) -> Tensor:
    """A captured tensor, put together if it is in halves."""
    return value.whole() if isinstance(value, Halves) else value


class Compact:
    """The lower halves of the parameters that this rank owns, and where the upper ones are."""

    def __init__(self, master: Replica, owned: Sequence[int], high: Replica) -> None:
        """`high` holds the same weights as the master."""
        self._master = master
        self.high = high  # the replica that holds z
        self._low = {i: torch.empty_like(master.weights[i], dtype=torch.int16) for i in owned}
        self._buckets = list(_buckets([(i, master.weights[i]) for i in owned]))
        self.intact = True  # the halves are one version: not inside an update
        self._whole: set[int] = set()  # those that are not in halves now
        self.close(list(owned), high)

    def kept(self, index: int) -> Halves | Tensor:
        """A weight as it is in memory now."""
        if index in self._whole:
            return self._master.weights[index]
        return Halves(self.high.weights[index], self._low[index])

    def make_whole(self) -> None:
        """All that is owned, until `take_apart`. The halves give their memory to it, so it takes no more than they."""
        try:
            for bucket in self._buckets:
                self.open(bucket)
                self._whole.update(bucket)
                self.high.free(bucket)
                for i in bucket:
                    self._low[i].untyped_storage().resize_(0)
        except Exception:  # no room for one of them: none is lost
            self.take_apart()
            raise

    def take_apart(self) -> None:
        for bucket in self._buckets:
            if self._whole.issuperset(bucket):
                for i in bucket:
                    self._low[i].untyped_storage().resize_(self._low[i].nbytes)
                self.close(bucket, self.high)
                self._whole.difference_update(bucket)

    def opened(self, high: Replica) -> Iterator[list[int]]:
        """The master bucket by bucket, whole while the caller has it; afterwards `high` is its upper half."""
        self.intact = False
        for bucket in self._buckets:
            self.open(bucket)
            yield bucket
            self.close(bucket, high)
        self.high = high
        self.intact = True

    def repeat(self, high: Replica, others: Sequence[Replica]) -> None:
        """The newest weights once more, in `high` and in others: no step was made."""
        for replica in (high, *others):
            if replica is not self.high:
                indices = list(self._low)
                replica.allocate(indices)
                copy_([replica.weights[i] for i in indices], [self.high.weights[i] for i in indices])
        self.high = high

    def open(self, indices: Sequence[int]) -> None:
        """Make a part of the master whole."""
        self._master.allocate(indices)
        wholes = [self._master.weights[i] for i in indices]
        join([self.high.weights[i] for i in indices], [self._low[i] for i in indices], wholes)

    def close(self, indices: Sequence[int], high: Replica) -> None:
        """Take it apart, the upper half into `high`."""
        high.allocate(indices)
        wholes = [self._master.weights[i] for i in indices]
        split(wholes, [high.weights[i] for i in indices], [self._low[i] for i in indices])
        self._master.free(indices)

    def lose(self) -> None:
        """The master is no number, and needs no memory for that: reading what was freed would be a crash."""
        for i in self._low:
            parameter = self._master.parameters[i]
            nothing = torch.full((), torch.nan, dtype=parameter.dtype, device=parameter.device)
            parameter.data = nothing.expand(parameter.shape)

    def take(self, tensors: Mapping[int, Tensor], high: Replica) -> None:
        """Be these weights; `high` is written too."""
        if self._whole:
            raise UserError("A state cannot be loaded inside gathered_master().")
        self.high = high
        for i, tensor in tensors.items():
            split([tensor.to(high.weights[i].device)], [high.weights[i]], [self._low[i]])


def _buckets(tensors: Sequence[tuple[int, Tensor]]) -> Iterator[list[int]]:
    """Indices; equal shapes side by side, as Muon stacks them."""
    total = sum(tensor.numel() for _, tensor in tensors)
    limit = max(BUCKET_ELEMENTS, total // MOST_BUCKETS)
    bucket: list[int] = []
    filled = 0
    for i, tensor in sorted(tensors, key=lambda pair: tuple(pair[1].shape)):
        if bucket and filled + tensor.numel() > limit:
            yield bucket
            bucket, filled = [], 0
        bucket.append(i)
        filled += tensor.numel()
    if bucket:
        yield bucket


def steps_apart(optimizer: Optimizer) -> bool:
    """Whether a step for some parameters and another for the rest is a step for all of them."""
    return isinstance(optimizer, Muon) or (type(optimizer) in STEPS_APART and not has_step_hooks(optimizer))


def not_compact(
    master: Replica, replicas: Sequence[Replica], optimizer: Optimizer, mixed: bool, on_pieces: bool
) -> str | None:
    """Why a master cannot be kept in halves, and what to change; None where it can. `mixed`: a group has an old part
    and a fresh one; `on_pieces`: the correction takes each element for itself."""
    if not mixed:
        return (
            "the fresh part of a group reads the master's upper half, and with this cutover no group has both an old "
            "part and a fresh one. Set cutover between 1 and m - 1."
        )
    if any(is_dtensor(p) for p in master.parameters):
        return "its parameters are sharded (DTensor)."
    for replica in replicas:
        for parameter, own in zip(replica.parameters, master.parameters, strict=True):
            if (own.dtype, parameter.dtype) != (torch.float32, torch.bfloat16):
                return (
                    f"it takes a float32 module with bfloat16 banks, not {own.dtype} with {parameter.dtype}. Set "
                    "bank_dtype=torch.bfloat16."
                )
    for weight in master.weights:
        if 0 not in weight.stride() and weight.untyped_storage().nbytes() != weight.nbytes:
            return "its parameters share memory with other tensors."
    if not steps_apart(optimizer):
        return (
            f"some parameters are stepped and then others, which {type(optimizer).__name__} does not allow, or it has "
            "step hooks. Use muon, adamw, nadamw or sgd without hooks."
        )
    return None if on_pieces else "the correction measures whole tensors. Use error_feedback."
