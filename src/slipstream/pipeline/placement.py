"""Where each parameter of a stage lives: a row per parameter, read off its DTensor placements once.

The ranks that hold one stage form a grid of data ranks (each sees rows of its own) and tensor ranks (they share the
rows and cut the matrices). For a parameter the row says

    averaged_over   the ranks over which the engine averages its gradient; none where torch has done that
    counted         whether this rank's part enters the global norm: each piece of a tensor once
    begins_over     the ranks that begin with the values of the first of them
    layout          how it is cut, in words: tied weights must be cut alike to be added up

FSDP2 averages over its own mesh, replicas of HSDP included, in the backward of a group's last microbatch. A plain
tensor is one and the same on every tensor rank, as torch's tensor parallelism has it. Invariant: what has no right
row is refused by its name; nothing is guessed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import Tensor, nn

from slipstream.errors import UserError
from slipstream.optim.sharded import least_loaded
from slipstream.torch_late import is_dtensor
from slipstream.torch_private import fsdp_meshes, is_strided_shard

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

Ranks = tuple[int, ...]
# A name begins with one of them.
DATA_NAMES = ("dp", "data", "fsdp", "hsdp", "ddp", "replicate", "shard", "batch")
TENSOR_NAMES = ("tp", "tensor", "model")
PIPELINE_NAMES = ("pp", "pipe")
UNKNOWN_TO_US = {"cp": "context", "context": "context", "ep": "expert", "expert": "expert", "etp": "expert"}


@dataclass(frozen=True)
class Grid:
    """The ranks that hold this rank's stage, as this rank sees them; each tuple has it among them."""

    rank: int
    data: Ranks  # see other rows, hold the same piece of a matrix
    tensor: Ranks  # see the same rows
    axes: tuple[Ranks, ...] = ()  # the data ranks by mesh dimension, where there is a mesh
    all: Ranks = ()  # both; empty where only the ranks together know
    spanning: tuple[dist.ProcessGroup, ...] = ()  # the user's groups that join them, data before tensor

    @property
    def alone(self) -> bool:
        return len(self.data) == len(self.tensor) == 1

    @property
    def first_of_tensor(self) -> bool:
        return self.rank == self.tensor[0]


@dataclass(frozen=True)
class Placement:
    """One parameter on this rank. See the module docstring."""

    name: str
    averaged_over: Ranks
    begins_over: tuple[Ranks, ...]
    counted: bool
    layout: str
    cut: bool  # this rank holds a piece
    owner: int = -1  # of a sharded optimizer: the data rank with master and state; -1: each rank its own part


def along(mesh: DeviceMesh, axes: Sequence[int]) -> Ranks:
    """The ranks that differ from this one in `axes` of the mesh only, in the order of the mesh."""
    found, place = mesh.mesh, mesh.get_coordinate()
    assert place is not None, f"this rank is not in {mesh}"
    for axis in reversed(range(mesh.ndim)):
        if axis not in axes:
            found = found.select(axis, place[axis])
    return tuple(found.flatten().tolist())


def grid_of(
    parameters: Mapping[str, Tensor],
    mesh: DeviceMesh | None,
    data_group: dist.ProcessGroup | None,
) -> Grid:
    """From a mesh, whose dimensions tell their use by name; else from the data group and the parameters' own meshes."""
    for name, parameter in parameters.items():
        if is_dtensor(parameter):
            for axis in parameter.device_mesh.mesh_dim_names or ():
                _refuse_unknown(axis, f"'{name}'")
    if mesh is not None:
        if data_group is not None:
            raise UserError("Give mesh or data_group, not both: the mesh names the data ranks.")
        return _from_mesh(mesh)
    if not dist.is_initialized():
        return Grid(0, (0,), (0,))
    rank = dist.get_rank()
    data = (rank,) if data_group is None else tuple(dist.get_process_group_ranks(data_group))
    spanning = [] if data_group is None else [data_group]
    tensor: set[int] = {rank}
    for parameter in parameters.values():
        if is_dtensor(parameter):
            own = parameter.device_mesh
            axes = [axis for axis in range(own.ndim) if not set(along(own, [axis])) <= set(data)]
            found = set(along(own, axes))
            if not found & set(data) - {rank}:  # else refused by `place`, with its name
                if found - tensor:
                    spanning += [own.get_group(axis) for axis in axes]
                tensor |= found
    return Grid(rank, data, tuple(sorted(tensor)), (data,), spanning=tuple(spanning))


