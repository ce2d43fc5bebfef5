"""From a stage's weights and what the user said of its ranks to the table and the peers that an update uses.

`planned` is pure: no rank is asked and no tensor touched. `peers_of` makes the process groups it calls for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from slipstream.errors import UserError
from slipstream.optim.corrections import Correction
from slipstream.pipeline.checks import check_ties, held_ties
from slipstream.pipeline.mesh import Mesh
from slipstream.pipeline.peers import Alone
from slipstream.pipeline.placement import Grid, Placement, grid_of, owned_rows, place
from slipstream.pipeline.torch_stage import StageInfo
from slipstream.pipeline.update import check_covers, no_optimizer
from slipstream.pipeline.versions import Versions


@dataclass(frozen=True)
class Plan:
    """A row for every trainable parameter of the stage, and which of them are one weight."""

    parameters: list[Tensor]
    rows: list[Placement]
    grid: Grid
    ties: dict[str, list[int]]
    summed: bool  # gradients over data ranks: their sum, not their mean


def planned(
    versions: Versions,
    ties: dict[str, list[str]],
    mesh: DeviceMesh | None,
    data_group: ProcessGroup | None,
    shard_optimizer: bool,
    summed: bool,
) -> Plan:
    names, parameters = versions.names, versions.master.parameters
    by_name = dict(zip(names, parameters, strict=True))
    grid = grid_of(by_name, mesh, data_group)
    rows = place([versions.module], by_name, grid)
    indices = {key: [names.index(name) for name in held] for key, held in ties.items()}
    if shard_optimizer:
        rows = owned_rows(rows, [p.numel() for p in parameters], indices, grid)
    return Plan(list(parameters), rows, grid, indices, summed)


def peers_of(
    stage: StageInfo,
    plan: Plan,
    data_group: ProcessGroup | None,
    timeout: float,
    gradient_dtype: torch.dtype | None = None,
) -> Alone | Mesh:
    """The peers of this rank; none where one process has the whole model."""
    if stage.count == 1 and plan.grid.alone:
        check_ties([held_ties(plan.parameters, plan.ties, plan.rows)])
        return Alone(len(plan.rows), list(plan.ties.values()))
    return Mesh(
        plan.parameters,
        plan.ties,
        plan.rows,
        plan.grid,
        stage=stage.index,
        stages=stage.count,
        group=stage.group,
        data_group=data_group,
        device=stage.device,
        summed=plan.summed,
        gradient_dtype=gradient_dtype,
        timeout_seconds=timeout,
    )


def optimizer_of(factory: Callable[[nn.Module], Optimizer], module: nn.Module) -> Optimizer:
    """What the user's factory makes of a stage, and a stand-in where there is nothing to train: no parameters, frozen
    ones, or on a data rank that owns none of them. A factory that asks for what is trainable then finds nothing, which
    torch's optimizers refuse."""
    if not any(parameter.requires_grad for parameter in module.parameters()):
        try:
            return factory(module) if list(module.parameters()) else no_optimizer()
        except ValueError:
            return no_optimizer()
    return factory(module)


def check_optimizer(
    versions: Versions, optimizer: Optimizer, correction: Correction, rows: Sequence[Placement]
) -> None:
    """Whether it has what this rank owns, and whether the correction can work on pieces."""
    owned = versions.owned
    masters = versions.master.parameters
    check_covers(optimizer, versions.module, [versions.names[i] for i in owned], [masters[i] for i in owned])
    cut = next((row for row in rows if row.cut), None)
    if cut is not None and not correction.on_pieces:
        raise UserError(
            f"The correction {correction.name} measures whole tensors, and '{cut.name}' is laid out as {cut.layout}. "
            "Use error_feedback."
        )
