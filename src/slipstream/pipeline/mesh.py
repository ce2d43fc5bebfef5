"""The peers of a rank in a pipeline x data x tensor mesh: reductions, tied weights, the global norm, sharded banks.

Every decision about a parameter is its row in the table of placements (`placement.py`); this file only carries the
rows out. The norm: each stage fills its own slots of one float64 vector (zeros elsewhere, and where another rank counts
the piece), so that the sum over ranks is that of each piece once; every rank then sums the same slots. It travels
between host processes (`board.py` on one machine, gloo between several), where a wait for other stages holds no device.
With a sharded optimizer (ZeRO-1) each data rank owns whole parameters: gradients are reduced to the owner, and a bank
is completed by broadcasts from the owners in the bank's dtype. Tensors travel as they are; only small ones are packed
(`buckets.py`).
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
from slipstream.lists import mul_
from slipstream.pipeline.board import meet
from slipstream.pipeline.buckets import Bucket, buckets
from slipstream.pipeline.checks import check_ties, held_ties
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
from slipstream.pipeline.placement import Grid, Placement, Ranks
from slipstream.pipeline.versions import local


@dataclass(frozen=True)
class Layout:
    """Who holds what, as every rank knows it after one exchange at the start."""

    stage: int
    speaks: bool  # for its stage, where one rank's word is enough
    ranks: list[int]  # global ranks that hold this stage
    slots: list[int]  # number of parameters of each stage
    holders: dict[str, list[int]]  # tied weight -> stages that hold it
    pipeline_ranks: list[int]  # global ranks of this pipeline, by stage
    groups: int  # the most groups to average over that any stage has


class Mesh:
    """Implements `Peers` for one rank. `ties`: tied weight -> indices of this stage's parameters that hold it."""

    def __init__(
        self,
        parameters: Sequence[Tensor],
        ties: dict[str, list[int]],
        rows: Sequence[Placement],
        grid: Grid,
        *,
        stage: int,
        stages: int,
        group: dist.ProcessGroup | None,
        data_group: dist.ProcessGroup | None,
        timeout_seconds: float,
        summed: bool = False,
    ) -> None:
        timeout = timedelta(seconds=timeout_seconds)
        # What it takes to make a gradient, not the weights: a sharded master gives most of them back.
        self._forms = [(p.shape, p.dtype, p.device) for p in map(local, parameters)]
        self._rows, self._grid, self._ties = list(rows), grid, ties
        held = held_ties(parameters, ties, rows)
        over: list[Ranks] = sorted(
            ranks for ranks in {grid.data, *(row.averaged_over for row in rows)} if len(ranks) > 1
        )
        self.layout = _discover(len(rows), held, stage, stages, group, data_group, grid, len(over))
        # Two updates can be under way, and ranks need not agree which of "gather of g" and "reduce of g+1" comes
        # first: on one group that would deadlock, on two each keeps its own order.
        self._reducing = {ranks: new_group(list(ranks), timeout, grid.backend) for ranks in over}
        for _ in range(self.layout.groups - len(over)):  # a group's name counts those its ranks made before
            new_group([grid.rank], timeout)
        self._gathering = _several(grid.data, timeout, grid.backend)
        self._tensor = _several(grid.tensor, timeout, grid.backend)
        self._control = _control_group(group, self.layout.ranks, timeout)
        self._board = meet(self._control, _numbers(self.layout), timeout_seconds)
        self._tie_groups = {
            name: _tie_group(self.layout, name, timeout)
            for name, stages_holding in sorted(self.layout.holders.items())
            if len(stages_holding) > 1
        }
        self._summed = summed
        self._here = grid.data.index(grid.rank)
        self._sharded = any(row.owner >= 0 for row in rows)
        self.owned = [i for i, row in enumerate(rows) if row.owner in (-1, self._here)]
        self.counted = [row.counted and not self._counted_elsewhere(i) for i, row in enumerate(rows)]

    def _counted_elsewhere(self, index: int) -> bool:
        """A tied weight is one parameter: its first holder counts it."""
        return any(
            index in indices and (self.layout.holders[name][0] != self.layout.stage or index != indices[0])
            for name, indices in self._ties.items()
        )

    def reduce(self, grads: Gradients) -> Steps:
        under_way: list[tuple[dist.Work, Bucket, int]] = []
        for ranks, group in self._reducing.items():
            rows = [i for i, row in enumerate(self._rows) if row.averaged_over == ranks]
            for index in rows:
                grads[index] = self._present(grads, index)
            for owner in sorted({self._rows[index].owner for index in rows}):
                members = [g for i in rows if self._rows[i].owner == owner and (g := grads[i]) is not None]
                for bucket in buckets(members):
                    if owner < 0:
                        work = dist.all_reduce(bucket.flat, group=group, async_op=True)
                    else:
                        work = dist.reduce(bucket.flat, ranks[owner], group=group, async_op=True)
                    assert work is not None
                    under_way.append((work, bucket, len(ranks)))
        for work, bucket, degree in under_way:
            yield work
            if not self._summed:
                mul_([bucket.flat], 1.0 / degree)
            bucket.unpack()

    def _present(self, grads: Gradients, index: int) -> Tensor:
        """A gradient that others wait for; zeros where this rank has none (an expert that got no tokens)."""
        found, (shape, dtype, device) = grads[index], self._forms[index]
        return torch.zeros(shape, dtype=dtype, device=device) if found is None else found

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
        if self.layout.speaks:
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
        if not self._sharded or len(self._grid.data) == 1:
            return
        under_way: list[tuple[dist.Work, Bucket, int]] = []
        for owner, source in enumerate(self._grid.data):
            for bucket in buckets(
                [w for w, row in zip(weights, self._rows, strict=True) if row.owner == owner]
            ):
                work = dist.broadcast(bucket.flat, source, group=self._gathering, async_op=True)
                assert work is not None
                under_way.append((work, bucket, owner))
        for work, bucket, owner in under_way:
            yield work
            if owner != self._here:
                bucket.unpack()

    def agree(self, weights: Sequence[Tensor]) -> None:
        for axis in range(2):  # over data ranks, then over tensor ranks
            for weight, row in zip(weights, self._rows, strict=True):
                ranks = row.begins_over[axis] if axis < len(row.begins_over) else ()
                if len(ranks) > 1:
                    _broadcast(weight, ranks[0], self._starting(ranks))
        for name, indices in sorted(self._ties.items()):
            if name in self._tie_groups:
                source = self.layout.pipeline_ranks[self.layout.holders[name][0]]
                _broadcast(weights[indices[0]], source, self._tie_groups[name])
            copy_first(weights, indices)

    def _starting(self, ranks: Ranks) -> dist.ProcessGroup | None:
        return self._reducing.get(ranks) or self._tensor