def _from_mesh(mesh: DeviceMesh) -> Grid:
    names = mesh.mesh_dim_names
    if names is None:
        raise UserError(
            f"The dimensions of the mesh {tuple(mesh.mesh.shape)} have no names. Name them (mesh_dim_names): data "
            f"dimensions begin with {', '.join(DATA_NAMES[:4])}, the tensor dimension is 'tp'."
        )
    for name in names:
        _refuse_unknown(name, f"mesh {names}")
    tensor = [axis for axis, name in enumerate(names) if name.startswith(TENSOR_NAMES)]
    data = [axis for axis, name in enumerate(names) if name.startswith(DATA_NAMES)]
    others = [
        name
        for axis, name in enumerate(names)
        if axis not in (*tensor, *data) and not name.startswith(PIPELINE_NAMES)
    ]
    if others:
        raise UserError(
            f"The mesh dimension {others[0]!r} says nothing to the engine. Data dimensions begin with "
            f"{', '.join(DATA_NAMES[:4])}, the tensor dimension is 'tp', the pipeline's 'pp'."
        )
    if not (data or tensor) and mesh.size() < dist.get_world_size():
        raise UserError(
            f"The mesh {names} has no dimension but the pipeline's, and there are {dist.get_world_size()} ranks: their "
            "gradients would not be averaged. Give the whole mesh, or none where these pipelines have nothing to do "
            "with each other."
        )
    spanning = tuple(mesh.get_group(axis) for axis in [*data, *tensor])
    axes = tuple(along(mesh, [axis]) for axis in data)
    return Grid(
        mesh.get_rank(), along(mesh, data), along(mesh, tensor), axes, along(mesh, [*data, *tensor]), spanning
    )


def _refuse_unknown(axis: str, where: str) -> None:
    kind = UNKNOWN_TO_US.get(axis.split("_")[0].lower())
    if kind is not None:
        raise UserError(
            f"{where} has the mesh dimension {axis!r}: {kind} parallelism is not a layout the engine knows how to "
            "average. Use data and tensor dimensions, or more stages."
        )


def place(modules: Sequence[nn.Module], parameters: Mapping[str, Tensor], grid: Grid) -> list[Placement]:
    """The rows of the trainable parameters of prepared modules, in their order."""
    meshes = {key: mesh for module in modules for key, mesh in fsdp_meshes(module).items()}
    return [
        _cut_row(name, parameter, meshes.get(id(parameter)), grid)
        if is_dtensor(parameter)
        else _whole_row(name, grid)
        for name, parameter in parameters.items()
    ]


def owned_rows(
    rows: Sequence[Placement], sizes: Sequence[int], ties: Mapping[str, Sequence[int]], grid: Grid
) -> list[Placement]:
    """The rows of a sharded optimizer: whole parameters to data ranks, largest first to the least loaded; tied ones to
    the first on every stage."""
    tied = {index for indices in ties.values() for index in indices}
    if len(grid.data) == 1:
        raise UserError("A sharded optimizer needs data ranks to share it: give data_group or mesh.")
    if cut := next((row for row in rows if row.cut), None):
        raise UserError(
            f"'{cut.name}' is laid out as {cut.layout}: its optimizer is sharded already. Set shard_optimizer=False, "
            "or prepare without FSDP2 and tensor parallelism."
        )
    owners = least_loaded(sizes, len(grid.data), dict.fromkeys(tied, 0))
    here = grid.data.index(grid.rank)
    first = grid.first_of_tensor
    return [
        replace(row, owner=owner, counted=owner == here and first)
        for row, owner in zip(rows, owners, strict=True)
    ]


