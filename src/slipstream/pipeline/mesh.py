"""The peers of a rank in a pipeline x data mesh: reductions, tied weights, the global norm, sharded banks.

The norm: each stage fills its own slots of one float64 vector (zeros elsewhere), so that the sum over ranks adds
only zeros and is exact; every rank then sums the same slots. It travels between host processes (`board.py` on one
machine, gloo between several), where a wait for other stages holds no device. With a sharded optimizer (ZeRO-1)
each data rank owns whole parameters: gradients are reduced to the owner, and a bank is completed by broadcasts from
the owners in the bank's dtype.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from slipstream.errors import UserError
from slipstream.lists import copy_, mul_
from slipstream.pipeline.board import meet
from slipstream.pipeline.checks import check_ties
from slipstream.pipeline.peers import (
    Gradients,
    Heard,
    Steps,
    Tally,
    Wait,
    copy_first,
    hand_out,
    sum_present,
    to_host,
)
from slipstream.pipeline.versions import local


@dataclass(frozen=True)
class Layout:
    """Who holds what, as every rank knows it after one exchange at the start."""

    stage: int
    data_rank: int
    data_ranks: list[int]  # global ranks that hold this stage, in the order of their data ranks
    slots: list[int]  # number of parameters of each stage
    holders: dict[str, list[int]]  # tied weight -> stages that hold it
    pipeline_ranks: list[int]  # global ranks of this pipeline, by stage


class Mesh:
    """Implements `Peers` for one rank. `ties`: tied weight -> indices of this stage's parameters that hold it."""

    def __init__(
        self,
        parameters: Sequence[Tensor],
        ties: dict[str, list[int]],
        *,
        stage: int,
        stages: int,
        group: dist.ProcessGroup | None,
        data_group: dist.ProcessGroup | None,
        sharded: bool,
        presharded: bool,
        timeout_seconds: float,
    ) -> None:
        timeout = timedelta(seconds=timeout_seconds)
        sizes = [p.numel() for p in parameters]
        # What it takes to make a gradient, not the weights: a sharded master gives most of them back.
        self._forms = [(p.shape, p.dtype, p.device) for p in map(local, parameters)]
        shapes = {name: [tuple(parameters[i].shape) for i in indices] for name, indices in ties.items()}
        self.layout = _discover(len(sizes), shapes, stage, stages, group, data_group)
        self._ties = ties
        # Two updates can be under way, and ranks need not agree which of "gather of g" and "reduce of g+1" comes
        # first: on one group that would deadlock, on two each keeps its own order.
        self._reducing, self._gathering = (_like(data_group, timeout) for _ in range(2))
        self._degree = len(self.layout.data_ranks)
        self._presharded = presharded  # FSDP2: gradients arrive reduced, and in shards
        self._control = _control_group(group, data_group, timeout)
        self._board = meet(self._control, _numbers(self.layout), timeout_seconds)
        self._tie_groups = {
            name: _tie_group(self.layout, name, timeout)
            for name, stages_holding in sorted(self.layout.holders.items())
            if len(stages_holding) > 1
        }
        tied = {index for indices in ties.values() for index in indices}
        self.owner = _owners(sizes, tied, self._degree) if sharded else [self.layout.data_rank] * len(sizes)
        self.owned = [i for i, owner in enumerate(self.owner) if owner == self.layout.data_rank]
        self._sharded = sharded
        self.counted = [self._counts(index) for index in range(len(sizes))]

    def _counts(self, index: int) -> bool:
        for name, indices in self._ties.items():
            # A tied weight is one parameter: its first holder counts it.
            if index in indices and (
                self.layout.holders[name][0] != self.layout.stage or index != indices[0]
            ):
                return False
        if self._presharded:
            return True
        return index in self.owned if self._sharded else self.layout.data_rank == 0

    def reduce(self, grads: Gradients) -> Steps:
        if self._degree == 1 or self._presharded:
            return
        for index in range(len(grads)):
            grads[index] = self._present(grads, index)
        yield from self._over_data_ranks([grad for grad in grads if grad is not None])

    def _present(self, grads: Gradients, index: int) -> Tensor:
        """A gradient that others wait for; zeros where this rank has none (an expert that got no tokens)."""
        found, (shape, dtype, device) = grads[index], self._forms[index]
        return torch.zeros(shape, dtype=dtype, device=device) if found is None else found

    def _over_data_ranks(self, grads: list[Tensor]) -> Steps:
        buckets = []
        for owner in range(self._degree) if self._sharded else [None]:
            members = [g for g, o in zip(grads, self.owner, strict=True) if owner is None or o == owner]
            for flat, tensors in _flattened(members):
                if owner is None:
                    work = dist.all_reduce(flat, group=self._reducing, async_op=True)
                else:
                    target = self.layout.data_ranks[owner]
                    work = dist.reduce(flat, target, group=self._reducing, async_op=True)
                assert work is not None
                buckets.append((work, flat, tensors))
        for work, flat, tensors in buckets:
            yield work
            mul_([flat], 1.0 / self._degree)
            copy_(tensors, _unflattened(flat, tensors))

    def tie(self, grads: Gradients) -> Steps:
        for name, indices in sorted(self._ties.items()):
            total = sum_present([grads[index] for index in indices])
            if name in self._tie_groups and not (self._sharded and indices[0] not in self.owned):
                total = self._present(grads, indices[0]) if total is None else total.clone()
                work = dist.all_reduce(total, group=self._tie_groups[name], async_op=True)
                assert work is not None
                yield work
            hand_out(total, grads, indices)

    def exchange(self, squares: Tensor, tally: Tally) -> Generator[Wait, None, Heard]:
        mine = yield from to_host(squares)
        stages = len(self.layout.slots)
        count, offset = sum(self.layout.slots), sum(self.layout.slots[: self.layout.stage])
        vector = torch.zeros(_numbers(self.layout), dtype=torch.float64)
        vector[offset : offset + len(mine)] = torch.tensor(mine, dtype=torch.float64)
        vector[count] = float(tally.stop)
        if self.layout.data_rank == 0:
            vector[count + 1 + self.layout.stage] = tally.work_seconds
            vector[count + 1 + stages + self.layout.stage] = tally.link_seconds
        yield self._sum_over_ranks(vector)
        numbers = vector.tolist()
        rest = numbers[count + 1 :]
        return Heard(numbers[:count], numbers[count] > 0, rest[:stages], rest[stages:])

    def _sum_over_ranks(self, vector: Tensor) -> Wait:
        if self._board is not None:
            return self._board.all_reduce(vector)
        work = dist.all_reduce(vector, group=self._control, async_op=True)
        assert work is not None
        return work

    def gather(self, weights: Sequence[Tensor]) -> Steps:
        if not self._sharded or self._degree == 1:
            return
        buckets = []
        for owner in range(self._degree):
            members = [w for w, o in zip(weights, self.owner, strict=True) if o == owner]
            for flat, tensors in _flattened(members):
                source = self.layout.data_ranks[owner]
                work = dist.broadcast(flat, source, group=self._gathering, async_op=True)
                assert work is not None
                buckets.append((work, flat, tensors, owner))
        for work, flat, tensors, owner in buckets:
            yield work
            if owner != self.layout.data_rank:
                copy_(tensors, _unflattened(flat, tensors))

    def agree(self, weights: Sequence[Tensor]) -> None:
        if self._degree > 1 and not self._presharded:
            for weight in weights:
                _broadcast(weight, self.layout.data_ranks[0], self._gathering)
        for name, indices in sorted(self._ties.items()):
            if name in self._tie_groups:
                source = self.layout.pipeline_ranks[self.layout.holders[name][0]]
                _broadcast(weights[indices[0]], source, self._tie_groups[name])
            copy_first(weights, indices)


