"""`Schedule2BW` in the shape the training loop drives: one stage on one rank of a pipeline x data mesh."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage

from slipstream.config import Config
from slipstream.distributed import World
from slipstream.pipeline.runtime import Schedule2BW
from slipstream.schedule.timeline import Span
from slipstream.train import build
from slipstream.train.batches import Batch
from slipstream.train.engine import AfterUpdate, share_embedding
from slipstream.train.own_model import OwnModel


class Pipelined:
    """One rank of an asynchronous pipeline."""

    def __init__(self, config: Config, model: build.Model, world: World, device: torch.device) -> None:
        pipeline = config.pipeline
        assert pipeline.stages is not None
        assert not isinstance(pipeline.cutover, float | list), pipeline.cutover  # resolved
        index, _ = world.mesh(pipeline.stages)
        self._first, self._last = index == 0, index == pipeline.stages - 1
        (module,) = build.stage_modules(config, model, pipeline.stages, [index], device)
        group, data_group = mesh_groups(world, pipeline.stages)
        stage = PipelineStage(module, index, pipeline.stages, device, group=group)
        self._schedule = Schedule2BW(
            stage,
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
        self.names = {name for name, _ in module.named_parameters()}
        self.optimizer = self._schedule.optimizer

    @property
    def after_update(self) -> AfterUpdate | None:
        return self._schedule.after_update

    @after_update.setter
    def after_update(self, hook: AfterUpdate | None) -> None:
        self._schedule.after_update = hook

    @property
    def busy_seconds(self) -> float:
        return self._schedule.busy_seconds

    def step(self, batch: Batch) -> list[Tensor]:
        losses: list[Tensor] = []
        self._schedule.step(*self._inputs(batch), **self._targets(batch, losses), return_outputs=False)
        return losses

    def evaluate(self, batch: Batch) -> list[Tensor]:
        losses: list[Tensor] = []
        self._schedule.eval(*self._inputs(batch), **self._targets(batch, losses), return_outputs=False)
        return losses

    def _inputs(self, batch: Batch) -> tuple[Tensor, ...]:
        return (batch.inputs,) if self._first and batch.inputs is not None else ()

    def _targets(self, batch: Batch, losses: list[Tensor]) -> dict[str, Any]:
        return {"target": batch.targets, "losses": losses} if self._last else {}

    def drain(self) -> None:
        self._schedule.drain()

    def grad_norm(self, group: int) -> float | None:
        return self._schedule.grad_norms.get(group)

    def capture(self) -> dict[str, Any]:
        return self._schedule.capture()

    def hold(self, copied: torch.cuda.Event) -> None:
        self._schedule.hold(copied)

    def load(self, state: dict[str, Any]) -> None:
        self._schedule.load_state_dict(state)

    def trace(self, on: bool) -> None:
        self._schedule.trace(on)

    def take_trace(self) -> list[Span]:
        return self._schedule.take_trace()

    def request_stop(self) -> None:
        self._schedule.request_stop()

    def stopping(self) -> bool:
        return self._schedule.stopping()


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
