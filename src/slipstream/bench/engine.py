"""slipstream's own schedule on the bench's work."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import Tensor
from torch.distributed.pipelining import PipelineStage

from slipstream.bench.work import (
    Work,
    build_module,
    build_optimizer,
    group_input,
    group_target,
    loss_of,
    prepare,
)
from slipstream.pipeline.links import Links
from slipstream.pipeline.runtime import Schedule2BW
from slipstream.schedule.actions import Kind
from slipstream.schedule.timeline import Span


@contextlib.contextmanager
def slow_links(seconds: float) -> Iterator[None]:
    """A slow network to try a schedule on: every message of those that are made inside leaves late."""
    Links.slow_seconds = seconds
    try:
        yield
    finally:
        Links.slow_seconds = 0.0


class EngineRun:
    """One rank of `Schedule2BW`: `step` hands in one group, whose last backwards may run in a later call."""

    def __init__(self, work: Work, rank: int) -> None:
        device = work.device_of(rank)
        module = build_module(work, rank, work.stages, device=device)
        stage = PipelineStage(module, rank, work.stages, device)
        with slow_links(work.link_latency_seconds):
            self.schedule = Schedule2BW(
                stage,
                n_microbatches=work.microbatches,
                loss_fn=loss_of(work),
                optimizer=build_optimizer,
                correction=work.correction,
                max_grad_norm=work.max_grad_norm,
                cutover=work.cutover,
                in_flight=work.in_flight,
                prepare=prepare(work),
            )
        self.schedule.trace(True)
        self.last_microbatch = work.microbatches - 1
        self.ends: list[float] = []
        self.losses: list[Tensor] = []
        self.inputs = (group_input(work, device=device),) if rank == 0 else ()
        last = rank == work.stages - 1
        self.target = {"target": group_target(work, device=device), "losses": self.losses} if last else {}

    def step(self) -> None:
        self.schedule.step(*self.inputs, **self.target, return_outputs=False)

    def take_trace(self) -> list[Span]:
        """What was done since the last call, with what was in flight."""
        self.schedule.drain()
        return self.schedule.take_trace()

    def close(self) -> None:
        self.schedule.close()

    def drain(self) -> None:
        self.ends += [
            span.end
            for span in self.take_trace()
            if span.action.kind is Kind.BACKWARD and span.action.microbatch == self.last_microbatch
        ]