def _numbers(layout: Layout) -> int:
    """The length of what a rank tells in an update: squared norms, a wish to stop, two times of each stage."""
    return sum(layout.slots) + 1 + 2 * len(layout.slots)


def _discover(
    count: int,
    ties: dict[str, list[tuple[int, ...]]],
    stage: int,
    stages: int,
    group: dist.ProcessGroup | None,
    data_group: dist.ProcessGroup | None,
) -> Layout:
    """`ties`: tied weight -> the shapes of this stage's parameters that hold it."""
    told: list[Any] = [None] * stages
    dist.all_gather_object(told, (stage, count, ties, dist.get_rank()), group=group)
    told.sort(key=lambda entry: entry[0])
    if [entry[0] for entry in told] != list(range(stages)):
        raise UserError(
            f"The ranks of this pipeline hold stages {[entry[0] for entry in told]}, not 0 to {stages - 1}."
        )
    holders: dict[str, list[int]] = {}
    for index, _, held, _ in told:
        for name in held:
            holders.setdefault(name, []).append(index)
    check_ties([held for _, _, held, _ in told])
    data_ranks = [dist.get_rank()] if data_group is None else dist.get_process_group_ranks(data_group)
    return Layout(
        stage=stage,
        data_rank=data_ranks.index(dist.get_rank()),
        data_ranks=data_ranks,
        slots=[entry[1] for entry in told],
        holders=holders,
        pipeline_ranks=[entry[3] for entry in told],
    )


