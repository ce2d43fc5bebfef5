"""The `Schedule2BW` of a run: one stage on one rank of a pipeline x data mesh."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage

from slipstream.config import Config
from slipstream.distributed import World
from slipstream.pipeline.runtime import Schedule2BW
from slipstream.train import build
from slipstream.train.engine import share_embedding
from slipstream.train.own_model import OwnModel


def pipelined(config: Config, model: build.Model, world: World, device: torch.device) -> Schedule2BW:
    """The stage of this rank, and its schedule."""
    pipeline = config.pipeline
    assert pipeline.stages is not None
    assert not isinstance(pipeline.cutover, float | list), pipeline.cutover  # resolved
    index, _ = world.mesh(pipeline.stages)
    (module,) = build.stage_modules(config, model, pipeline.stages, [index], device)
    group, data_group = mesh_groups(world, pipeline.stages)
    return Schedule2BW(
        PipelineStage(module, index, pipeline.stages, device, group=group),
        pipeline.microbatches,
        build.loss_function(config),
        build.optimizer_factory(config),
        build.correction(config),
        config.optim.max_grad_norm or None,
        synchronous=build.flushed(config),
        cutover=pipeline.cutover,
        in_flight=pipeline.in_flight,
        bank_dtype=torch.bfloat16 if config.train.dtype == "bfloat16" else None,
        gradient_dtype=torch.bfloat16 if config.train.gradient_dtype == "bfloat16" else None,
        tied=tied_names(model, module),
        data_group=data_group,
        shard_optimizer=pipeline.shard_optimizer,
        compact_master=None,
        prepare=build.preparation(config),
        timeout=config.train.timeout_seconds,
    )


def mesh_groups(world: World, stages: int) -> tuple[dist.ProcessGroup, dist.ProcessGroup | None]:
    """(this pipeline, this stage's data ranks). Groups are made by all ranks in one order."""
    pipeline, data = None, None
    for first in range(0, world.size, stages):
        ranks = list(range(first, first + stages))
        made = dist.new_group(ranks)
        pipeline = made if world.rank in ranks else pipeline
    if world.size > stages:
        for stage in range(stages):
            ranks = list(range(stage, world.size, stages))
            made = dist.new_group(ranks)
            data = made if world.rank in ranks else data
    assert isinstance(pipeline, dist.ProcessGroup)
    return pipeline, data if isinstance(data, dist.ProcessGroup) else None


def tied_names(model: build.Model, module: Any) -> dict[str, str | Sequence[str]]:
    """The tied weight this stage holds, by the name the other holder also gives it."""
    if isinstance(model, OwnModel):
        return dict(model.ties_between([module]))
    if not model.tied:
        return {}
    if module.embedding is not None and module.head is not None:
        share_embedding([module])
        return {}
    if module.embedding is not None:
        return {"embedding": "embedding.weight"}
    return {"embedding": "head.weight"} if module.head is not None else {}