def _numbers(layout: Layout) -> int:
    """The length of what a rank tells in an update: squared norms, a wish to stop, two times of each stage."""
    return sum(layout.slots) + 1 + 2 * len(layout.slots)


def _discover(
    count: int,
    ties: dict[str, list[tuple[tuple[int, ...], str]]],
    stage: int,
    stages: int,
    group: dist.ProcessGroup | None,
    data_group: dist.ProcessGroup | None,
    grid: Grid,
    groups: int,
) -> Layout:
    """`ties`: tied weight -> shapes and layouts of this stage's parameters that hold it."""
    told: list[Any] = [None] * stages
    sizes = len(grid.data), len(grid.tensor)
    dist.all_gather_object(told, (stage, count, ties, dist.get_rank(), groups, sizes), group=group)
    told.sort(key=lambda entry: entry[0])
    if [entry[0] for entry in told] != list(range(stages)):
        raise UserError(
            f"The ranks of this pipeline hold stages {[entry[0] for entry in told]}, not 0 to {stages - 1}."
        )
    if other := next((entry for entry in told if entry[5] != sizes), None):
        raise UserError(
            f"Stage {stage} is held by {sizes[0]} data x {sizes[1]} tensor ranks, stage {other[0]} by {other[5][0]} x "
            f"{other[5][1]}. Give mesh= on every stage, with the same dimensions."
        )
    holders: dict[str, list[int]] = {}
    for index, _, held, *_ in told:
        for name in held:
            holders.setdefault(name, []).append(index)
    check_ties([held for _, _, held, *_ in told])
    ranks = _stage_ranks(grid, data_group)
    return Layout(
        stage=stage,
        speaks=grid.rank == ranks[0],
        ranks=ranks,
        slots=[entry[1] for entry in told],
        holders=holders,
        pipeline_ranks=[entry[3] for entry in told],
        groups=max(entry[4] for entry in told),
    )


def _stage_ranks(grid: Grid, data_group: dist.ProcessGroup | None) -> list[int]:
    """All ranks that hold this stage: the tensor ranks of all data ranks."""
    if grid.all:
        return sorted(grid.all)
    rows: list[Any] = [grid.tensor]
    if data_group is not None:
        rows = [None] * len(grid.data)
        dist.all_gather_object(rows, grid.tensor, group=data_group)
    return sorted({rank for row in rows for rank in row})


def _control_group(
    group: dist.ProcessGroup | None, ranks: list[int], timeout: timedelta
) -> dist.ProcessGroup:
    """A host-side group over all pipelines of the mesh, so that they agree on stops, skips and sharded norms."""
    rows: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(rows, ranks, group=group)
    return new_group(sorted({rank for row in rows for rank in row}), timeout)


def _tie_group(layout: Layout, name: str, timeout: timedelta) -> dist.ProcessGroup:
    """The holders' group. Torch names a group by how many this rank has made, so the others make one as well."""
    holders = [layout.pipeline_ranks[stage] for stage in layout.holders[name]]
    own = layout.pipeline_ranks[layout.stage]
    return new_group(holders if own in holders else [own], timeout, backend=None)


def _several(ranks: Ranks, timeout: timedelta, backend: str | None) -> dist.ProcessGroup | None:
    return new_group(list(ranks), timeout, backend) if len(ranks) > 1 else None


def new_group(ranks: list[int], timeout: timedelta, backend: str | None = "gloo") -> dist.ProcessGroup:
    """A group that only its members have to make."""
    made = dist.new_group(ranks, timeout=timeout, backend=backend, use_local_synchronization=True)
    assert isinstance(made, dist.ProcessGroup)
    return made


def _broadcast(weight: Tensor, source: int, group: dist.ProcessGroup | None) -> None:
    value = weight.detach().contiguous()
    dist.broadcast(value, source, group=group)
    weight.copy_(value)
