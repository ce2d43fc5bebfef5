"""torch's own synchronous schedules on the same work, each followed by clipping and the optimizer step.

The interleaved and V-shaped schedules put two half-size stages on each rank: the same model, the same
microbatches. Clipping, where asked for, is exact here too: the squared norms of all ranks are summed with an
all-reduce before the step, which every rank has to wait for.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining

from slipstream.bench.stopwatch import Stopwatch
from slipstream.bench.work import (
    Work,
    build_module,
    build_optimizer,
    group_input,
    group_target,
    loss_of,
    prepare,
)
from slipstream.pipeline.watched_stage import TorchTrace, WatchedStage
from slipstream.schedule.timeline import Span


@dataclass(frozen=True)
class Rival:
    """A schedule class of torch and where it wants its stages."""

    label: str
    schedule: str
    placement: Callable[[int, int], tuple[int, ...]]  # (rank, P) -> indices of the stages on that rank
    stages_per_rank: int = 2
    least_rounds: int = 1  # microbatches it needs, in units of P
    whole_rounds: bool = False  # it goes round in rounds of P microbatches or a few more

    def not_applicable(self, stages: int, microbatches: int) -> str:
        """Why it cannot run with so many microbatches; nothing where it can."""
        if microbatches < self.least_rounds * stages:
            return f"it needs {self.least_rounds * stages} microbatches or more at {stages} stages"
        rounds = max(1, microbatches // stages)
        if self.whole_rounds and microbatches % rounds:
            return f"{microbatches} microbatches do not make {rounds} equal rounds over {stages} stages"
        return ""

    def owners(self, stages: int) -> list[int]:
        """The rank of each part of the model, in order."""
        placed = {part: rank for rank in range(stages) for part in self.placement(rank, stages)}
        return [placed[part] for part in sorted(placed)]


def _straight(rank: int, stages: int) -> tuple[int, ...]:
    return (rank,)


def _looped(rank: int, stages: int) -> tuple[int, ...]:
    return (rank, rank + stages)


def _v_shaped(rank: int, stages: int) -> tuple[int, ...]:
    return (rank, 2 * stages - 1 - rank)


RIVALS = {
    "torch_1f1b": Rival("torch 1F1B", "Schedule1F1B", _straight, stages_per_rank=1),
    "torch_gpipe": Rival("torch GPipe", "ScheduleGPipe", _straight, stages_per_rank=1),
    "torch_interleaved_1f1b": Rival(
        "torch interleaved 1F1B", "ScheduleInterleaved1F1B", _looped, whole_rounds=True
    ),
    "torch_zbv": Rival("torch ZB-V", "ScheduleZBVZeroBubble", _v_shaped),
    "torch_dualpipev": Rival("torch DualPipeV", "ScheduleDualPipeV", _v_shaped, least_rounds=2),
}


class RivalRun:
    """One rank of a synchronous schedule: `step` is one whole update, so `drain` has nothing to do.

    Only a run that is to be drawn is `traced`; else torch's stages do nothing but what torch does.
    """

    def __init__(self, rival: Rival, work: Work, rank: int, traced: bool = False) -> None:
        parts = rival.stages_per_rank * work.stages
        placed = rival.placement(rank, work.stages)
        owners = rival.owners(work.stages)
        device = work.device_of(rank)
        self.modules = nn.ModuleList(build_module(work, part, parts, owners, device) for part in placed)
        if (prepared := prepare(work)) is not None:
            for module in self.modules:
                prepared(module)
        self.trace = TorchTrace(placed[0], rank, device) if traced else None
        stages = [
            WatchedStage(module, part, parts, device, trace=self.trace)
            for module, part in zip(self.modules, placed, strict=True)
        ]
        loss = loss_of(work)
        build = getattr(pipelining, rival.schedule)
        self.schedule = build(
            stages if rival.stages_per_rank > 1 else stages[0],
            n_microbatches=work.microbatches,
            loss_fn=loss if self.trace is None else self.trace.with_loss(loss),
        )
        self.inputs = (group_input(work, device=device),) if 0 in placed else ()
        self.target = group_target(work, device=device) if parts - 1 in placed else None
        self.optimizer = build_optimizer(self.modules)
        self.max_grad_norm = work.max_grad_norm
        self.watch = Stopwatch(device)
        self.losses: list[torch.Tensor] = []
        if self.trace is not None:
            self.trace.on = True

    @property
    def ends(self) -> list[float]:
        return self.watch.moments

    def step(self) -> None:
        self.schedule.step(*self.inputs, target=self.target, losses=self.losses, return_outputs=False)
        with contextlib.nullcontext() if self.trace is None else self.trace.update(self.trace.group):
            if self.max_grad_norm is not None:
                clip_over_ranks(self.modules, self.max_grad_norm)
            self.optimizer.step()
            self.optimizer.zero_grad()
        if self.trace is not None:
            self.trace.group += 1
        self.watch.mark()

    def take_trace(self) -> list[Span]:
        return [] if self.trace is None else self.trace.take()

    def drain(self) -> None:
        self.watch.read()

    def close(self) -> None:
        """torch's schedules talk over the default group."""


def clip_over_ranks(module: nn.Module, max_grad_norm: float) -> None:
    """Scale this rank's gradients by the norm over all ranks' gradients."""
    parameters = list(module.parameters())
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    squared = nn.utils.get_total_norm(gradients).square()
    dist.all_reduce(squared)
    nn.utils.clip_grads_with_norm_(parameters, max_grad_norm, squared.sqrt())
