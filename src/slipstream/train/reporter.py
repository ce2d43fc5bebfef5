"""From finished steps to events, progress and logs, without ever holding up the pipeline.

The loss is known on the last stage, the norm on every stage, each at its own time. Every rank keeps the steps it has
submitted until both are there and then reports them in order.
"""

from __future__ import annotations

import math
import resource
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slipstream.config import Config
from slipstream.config.objects import fetch
from slipstream.metrics.append import Appending
from slipstream.metrics.progress import Show, step_line
from slipstream.metrics.record import Recorder
from slipstream.metrics.throughput import Clock, Meter
from slipstream.pipeline.messages import on_host
from slipstream.train.board import KEPT_STEPS, Board
from slipstream.train.engine import RunEngine
from slipstream.train.health import Monitor


@dataclass(frozen=True)
class Position:
    """A rank's place among the ranks of a run. Ranks are data-major: rank = data_rank * stages + stage."""

    rank: int
    stages: int
    data_ranks: int
    has_loss: bool

    @property
    def leader(self) -> bool:
        return self.rank == 0

    @property
    def data_rank(self) -> int:
        return self.rank // self.stages

    @property
    def ranks(self) -> int:
        return self.stages * self.data_ranks


@dataclass
class Pending:
    step: int
    lr: float
    time: float  # when it was handed in
    norm: float | None = None


class Fetch:
    """The mean of some scalars, in double precision, on its way to the host. Asking whether it is there never waits:
    `.item()` would hold the host until the device has done all that was queued, and the device would then idle."""

    def __init__(self, scalars: list[Tensor]) -> None:
        mean = torch.stack(scalars).double().mean()
        self._host = on_host(mean)
        self._event: torch.cuda.Event | None = None
        if mean.is_cuda:
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(mean.device))

    def ready(self) -> bool:
        return self._event is None or self._event.query()

    def value(self) -> float:
        """The number, waiting for it."""
        if self._event is not None:
            self._event.synchronize()
        return self._host.item()


class Reporter:
    def __init__(
        self,
        config: Config,
        position: Position,
        engine: RunEngine,
        board: Board,
        meter: Meter,
        monitor: Monitor,
        warn: Callable[[int, str], None],
        recorder: Recorder | None,
        show: Show | None,
    ) -> None:
        self._config, self._seat, self._engine, self._board = config, position, engine, board
        self._meter, self._recorder, self._show = meter, recorder, show
        self._monitor, self._warn = monitor, warn
        self._log = self._callback = None
        if position.leader and config.train.callback is not None:
            self._callback = fetch("train.callback", config.train.callback)
        elif not position.leader:
            log = Path(config.run.dir) / "logs" / f"rank-{position.rank}.log"
            log.parent.mkdir(parents=True, exist_ok=True)
            self._log = Appending(log, config.train.disk_seconds)
        self._pending: deque[Pending] = deque()
        self._losses: deque[tuple[int, Fetch]] = deque()
        self._stages: list[dict[str, Any]] = []
        self._began = time.perf_counter()
        self.busy: tuple[float, ...] = ()
        self.reported = 0
        self.stop_asked = False  # by the user's callback

    def start(self, step: int) -> None:
        """Begin, or begin again, after `step`."""
        self.reported = step
        self._pending.clear()
        self._losses.clear()
        self._post_stage()
        self._read_stages()
        self._meter.start(step, time.perf_counter(), self._clocks())

    def submitted(self, step: int, lr: float, losses: list[Tensor]) -> None:
        self._pending.append(Pending(step, lr, time.perf_counter()))
        if self._due(step):
            self._post_stage()  # before the loss, so that whoever has the loss has this too
        if losses:
            self._losses.append((step, Fetch(losses)))

    def poll(self, *, finish: bool = False) -> None:
        """Report what can be reported now; `finish` (after a drain) waits for the rest."""
        self._post_losses(finish=finish)
        for item in self._pending:
            if item.norm is None:
                item.norm = self._engine.grad_norms.get(item.step - 1)
        while self._pending:
            item = self._pending[0]
            if item.norm is None:
                assert not finish, f"step {item.step} has no gradient norm after a drain"
                return
            keys = [f"loss/{item.step}/{rank}" for rank in range(self._seat.data_ranks)]
            shares = self._board.wait(*keys) if finish else self._board.read(*keys)
            if shares is None:
                return
            self._pending.popleft()
            self._report(item, sum(shares) / len(shares))

    def close(self) -> None:
        if self._log is not None:
            self._log.close()

    def _post_losses(self, *, finish: bool) -> None:
        while self._losses and (finish or self._losses[0][1].ready()):
            step, loss = self._losses.popleft()
            self._board.post(f"loss/{step}/{self._seat.data_rank}", loss.value())
            self._board.remove(f"loss/{step - KEPT_STEPS}/{self._seat.data_rank}")

    def _report(self, item: Pending, loss: float) -> None:
        step, norm = item.step, item.norm
        assert norm is not None
        skipped = not math.isfinite(norm)
        self._meter.step(step, item.time)
        if self._due(step):
            self._read_stages()
            self._meter.stages(self._clocks())
        values: dict[str, Any] = {
            "loss": loss,
            "lr": item.lr,
            "grad_norm": norm,
            "skipped": skipped,
            "tokens": step * self._config.tokens_per_step,
            "tokens_per_second": round(self._meter.tokens_per_second, 1) or None,  # not known is not 0
            "busy": [round(share, 4) for share in self._meter.busy],
            "mfu": None if (mfu := self._meter.mfu) is None else round(mfu, 4),
            "memory_bytes": [stage["memory"] for stage in self._stages],
            "seconds": round(item.time - self._began, 3),
        }
        event = {"step": step} | values
        if self._recorder is not None:
            self._recorder.write("step", step, **values)
        if self._show is not None:
            self._show.step(event, self._meter.eta_seconds)
        if self._log is not None and self._due(step):
            self._log.write(f"step {step}  {step_line(event)}\n")
        self.busy = self._meter.busy or self.busy
        self.reported = step
        if (warning := self._monitor.observe(step, loss, skipped)) is not None:
            self._warn(step, warning)
        if self._callback is not None and self._callback(event):
            self.stop_asked = True

    def _post_stage(self) -> None:
        busy = self._engine.busy_seconds
        clock = None if math.isnan(busy) else (time.perf_counter(), busy)
        value = {"clock": clock, "memory": memory_bytes()}
        self._board.post(f"stage/{self._seat.rank}", value)

    def _read_stages(self) -> None:
        """The leader looks at what every stage last posted (its first data rank); the others at
        themselves.
        """
        ranks = range(self._seat.stages) if self._seat.leader else (self._seat.rank,)
        self._stages = self._board.wait(*(f"stage/{rank}" for rank in ranks))

    def _clocks(self) -> list[Clock]:
        clocks = [stage["clock"] for stage in self._stages]
        return [] if None in clocks else [(now, busy) for now, busy in clocks]

    def _due(self, step: int) -> bool:
        return step % (self._config.train.log_every or 1) == 0


def memory_bytes() -> int:
    """The peak of this process: of the GPU if it uses one, else resident."""
    if torch.cuda.is_initialized():
        # What `max_memory_allocated` gives, without the table of all statistics it writes first.
        return torch.cuda.memory_stats_as_nested_dict()["allocated_bytes"]["all"]["peak"]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