def _control_group(
    group: dist.ProcessGroup | None, data_group: dist.ProcessGroup | None, timeout: timedelta
) -> dist.ProcessGroup:
    """A host-side group over all pipelines of the mesh, so that they agree on stops, skips and sharded norms."""
    ranks = [dist.get_rank()] if data_group is None else dist.get_process_group_ranks(data_group)
    rows: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(rows, ranks, group=group)
    return new_group(sorted({rank for row in rows for rank in row}), timeout)


def _tie_group(layout: Layout, name: str, timeout: timedelta) -> dist.ProcessGroup:
    """The holders' group. Torch names a group by how many this rank has made, so the others make one as well."""
    holders = [layout.pipeline_ranks[stage] for stage in layout.holders[name]]
    own = layout.pipeline_ranks[layout.stage]
    return new_group(holders if own in holders else [own], timeout, backend=None)


def _like(group: dist.ProcessGroup | None, timeout: timedelta) -> dist.ProcessGroup | None:
    """Another group of the same ranks and backend."""
    if group is None:
        return None
    return new_group(dist.get_process_group_ranks(group), timeout, dist.get_backend(group))


def new_group(ranks: list[int], timeout: timedelta, backend: str | None = "gloo") -> dist.ProcessGroup:
    """A group that only its members have to make."""
    made = dist.new_group(ranks, timeout=timeout, backend=backend, use_local_synchronization=True)
    assert isinstance(made, dist.ProcessGroup)
    return made


def _owners(sizes: Sequence[int], tied: set[int], degree: int) -> list[int]:
    """Whole parameters to data ranks, largest first to the least loaded; tied ones to rank 0 on every stage."""
    loads = [0] * degree
    owner = [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda i: (i not in tied, -sizes[i], i)):
        owner[index] = 0 if index in tied else loads.index(min(loads))
        loads[owner[index]] += sizes[index]
    return owner


def _broadcast(weight: Tensor, source: int, group: dist.ProcessGroup | None) -> None:
    value = weight.detach().contiguous()
    dist.broadcast(value, source, group=group)
    weight.copy_(value)


def _flattened(tensors: Sequence[Tensor]) -> list[tuple[Tensor, list[Tensor]]]:
    """One flat copy per dtype, with the tensors it was made from."""
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        by_dtype.setdefault(tensor.dtype, []).append(tensor)
    return [(torch.cat([t.reshape(-1) for t in members]), members) for members in by_dtype.values()]


def _unflattened(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    parts = flat.split([tensor.numel() for tensor in like])
    return [part.view(tensor.shape) for part, tensor in zip(parts, like, strict=True)]
