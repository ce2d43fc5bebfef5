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
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from slipstream.distributed import wires
from slipstream.distributed.groups import Group, Groups
from slipstream.errors import UserError
from slipstream.lists import copy_, mul_
from slipstream.pipeline.board import Board, PeerLost, suits
from slipstream.pipeline.checks import check_ties
from slipstream.pipeline.peers import (
    Gradients,
    Heard,
    InStream,
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
        groups: Groups,
        sharded: bool,
        presharded: bool,
        timeout_seconds: float,
    ) -> None:
        sizes = [p.numel() for p in parameters]
        # What it takes to make a gradient, not the weights: a sharded master gives most of them back.
        self._forms = [(p.shape, p.dtype, p.device) for p in map(local, parameters)]
        shapes = {name: [tuple(parameters[i].shape) for i in indices] for name, indices in ties.items()}
        self.layout = _discover(len(sizes), shapes, stage, stages, group, data_group)
        self._ties = ties
        self._degree = len(self.layout.data_ranks)
        # One group for reductions and gathers: updates follow one another, so all ranks use it in one order.
        self._data: Group | None = None
        if self._degree > 1:
            self._data = groups.device(f"data/{_joined(self.layout.data_ranks)}", self.layout.data_ranks)
        self._presharded = presharded  # FSDP2: gradients arrive reduced, and in shards
        self.in_step = presharded and groups.kind == "nccl"
        everyone = _everyone(group, data_group)
        self._board: Board | None = None
        self._control: Group | None = None
        if suits(len(everyone), _numbers(self.layout)):
            others = [rank for rank in everyone if rank != dist.get_rank()]
            found = wires.connect(groups.scope.under("board"), dist.get_rank(), others, timeout_seconds)
            self._board = Board(dist.get_rank(), found, timeout_seconds)
        else:
            self._control = groups.host("control", everyone)
        self._tie_groups = {
            name: TieGroup(self.layout, name, groups, timeout_seconds)
            for name, holding in sorted(self.layout.holders.items())
            if len(holding) > 1 and stage in holding
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
                assert self._data is not None
                work = self._data.all_reduce(flat) if owner is None else self._data.reduce(flat, owner)
                buckets.append((_waiting(work, self._data), flat, tensors))
        for work, flat, tensors in buckets:
            yield work
            mul_([flat], 1.0 / self._degree)
            copy_(tensors, _unflattened(flat, tensors))

    def tie(self, grads: Gradients) -> Steps:
        for name, indices in sorted(self._ties.items()):
            total = sum_present([grads[index] for index in indices])
            if name in self._tie_groups and not (self._sharded and indices[0] not in self.owned):
                total = self._present(grads, indices[0]) if total is None else total.clone()
                yield from self._tie_groups[name].all_reduce(total)
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
        assert self._control is not None
        return self._control.all_reduce(vector)

    def gather(self, weights: Sequence[Tensor]) -> Steps:
        if not self._sharded or self._degree == 1:
            return
        buckets = []
        for owner in range(self._degree):
            members = [w for w, o in zip(weights, self.owner, strict=True) if o == owner]
            for flat, tensors in _flattened(members):
                assert self._data is not None
                work = self._data.broadcast(flat, owner)
                buckets.append((_waiting(work, self._data), flat, tensors, owner))
        for work, flat, tensors, owner in buckets:
            yield work
            if owner != self.layout.data_rank:
                copy_(tensors, _unflattened(flat, tensors))

    def agree(self, weights: Sequence[Tensor]) -> None:
        if self._data is not None and not self._presharded:
            for weight in weights:
                _broadcast(weight, self._data)
        for name, indices in sorted(self._ties.items()):
            if name in self._tie_groups:
                _broadcast(weights[indices[0]], self._tie_groups[name].group)
            copy_first(weights, indices)

    def close(self) -> None:
        """Hang up; the groups are closed by whoever made them."""
        for tie in self._tie_groups.values():
            tie.close()
        if self._board is not None:
            self._board.close()


class TieGroup:
    """The stages of one pipeline that hold a tied weight.

    Where devices wait, the kernel of a later stage would stand there until the first stage has made its gradient, for
    P-1 microbatches: it is queued when the first holder has told that its own is (`in_stream.py` says why so).
    """

    def __init__(self, layout: Layout, name: str, groups: Groups, timeout_seconds: float) -> None:
        ranks = [layout.pipeline_ranks[stage] for stage in layout.holders[name]]
        where = f"tie/{_joined(ranks)}/{name}"
        self.group = groups.device(where, ranks)
        self._wires: dict[int, wires.Wire] = {}
        if self.group.in_stream:
            others = ranks[1:] if self.group.rank == 0 else ranks[:1]
            self._wires = wires.connect(groups.scope.under(where), dist.get_rank(), others, timeout_seconds)

    def all_reduce(self, tensor: Tensor) -> Steps:
        if self._wires and self.group.rank > 0:
            (first,) = self._wires.values()
            yield _Notice(first)
        work = self.group.all_reduce(tensor)
        if self.group.rank == 0:
            for wire in self._wires.values():
                wire.send(b"")
        yield _waiting(work, self.group)

    def close(self) -> None:
        for wire in self._wires.values():
            wire.close()


class _Notice:
    """Waits for the next message of a wire."""

    def __init__(self, wire: wires.Wire) -> None:
        self._wire = wire
        self._here = False

    def is_completed(self) -> bool:
        self._here = self._here or self._wire.receive() is not None
        if not self._here and self._wire.gone:
            raise PeerLost(f"{self._wire} closed its connection")
        return self._here

    def wait(self) -> None:
        while not self.is_completed():
            wires.wait_readable([self._wire], 1.0)


def _waiting(work: Wait, group: Group) -> Wait:
    return InStream(work) if group.in_stream else work


def _joined(ranks: Sequence[int]) -> str:
    return "-".join(str(rank) for rank in ranks)


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


def _everyone(group: dist.ProcessGroup | None, data_group: dist.ProcessGroup | None) -> list[int]:
    """The ranks of all pipelines of the mesh: they agree on stops, skips and sharded norms."""
    ranks = [dist.get_rank()] if data_group is None else dist.get_process_group_ranks(data_group)
    rows: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(rows, ranks, group=group)
    return sorted({rank for row in rows for rank in row})


def _owners(sizes: Sequence[int], tied: set[int], degree: int) -> list[int]:
    """Whole parameters to data ranks, largest first to the least loaded; tied ones to rank 0 on every stage."""
    loads = [0] * degree
    owner = [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda i: (i not in tied, -sizes[i], i)):
        owner[index] = 0 if index in tied else loads.index(min(loads))
        loads[owner[index]] += sizes[index]
    return owner


def _broadcast(weight: Tensor, group: Group) -> None:
    """To every rank of the group the values of the first."""
    value = weight.detach().contiguous()
    group.broadcast(value, 0).wait()
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
