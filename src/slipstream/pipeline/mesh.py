"""The peers of a rank in a pipeline x data x tensor mesh: reductions, tied weights, the global norm, sharded banks.

Every decision about a parameter is its row in the table of placements (`placement.py`); this file only carries the
rows out. The norm: each stage fills its own slots of one float64 vector (zeros elsewhere, and where another rank counts
the piece), so that the sum over ranks is that of each piece once; every rank then sums the same slots. It travels
between host processes (`host_sum.py`, or gloo for very many), where a wait for other stages holds no device.
With a sharded optimizer (ZeRO-1) each data rank owns whole parameters: gradients are reduced to the owner, and a bank
is completed by broadcasts from the owners in the bank's dtype.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from slipstream.distributed import wires
from slipstream.distributed.groups import Group, Groups, Wait
from slipstream.lists import mul_
from slipstream.optim.sharded import local
from slipstream.pipeline.agreement import Told, check_agree, check_alike, check_group, names_repeat
from slipstream.pipeline.attendant import Attendant
from slipstream.pipeline.checks import check_ties, held_ties
from slipstream.pipeline.host_sum import HostSum, suits
from slipstream.pipeline.peers import (
    Bucket,
    Gradients,
    Peers,
    RankStatus,
    RunStatus,
    Steps,
    assign_tied,
    buckets,
    copy_first,
    sum_present,
    to_host,
    waiting,
)
from slipstream.pipeline.placement import Grid, Placement, Ranks, grid_of, owned_rows, place
from slipstream.pipeline.ties import TieGroup
from slipstream.pipeline.torch_stage import StageInfo
from slipstream.pipeline.versions import Versions

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def peers_of(
    stage: StageInfo,
    versions: Versions,
    ties: dict[str, list[str]],
    mesh: DeviceMesh | None,
    data_group: dist.ProcessGroup | None,
    *,
    settings: dict[str, object],
    shard_optimizer: bool,
    summed: bool,
    gradient_dtype: torch.dtype | None,
    timeout_seconds: float,
) -> tuple[Peers, list[Placement]]:
    """The peers of a stage's rank, with a row for each of its trainable parameters. `settings`: what all ranks must
    have been told alike. `summed`: of gradients over data ranks their sum is taken, not their mean."""
    names, parameters = versions.names, versions.master.parameters
    by_name: dict[str, Tensor] = dict(zip(names, parameters, strict=True))
    grid = grid_of(by_name, mesh, data_group)
    rows = place([versions.module], by_name, grid)
    indices = {key: [names.index(name) for name in held] for key, held in ties.items()}
    if shard_optimizer:
        rows = owned_rows(rows, [p.numel() for p in parameters], indices, grid)
    if stage.count == 1 and grid.alone:
        check_ties([held_ties(parameters, indices, rows)])
        return Peers(len(rows), list(indices.values())), rows
    made = Mesh(
        parameters, indices, rows, grid, stage=stage.index, stages=stage.count, group=stage.group,
        data_group=data_group, device=stage.device, summed=summed, gradient_dtype=gradient_dtype,
        timeout_seconds=timeout_seconds, names=names, settings=settings,
    )  # fmt: skip
    return made, rows


_TOLD = 6  # numbers of a stage in an update: of work, of its link, of lateness, of room, its last update and its time


@dataclass(frozen=True)
class Holdings:
    """Who holds what, as every rank knows it after one exchange at the start."""

    stage: int
    speaks: bool  # for its stage, where one rank's word is enough
    ranks: list[int]  # global ranks that hold this stage
    slots: list[int]  # number of parameters of each stage
    holders: dict[str, list[int]]  # tied weight -> stages that hold it
    pipeline_ranks: list[int]  # global ranks of this pipeline, by stage
    names_repeat: bool  # from stage to stage, for different weights


class Mesh(Peers):
    """Those of one rank. `ties`: tied weight -> indices of this stage's parameters that hold it."""

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
        device: torch.device,
        timeout_seconds: float,
        summed: bool = False,
        gradient_dtype: torch.dtype | None = None,
        names: Sequence[str] = (),
        settings: dict[str, object] | None = None,
    ) -> None:
        # What it takes to make a gradient, not the weights: a sharded master gives most of them back.
        self._forms = [(p.shape, gradient_dtype or p.dtype, p.device) for p in map(local, parameters)]
        self._rows, self._grid, self._ties = list(rows), grid, ties
        self._timeout_seconds = timeout_seconds
        of_weight = {index: name for name, indices in ties.items() for index in indices}
        told = Told(
            stage,
            dist.get_rank(),
            (len(grid.data), len(grid.tensor)),
            {name: of_weight.get(index) for index, name in enumerate(names)},
            held_ties(parameters, ties, rows),
            settings or {},
        )
        self.holdings = _discover(told, len(rows), stages, group, data_group, grid)
        self.names_repeat = self.holdings.names_repeat
        self.groups = groups = Groups.handshake([group, *grid.spanning], device, timeout_seconds)
        # Reductions and gathers share a group: updates follow one another, so all ranks use it in one order.
        over: list[Ranks] = sorted(
            ranks for ranks in {grid.data, *(row.averaged_over for row in rows)} if len(ranks) > 1
        )
        self._over = {ranks: groups.device(f"over/{_joined(ranks)}", ranks) for ranks in over}
        several = len(grid.tensor) > 1
        self._tensor = groups.device(f"tensor/{_joined(grid.tensor)}", grid.tensor) if several else None
        everyone = _everyone(group, self.holdings.ranks)
        self._host_sum: HostSum | None = None
        self._control: Group | None = None
        if suits(len(everyone), _numbers(self.holdings)):
            others = [rank for rank in everyone if rank != dist.get_rank()]
            found = wires.connect(groups.scope.under("host_sum"), dist.get_rank(), others, timeout_seconds)
            self._host_sum = HostSum(dist.get_rank(), found, timeout_seconds)
        else:
            self._control = groups.host("control", everyone)
        self._tie_groups = {
            name: TieGroup(
                name, [self.holdings.pipeline_ranks[each] for each in holding], groups, timeout_seconds
            )
            for name, holding in sorted(self.holdings.holders.items())
            if len(holding) > 1 and stage in holding
        }
        # FSDP and tensor parallelism queue collectives of their own in every microbatch.
        self.in_step = groups.kind == "nccl" and any(row.cut for row in rows)
        self._summed = summed
        self._here = grid.data.index(grid.rank)
        self.sharded = any(row.owner >= 0 for row in rows)
        self.owned = [i for i, row in enumerate(rows) if row.owner in (-1, self._here)]
        self.counted = [row.counted and not self._counted_elsewhere(i) for i, row in enumerate(rows)]

    def _counted_elsewhere(self, index: int) -> bool:
        """A tied weight is one parameter: its first holder counts it."""
        return any(
            index in indices
            and (self.holdings.holders[name][0] != self.holdings.stage or index != indices[0])
            for name, indices in self._ties.items()
        )

    def reduce(self, grads: Gradients) -> Steps:
        under_way: deque[tuple[Wait, Bucket, int, bool]] = deque()
        for ranks, group in self._over.items():
            rows = [i for i, row in enumerate(self._rows) if row.averaged_over == ranks]
            for owner in sorted({self._rows[index].owner for index in rows}):
                mine = owner in (-1, self._here)
                indices = [i for i in rows if self._rows[i].owner == owner]
                members = [self._present(grads, i) for i in indices]
                for i, member in zip(indices, members, strict=True):
                    grads[i] = member if mine else None  # on its way to its owner: nobody here needs it
                for bucket in buckets(members):
                    work = group.all_reduce(bucket.flat) if owner < 0 else group.reduce(bucket.flat, owner)
                    under_way.append((waiting(work, group, self._timeout_seconds), bucket, len(ranks), mine))
                del members
        while under_way:
            work, bucket, degree, mine = under_way.popleft()
            yield work
            if mine:
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
            if name in self._tie_groups and not (self.sharded and indices[0] not in self.owned):
                total = self._present(grads, indices[0]) if total is None else total  # it travels itself
                yield from self._tie_groups[name].all_reduce(total)
            assign_tied(total, grads, indices)

    def exchange(self, group: int, squares: Tensor, status: RankStatus) -> Generator[Wait, None, RunStatus]:
        mine = yield from to_host(squares)
        stages = len(self.holdings.slots)
        count, offset = sum(self.holdings.slots), sum(self.holdings.slots[: self.holdings.stage])
        vector = torch.zeros(_numbers(self.holdings), dtype=torch.float64)
        vector[offset : offset + len(mine)] = torch.tensor(mine, dtype=torch.float64)
        vector[count] = float(status.stop)
        if self.holdings.speaks:
            seconds = [status.work_seconds, status.link_seconds, status.late_seconds]
            told = [*seconds, status.room, status.update, status.update_seconds]
            vector[count + 1 + self.holdings.stage : -stages : stages] = torch.tensor(
                told, dtype=torch.float64
            )
        vector[self.holdings.stage - stages] = float(group)
        yield self._sum_over_ranks(vector)
        numbers = vector.tolist()
        check_group(group, [each / len(self.holdings.ranks) for each in numbers[-stages:]])
        told_by_stage = [numbers[count + 1 + stages * i :][:stages] for i in range(_TOLD)]
        return RunStatus(numbers[:count], numbers[count] > 0, *told_by_stage)

    def _sum_over_ranks(self, vector: Tensor) -> Wait:
        if self._host_sum is not None:
            return self._host_sum.all_reduce(vector)
        assert self._control is not None
        return waiting(self._control.all_reduce(vector), self._control, self._timeout_seconds)

    def gather(self, weights: Sequence[Tensor]) -> Steps:
        if not self.sharded or len(self._grid.data) == 1:
            return
        under_way: list[tuple[Wait, Bucket, int]] = []
        group = self._over[self._grid.data]
        for owner in range(group.size):
            for bucket in buckets(
                [w for w, row in zip(weights, self._rows, strict=True) if row.owner == owner]
            ):
                work = group.broadcast(bucket.flat, owner)
                under_way.append((waiting(work, group, self._timeout_seconds), bucket, owner))
        for work, bucket, owner in under_way:
            yield work
            if owner != self._here:
                bucket.unpack()

    def broadcast_initial(self, weights: Sequence[Tensor]) -> None:
        for axis in range(2):  # over data ranks, then over tensor ranks
            for weight, row in zip(weights, self._rows, strict=True):
                ranks = row.begins_over[axis] if axis < len(row.begins_over) else ()
                if len(ranks) > 1:
                    _broadcast(weight, self._starting(ranks))
        for name, indices in sorted(self._ties.items()):
            if name in self._tie_groups:
                _broadcast(weights[indices[0]], self._tie_groups[name].group)
            copy_first(weights, indices)

    def _starting(self, ranks: Ranks) -> Group:
        found = self._over.get(ranks) or self._tensor
        assert found is not None, f"no group of ranks {ranks}"
        return found

    def attend(self, attendant: Attendant) -> None:
        for tie in self._tie_groups.values():
            tie.attend(attendant)

    def close(self) -> None:
        for tie in self._tie_groups.values():
            tie.close()
        if self._host_sum is not None:
            self._host_sum.close()


