"""Orthogonalise matrices that torch has cut (FSDP2, HSDP, tensor parallelism, both together), each of them once.

Each cut matrix has one owner among the ranks that share it. Every rank sends its piece to the owner, the
owner orthogonalises the whole and sends the pieces back:

    pieces --all-to-all--> whole matrices --Newton-Schulz--> whole matrices --all-to-all--> pieces

Invariant: the owners, and so the order of messages, follow from shapes alone; every rank finds the same ones.
The result equals the unsharded one, on one CPU thread bit for bit. The work is a generator that yields what
it waits for, so a pipeline can go on with its microbatches meanwhile.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from slipstream.distributed.groups import Group, Groups, Wait
from slipstream.errors import UserError
from slipstream.optim.newton_schulz import Fill, Stack, compute_dtype, orthogonal_stacks, stacks
from slipstream.torch_late import is_dtensor
from slipstream.torch_private import is_strided_shard

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor


class Batch(NamedTuple):
    """Orthogonalised local tensors of equal shape, and which parameters they belong to."""

    indices: list[int]
    directions: list[Tensor]


def local(tensor: Tensor) -> Tensor:
    """The part of a tensor that lives on this rank, without autograd."""
    # A gradient or a state is that already; a thousand aliases of them are milliseconds of a step.
    if type(tensor) is Tensor and not tensor.requires_grad:
        return tensor
    return (tensor.to_local() if is_dtensor(tensor) else tensor).detach()


Ranks = tuple[int, ...]
TIMEOUT_SECONDS = 600.0  # for ranks that share a matrix to meet, and for a message between them


class Exchanges:
    """A process group of our own for all ranks that share a matrix; all of them must make this together.

    An exchange may start on one rank before a microbatch and on another after it, and FSDP2 gathers weights
    in each microbatch: on one group their order would differ between ranks, which deadlocks.
    """

    def __init__(self, params: Sequence[Tensor]) -> None:
        self._meetings: dict[DeviceMesh, Groups] = {}
        self._groups: dict[Ranks, Group] = {}
        for parameter in params:
            cut = _cut(parameter)
            if cut is not None and cut.ranks not in self._groups:
                assert is_dtensor(parameter)
                self._groups[cut.ranks] = self._make(cut.ranks, parameter)

    def _make(self, ranks: Ranks, parameter: DTensor) -> Group:
        mesh, device = parameter.device_mesh, parameter.to_local().device
        if mesh not in self._meetings:
            axes = [mesh.get_group(axis) for axis in range(mesh.ndim)]
            self._meetings[mesh] = Groups.handshake(axes, device, TIMEOUT_SECONDS)
        made = self._meetings[mesh].device(f"exchange/{'-'.join(map(str, ranks))}", ranks)
        if made.in_stream:  # NCCL connects at the first message of a kind: now, not in the middle of a run
            probe = torch.zeros(len(ranks), device=device)
            made.all_to_all(torch.empty_like(probe), probe, [1] * len(ranks), [1] * len(ranks)).wait()
            torch.cuda.current_stream(device).synchronize()
        return made

    def __getitem__(self, ranks: Ranks) -> Group:
        return self._groups[ranks]

    def close(self, failed: bool) -> None:
        for meeting in self._meetings.values():
            meeting.close(failed)


@dataclass(frozen=True)
class Grouping:
    """What follows from the shapes and placements of some parameters alone."""

    whole: list[Stack]
    shards: dict[tuple[Group, torch.dtype], list[int]]


def group_matrices(params: Sequence[Tensor], groups: Exchanges) -> Grouping:
    shards: dict[tuple[Group, torch.dtype], list[int]] = {}
    whole: list[int] = []
    for i, parameter in enumerate(params):
        cut = _cut(parameter)
        if cut is None:
            whole.append(i)
        else:
            shards.setdefault((groups[cut.ranks], compute_dtype(parameter)), []).append(i)
    found = stacks([local(params[i]) for i in whole])
    return Grouping([replace(stack, indices=[whole[k] for k in stack.indices]) for stack in found], shards)


def orthogonal(
    params: Sequence[Tensor], fill: Fill, steps: int, grouping: Grouping
) -> Iterator[Wait | Batch]:
    """Orthogonalise one tensor for each of `params`; `fill(indices, outs)` writes local parts."""
    exchanges = [
        (own, Exchange([params[i] for i in own], _renumbered(fill, own), group, dtype))
        for (group, dtype), own in grouping.shards.items()
    ]
    for batch, directions in orthogonal_stacks(grouping.whole, fill, steps):
        yield Batch(batch, directions)
    for indices, exchange in exchanges:
        yield exchange.gathered
        yield (returned := exchange.orthogonalise(steps))
        returned.wait()
        for k, piece in enumerate(exchange.pieces()):
            yield Batch([indices[k]], [piece])


def _renumbered(fill: Fill, own: list[int]) -> Fill:
    """`fill` for callers that number the tensors of `own` from 0."""
    return lambda batch, outs: fill([own[k] for k in batch], outs)


class Cut(NamedTuple):
    """How a matrix is spread: over `ranks`, of which the k-th holds the part that `places[k]` leads to."""

    ranks: Ranks
    dims: tuple[int, ...]  # the dimension that each cut divides, in the order in which they were made
    ways: tuple[int, ...]  # into how many parts
    places: list[tuple[int, ...]]  # of each rank: which part of each cut is its own


def _cut(parameter: Tensor) -> Cut | None:
    """None where the matrix is whole here (an expert tensor that is cut between experts has whole matrices)."""
    if not is_dtensor(parameter):
        return None
    mesh, layouts = parameter.device_mesh, parameter.placements
    axes = [axis for axis, layout in enumerate(layouts) if not layout.is_replicate()]
    # FSDP2 divides what tensor parallelism has left on a rank; it says so where both divide one dimension.
    strided = [axis for axis in axes if is_strided_shard(layouts[axis])]
    order = [axis for axis in axes if axis not in strided] + strided
    dims = tuple(_shard_dim(layouts[axis]) for axis in order)
    if any(dim < 0 for dim in dims):
        raise UserError(
            f"Muon cannot put together a matrix laid out as {layouts}. Cut it with Shard (FSDP2, tensor parallelism), "
            "or give it to AdamW."
        )
    if not axes or (parameter.ndim == 3 and set(dims) == {0}):
        return None
    here = mesh.get_coordinate()
    assert here is not None
    ways = tuple(mesh.size(axis) for axis in order)
    ranks, places = [], []
    for place in itertools.product(*(range(way) for way in ways)):
        where = list(here)
        for axis, part in zip(order, place, strict=True):
            where[axis] = part
        ranks.append(int(mesh.mesh[tuple(where)]))
        places.append(place)
    in_order = sorted(range(len(ranks)), key=ranks.__getitem__)  # as a process group numbers them
    return Cut(tuple(ranks[k] for k in in_order), dims, ways, [places[k] for k in in_order])


def _shard_dim(layout: Any) -> int:
    """The dimension that a mesh axis divides, -1 where it does something else."""
    from torch.distributed.tensor import Shard

    return layout.dim if type(layout) is Shard or is_strided_shard(layout) else -1


class Exchange:
    """The pieces of some matrices on their way to the owners and back."""

    def __init__(
        self,
        params: Sequence[Tensor],
        fill: Fill,
        group: Group,
        dtype: torch.dtype,
    ) -> None:
        self.group = group
        self.rank, self.ranks = group.rank, group.size
        self.shapes = [parameter.shape for parameter in params]
        self.cuts = [cut for parameter in params if (cut := _cut(parameter))]
        self.owners = owners(self.shapes, self.ranks)
        self.device = params[0].device
        self.dtype = dtype
        # What I send: for each owner in turn, my piece of each matrix it owns. What I get: the reverse.
        self.sent = [(i, self.rank) for owner in range(self.ranks) for i in self._of(owner)]
        self.received = [(i, source) for source in range(self.ranks) for i in self._of(self.rank)]
        self.outgoing = self._buffer(self.sent)
        fill([i for i, _ in self.sent], self._views(self.outgoing, self.sent))
        self.incoming = self._buffer(self.received)
        self.gathered = group.all_to_all(
            self.incoming, self.outgoing, self._splits(self.received), self._splits(self.sent)
        )

    def orthogonalise(self, steps: int) -> Wait:
        """Make my matrices whole, orthogonalise them, send the pieces back."""
        self.gathered.wait()
        pieces = dict(zip(self.received, self._views(self.incoming, self.received), strict=True))
        mine = self._of(self.rank)

        def fill(batch: list[int], outs: list[Tensor]) -> None:
            for k, out in zip(batch, outs, strict=True):
                for source in range(self.ranks):
                    self._narrow(out, mine[k], source).copy_(pieces[mine[k], source])

        like = [torch.empty((), dtype=self.dtype, device=self.device).expand(self.shapes[i]) for i in mine]
        for batch, directions in orthogonal_stacks(stacks(like), fill, steps):
            for k, direction in zip(batch, directions, strict=True):
                for source in range(self.ranks):
                    pieces[mine[k], source].copy_(self._narrow(direction, mine[k], source))
        return self.group.all_to_all(
            self.outgoing, self.incoming, self._splits(self.sent), self._splits(self.received)
        )

    def pieces(self) -> list[Tensor]:
        """My orthogonalised piece of each matrix, once what `orthogonalise` returned has been waited for."""
        views = dict(zip(self.sent, self._views(self.outgoing, self.sent), strict=True))
        return [views[i, self.rank] for i in range(len(self.shapes))]

    def _of(self, owner: int) -> list[int]:
        return [i for i, other in enumerate(self.owners) if other == owner]

    def _spans(self, i: int, rank: int) -> list[tuple[int, int, int]]:
        """The narrowings that lead to `rank`'s piece of matrix i, one after the other: as torch.chunk cuts."""
        cut, shape = self.cuts[i], list(self.shapes[i])
        spans = []
        for dim, ways, part in zip(cut.dims, cut.ways, cut.places[rank], strict=True):
            size = -(-shape[dim] // ways)
            start = min(part * size, shape[dim])
            shape[dim] = min(size, shape[dim] - start)
            spans.append((dim, start, shape[dim]))
        return spans

    def _piece(self, i: int, rank: int) -> torch.Size:
        shape = list(self.shapes[i])
        for dim, _, length in self._spans(i, rank):
            shape[dim] = length
        return torch.Size(shape)

    def _narrow(self, whole: Tensor, i: int, rank: int) -> Tensor:
        for span in self._spans(i, rank):
            whole = whole.narrow(*span)
        return whole

    def _buffer(self, keys: list[tuple[int, int]]) -> Tensor:
        size = sum(self._piece(i, rank).numel() for i, rank in keys)
        return torch.empty(size, dtype=self.dtype, device=self.device)

    def _views(self, buffer: Tensor, keys: list[tuple[int, int]]) -> list[Tensor]:
        shapes = [self._piece(i, rank) for i, rank in keys]
        parts = buffer.split([shape.numel() for shape in shapes])
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]

    def _splits(self, keys: list[tuple[int, int]]) -> list[int]:
        """Elements to or from each rank: a sent piece goes to its owner, a received one comes from a rank."""
        sizes = [0] * self.ranks
        for i, rank in keys:
            sizes[self.owners[i] if keys is self.sent else rank] += self._piece(i, rank).numel()
        return sizes


def owners(shapes: Sequence[torch.Size], ranks: int) -> list[int]:
    """Who orthogonalises which matrix."""
    return least_loaded([shape.numel() * min(shape[-2:]) for shape in shapes], ranks)


def least_loaded(costs: Sequence[int], ranks: int, given: Mapping[int, int] | None = None) -> list[int]:
    """A rank for each item: the costly ones first, each to the rank with the least so far. `given`: item -> rank,
    settled before the others."""
    fixed = given or {}
    load = [0] * ranks
    owner = [0] * len(costs)
    for i in sorted(range(len(costs)), key=lambda i: (i not in fixed, -costs[i], i)):
        owner[i] = fixed[i] if i in fixed else load.index(min(load))
        load[owner[i]] += costs[i]
    return owner
