"""What is compared: one rank of the bubble-free bound, of torch's synchronous schedules, and of ours, on one work.

The bound is our schedule's own actions on every rank at the same time, with nothing to wait for:

    bound = max over stages of  m (t_F + t_B) + t_update + t_publish

measured, not computed: all ranks run together, so they share caches and memory bandwidth as a pipeline would, and each
stage keeps as many microbatches between forward and backward as it does in the pipeline (P-1-s). Inputs and gradients
are local tensors. The update is ours too: a norm (the rank's own), clipping where asked for, the step, and the copy
into the bank that nobody reads any more.

torch's interleaved and V-shaped schedules put two half-size stages on each rank: the same model, the same
microbatches. Clipping is exact there too: every rank waits for an all-reduce of the squared norms.
"""

from __future__ import annotations

import contextlib
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining

from slipstream.bench.work import Work, build_optimizer
from slipstream.lists import copy_
from slipstream.pipeline.links import Links
from slipstream.pipeline.runtime import Schedule2BW
from slipstream.pipeline.trace import DeviceClock
from slipstream.pipeline.watched_stage import TorchTrace, WatchedStage
from slipstream.schedule.actions import Kind
from slipstream.schedule.timeline import Span

BOUND, ENGINE, BASELINE = "bound", "slipstream", "torch_1f1b"
ENGINE_2BW = "slipstream_2bw"  # with all microbatches old: beside it stands what a cutover costs


class Stopwatch:
    """Moments on the clock that all processes of a machine share. On a GPU a mark does not wait for the device."""

    def __init__(self, device: torch.device) -> None:
        self.moments: list[float] = []
        self._clock = DeviceClock(device) if device.type == "cuda" else None
        self._marks: list[torch.cuda.Event] = []

    def mark(self) -> None:
        """Now; on a GPU, when what has been queued is done."""
        if self._clock is None:
            self.moments.append(time.perf_counter())
        else:
            self._marks.append(self._clock.mark())

    def read(self) -> list[float]:
        """Every mark; it waits for the device."""
        if self._clock is not None:
            self.moments += [self._clock.seconds(mark) for mark in self._marks]
            self._marks.clear()
        return self.moments


class Run(ABC):
    """One rank of a contender. `step` hands in one group, whose last backwards may run in a later call."""

    def __init__(self, work: Work, rank: int) -> None:
        self.work, self.device = work, work.device_of(rank)
        self.ends: list[float] = []  # when this rank was done with each group's work; complete after `drain`
        self.losses: list[Tensor] = []  # of the last group, on the rank that computes them

    @abstractmethod
    def step(self) -> None: ...

    @abstractmethod
    def drain(self) -> None: ...

    @property
    def settled(self) -> bool:
        """Whether its updates are as all later ones will be; the same on all ranks."""
        return True

    @property
    def in_flight(self) -> int | None:
        """Microbatches on the first stage, where that is the contender's choice."""
        return None

    def take_trace(self) -> list[Span]:
        """What was done since the last call, with what was in flight."""
        return []

    def close(self) -> None:  # noqa: B027
        """Only ours has links of its own."""


class _InFlight(NamedTuple):
    """A microbatch between its forward and its backward."""

    bank: nn.Module
    output: Tensor  # on the last stage, the loss
    gradient: Tensor | None
    ends_group: bool