def _joined(ranks: Sequence[int]) -> str:
    return "-".join(str(rank) for rank in ranks)


def _numbers(holdings: Holdings) -> int:
    """The length of what a rank tells in an update: squared norms, a wish to stop, what each stage tells, the group."""
    return sum(holdings.slots) + 1 + (_TOLD + 1) * len(holdings.slots)


def _discover(
    mine: Told,
    count: int,
    stages: int,
    group: dist.ProcessGroup | None,
    data_group: dist.ProcessGroup | None,
    grid: Grid,
) -> Holdings:
    """`count`: of this stage's trainable parameters."""
    entries: list[Any] = [None] * stages
    dist.all_gather_object(entries, (mine, count), group=group)
    told: list[Told] = [each for each, _ in entries]
    check_agree(told, dist.get_process_group_ranks(group or dist.group.WORLD))
    for joined in grid.spanning:
        settings: list[Any] = [None] * dist.get_world_size(joined)
        dist.all_gather_object(settings, mine.settings, group=joined)
        check_alike(settings, [f"rank {rank}" for rank in dist.get_process_group_ranks(joined)])
    holders: dict[str, list[int]] = {}
    for each in told:
        for name in each.ties:
            holders.setdefault(name, []).append(each.stage)
    ranks = _stage_ranks(grid, data_group)
    return Holdings(
        stage=mine.stage,
        speaks=grid.rank == ranks[0],
        ranks=ranks,
        slots=[each for _, each in entries],
        holders=holders,
        pipeline_ranks=[each.rank for each in told],
        names_repeat=names_repeat([each.names for each in told]),
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


def _everyone(group: dist.ProcessGroup | None, ranks: list[int]) -> list[int]:
    """The ranks of all pipelines of the mesh: they agree on stops, skips and sharded norms."""
    rows: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(rows, ranks, group=group)
    return sorted({rank for row in rows for rank in row})


def _broadcast(weight: Tensor, group: Group) -> None:
    """To every rank of the group the values of the first."""
    value = weight.detach().contiguous()
    group.broadcast(value, 0).wait()
    weight.copy_(value)
