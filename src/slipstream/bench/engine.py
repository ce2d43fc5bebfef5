"""slipstream's own schedule on the bench's work."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed.pipelining import PipelineStage

from slipstream.bench.work import Work, build_module, build_optimizer, group_input, group_target, loss_fn
from slipstream.pipeline.runtime import Schedule2BW


class EngineRun:
    """One rank of `Schedule2BW`: `step` hands in one group; updates are reported when they are published."""

    def __init__(self, work: Work, rank: int, on_update: Callable[[], None]) -> None:
        stage = PipelineStage(build_module(work, rank, work.stages), rank, work.stages, torch.device("cpu"))
        self.schedule = Schedule2BW(
            stage,
            n_microbatches=work.microbatches,
            loss_fn=loss_fn,
            optimizer=build_optimizer,
            correction=work.correction,
            max_grad_norm=work.max_grad_norm,
            in_flight=work.in_flight,
            link_latency=work.link_latency_seconds,
        )
        self.schedule.after_update = lambda group: on_update()
        self.inputs = (group_input(work),) if rank == 0 else ()
        self.target = group_target(work) if rank == work.stages - 1 else None
        self.losses: list[Tensor] = []

    def step(self) -> None:
        self.schedule.step(*self.inputs, target=self.target, losses=self.losses)

    def drain(self) -> None:
        self.schedule.drain()