class BoundRun(Run):
    """Whether the norms were finite is looked at when the device is done."""

    def __init__(self, work: Work, rank: int) -> None:
        super().__init__(work, rank)
        self.watch = Stopwatch(self.device)
        self.ends = self.watch.moments
        self.is_first, self.is_last = rank == 0, rank == work.stages - 1
        self.master = work.module(rank, work.stages, device=self.device)
        self.banks = [deepcopy(self.master), deepcopy(self.master)]
        for bank in self.banks:
            work.prepare(bank)
        self.optimizer = build_optimizer(self.master)
        self.inputs = work.inputs(self.device, self.is_first).chunk(work.microbatches)
        self.targets = work.targets(self.device, self.is_last).chunk(work.microbatches)
        self.loss = work.loss()
        self.warm_up = work.stages - 1 - rank
        self.flight: deque[_InFlight] = deque()
        self.norms: list[Tensor] = []

    def step(self) -> None:
        bank = self.banks[0]
        self.losses.clear()
        for index in range(self.work.microbatches):
            self._forward(bank, index)
            if len(self.flight) > self.warm_up:
                self._backward()
        self.banks.reverse()

    def drain(self) -> None:
        while self.flight:
            self._backward()
        self.watch.read()
        assert all(torch.isfinite(norm) for norm in self.norms), "the bench's own work diverged"
        self.norms.clear()

    def _forward(self, bank: nn.Module, index: int) -> None:
        value, target = self.inputs[index], self.targets[index]
        output = bank(value if self.is_first else value.detach().requires_grad_())
        gradient: Tensor | None = target  # costs what the next stage's gradient would cost
        if self.is_last:
            loss = self.loss(output, target)
            self.losses.append(loss.detach())
            output, gradient = loss / self.work.microbatches, None
        self.flight.append(_InFlight(bank, output, gradient, index + 1 == self.work.microbatches))

    def _backward(self) -> None:
        bank, output, gradient, ends_group = self.flight.popleft()
        output.backward(gradient)
        if ends_group:
            self._update(bank)
            self.watch.mark()

    def _update(self, bank: nn.Module) -> None:
        read, newest = list(bank.parameters()), list(self.master.parameters())
        for source, parameter in zip(read, newest, strict=True):
            parameter.grad, source.grad = source.grad, None
        norm = nn.utils.get_total_norm([p.grad for p in newest if p.grad is not None])
        self.norms.append(norm)
        if self.work.max_grad_norm is not None:
            nn.utils.clip_grads_with_norm_(newest, self.work.max_grad_norm, norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        with torch.no_grad():
            copy_(read, newest)


class EngineRun(Run):
    """`Schedule2BW`, whose trace says when a group was done."""

    def __init__(self, work: Work, rank: int) -> None:
        super().__init__(work, rank)
        stage = pipelining.PipelineStage(
            work.module(rank, work.stages, device=self.device), rank, work.stages, self.device
        )
        Links.slow_seconds = work.link_latency_seconds  # every message of those made now leaves so late
        try:
            self.schedule = Schedule2BW(
                stage,
                n_microbatches=work.microbatches,
                loss_fn=work.loss(),
                optimizer=build_optimizer,
                correction=work.correction,
                max_grad_norm=work.max_grad_norm,
                cutover=work.cutover,
                in_flight=work.in_flight,
                prepare=work.prepare if work.compile else None,
            )
        finally:
            Links.slow_seconds = 0.0
        self.schedule.trace(True)
        self.inputs = (work.inputs(self.device),) if rank == 0 else ()
        last = rank == work.stages - 1
        self.target: dict[str, Any] = (
            {"target": work.targets(self.device), "losses": self.losses} if last else {}
        )

    def step(self) -> None:
        self.schedule.step(*self.inputs, **self.target, return_outputs=False)

    @property
    def settled(self) -> bool:
        return self.schedule.settled

    @property
    def in_flight(self) -> int:
        return self.schedule.in_flight

    def take_trace(self) -> list[Span]:
        self.schedule.drain()
        return self.schedule.take_trace()

    def drain(self) -> None:
        last = self.work.microbatches - 1
        self.ends.extend(
            span.end
            for span in self.take_trace()
            if span.action.kind is Kind.BACKWARD and span.action.microbatch == last
        )

    def close(self) -> None:
        self.schedule.close()


@dataclass(frozen=True)
class Rival:
    """A schedule class of torch and where it wants its stages."""

    label: str
    schedule: str
    second: Callable[[int, int], int] | None = None  # (rank, P) -> the other stage on that rank
    least_rounds: int = 1  # microbatches it needs, in units of P
    whole_rounds: bool = False  # it goes round in rounds of P microbatches or a few more

    def placement(self, rank: int, stages: int) -> tuple[int, ...]:
        """The stages on that rank."""
        return (rank,) if self.second is None else (rank, self.second(rank, stages))

    def not_applicable(self, stages: int, microbatches: int) -> str:
        """Why it cannot run with so many microbatches; nothing where it can."""
        if microbatches < self.least_rounds * stages:
            return f"it needs {self.least_rounds * stages} microbatches or more at {stages} stages"
        rounds = max(1, microbatches // stages)
        if self.whole_rounds and microbatches % rounds:
            return f"{microbatches} microbatches do not make {rounds} equal rounds over {stages} stages"
        return ""


def _v_shaped(rank: int, stages: int) -> int:
    return 2 * stages - 1 - rank


RIVALS = {
    BASELINE: Rival("torch 1F1B", "Schedule1F1B"),
    "torch_gpipe": Rival("torch GPipe", "ScheduleGPipe"),
    "torch_interleaved_1f1b": Rival(
        "torch interleaved 1F1B",
        "ScheduleInterleaved1F1B",
        lambda rank, stages: rank + stages,
        whole_rounds=True,
    ),
    "torch_zbv": Rival("torch ZB-V", "ScheduleZBVZeroBubble", _v_shaped),
    "torch_dualpipev": Rival("torch DualPipeV", "ScheduleDualPipeV", _v_shaped, least_rounds=2),
}
LABELS = {
    BOUND: "bubble-free bound",
    ENGINE: ENGINE,
    ENGINE_2BW: "slipstream, all old",
    **{name: rival.label for name, rival in RIVALS.items()},
}


class RivalRun(Run):
    """`step` is one whole update. Only a run that is to be drawn is `traced`; else nothing is added to torch."""

    def __init__(self, rival: Rival, work: Work, rank: int, traced: bool = False) -> None:
        super().__init__(work, rank)
        self.watch = Stopwatch(self.device)
        self.ends = self.watch.moments
        placed = rival.placement(rank, work.stages)
        owner = {part: at for at in range(work.stages) for part in rival.placement(at, work.stages)}
        parts = len(owner)
        owners = [owner[part] for part in range(parts)]
        self.modules = nn.ModuleList(work.module(part, parts, owners, self.device) for part in placed)
        for module in self.modules:
            work.prepare(module)
        self.trace = TorchTrace(placed[0], rank, self.device) if traced else None
        stages = [
            WatchedStage(module, part, parts, self.device, trace=self.trace)
            for module, part in zip(self.modules, placed, strict=True)
        ]
        loss = work.loss()
        self.schedule = getattr(pipelining, rival.schedule)(
            stages if len(placed) > 1 else stages[0],
            n_microbatches=work.microbatches,
            loss_fn=loss if self.trace is None else self.trace.with_loss(loss),
        )
        self.inputs = (work.inputs(self.device),) if 0 in placed else ()
        self.target = work.targets(self.device) if parts - 1 in placed else None
        self.optimizer = build_optimizer(self.modules)
        if self.trace is not None:
            self.trace.on = True

    def step(self) -> None:
        self.schedule.step(*self.inputs, target=self.target, losses=self.losses, return_outputs=False)
        with contextlib.nullcontext() if self.trace is None else self.trace.update(self.trace.group):
            if self.work.max_grad_norm is not None:
                _clip_over_ranks(self.modules, self.work.max_grad_norm)
            self.optimizer.step()
            self.optimizer.zero_grad()
        if self.trace is not None:
            self.trace.group += 1
        self.watch.mark()

    def drain(self) -> None:
        self.watch.read()

    def take_trace(self) -> list[Span]:
        return [] if self.trace is None else self.trace.take()


def _clip_over_ranks(module: nn.Module, max_grad_norm: float) -> None:
    """Scale this rank's gradients by the norm over all ranks' gradients."""
    parameters = list(module.parameters())
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    squared = nn.utils.get_total_norm(gradients).square()
    dist.all_reduce(squared)
    nn.utils.clip_grads_with_norm_(parameters, max_grad_norm, squared.sqrt())


def build_run(name: str, work: Work, rank: int, traced: bool = False) -> Run:
    if name == BOUND:
        return BoundRun(work, rank)
    if name == ENGINE:
        return EngineRun(work, rank)
    if name == ENGINE_2BW:
        return EngineRun(replace(work, cutover=work.microbatches), rank)
    return RivalRun(RIVALS[name], work, rank, traced)