def _whole_row(name: str, grid: Grid) -> Placement:
    first = grid.rank == grid.data[0] and grid.first_of_tensor
    several = grid.data if len(grid.data) > 1 else ()
    return Placement(name, several, (grid.data, grid.tensor), first, "a whole tensor", cut=False)


def _cut_row(name: str, parameter: DTensor, fsdp: DeviceMesh | None, grid: Grid) -> Placement:
    from torch.distributed.tensor import Replicate, Shard

    mesh, placements = parameter.device_mesh, parameter.placements
    layout = f"{tuple(placements)} on {mesh.mesh_dim_names or tuple(mesh.mesh.shape)}"
    for placement in placements:
        if type(placement) not in (Shard, Replicate) and not is_strided_shard(placement):
            raise UserError(f"'{name}' is laid out as {layout}; {placement} is no layout of a weight.")
    averaged = set() if fsdp is None else set(along(fsdp, range(fsdp.ndim)))
    data, rank = set(grid.data), grid.rank
    axes = [along(mesh, [axis]) for axis in range(mesh.ndim)]
    for ranks in axes:
        crossing = set(ranks) & data
        if crossing == {rank} or set(ranks) <= averaged <= data:
            continue
        if crossing == set(ranks) and len(ranks) > 1:
            raise UserError(
                f"'{name}' is laid out as {layout} over data ranks {list(ranks)}, but not by fully_shard: nothing "
                "would average its gradient. Use fully_shard, or keep it whole."
            )
        raise UserError(
            f"'{name}' is laid out as {layout} over ranks {list(ranks)}, of which {sorted(crossing)} are data ranks "
            f"({sorted(data)}). Give mesh=, the DeviceMesh of the ranks that hold this stage, or the data_group that "
            "fully_shard uses."
        )
    shared = [ranks for ranks in axes if set(ranks) & data == {rank} and len(ranks) > 1]
    known = set().union(*shared) if shared else set()
    if known and len(grid.tensor) != math.prod(len(ranks) for ranks in shared):
        raise UserError(
            f"'{name}' is laid out as {layout}: {len(known)} of the {len(grid.tensor)} tensor ranks "
            f"{list(grid.tensor)} hold it. Lay matrices out over all of them."
        )
    rest = _rest(name, layout, averaged, grid)
    copies = [ranks for ranks, how in zip(axes, placements, strict=True) if how.is_replicate()]
    first = all(rank == ranks[0] for ranks in copies) and (not rest or rank == rest[0])
    if not known:
        first = first and grid.first_of_tensor
    cut = any(not how.is_replicate() and len(ranks) > 1 for ranks, how in zip(axes, placements, strict=True))
    return Placement(name, rest, (rest,), first, layout, cut)


def _rest(name: str, layout: str, averaged: set[int], grid: Grid) -> Ranks:
    """The data ranks over which FSDP2 has not averaged."""
    if averaged >= set(grid.data) or len(grid.data) == 1:
        return ()
    if not averaged:
        return grid.data
    axes = [set(ranks) for ranks in grid.axes if set(ranks) & averaged == {grid.rank}]
    if len(axes) == 1 and len(axes[0]) * len(averaged) == len(grid.data):
        return tuple(rank for rank in grid.data if rank in axes[0])
    raise UserError(
        f"'{name}' is laid out as {layout}: fully_shard averages it over {sorted(averaged)}, and the rest of the data "
        f"ranks {list(grid.data)} is not one dimension of a mesh. Give mesh= with a dimension for each, or let "
        "fully_shard replicate too (HSDP)."
    )
