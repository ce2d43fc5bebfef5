"""What a stage did and when: spans for the timeline, busy time for the utilisation, the least times for planning.

Times are of the host's monotonic clock, which all processes of one machine share. On a GPU the host only queues work:
there an action lies between two events of the stage's stream, read when the device has passed them, so that being
traced does not hold a stage up.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Iterator
from statistics import median
from typing import NamedTuple

import torch

from slipstream.schedule.actions import Action, Kind
from slipstream.schedule.timeline import Span

RECENT = 64  # actions of a kind that are remembered


class DeviceClock:
    """Moments of a GPU's stream, in seconds of the host's clock."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._anchor = self.mark()
        self._anchor.synchronize()
        self._anchor_seconds = time.perf_counter()

    def mark(self) -> torch.cuda.Event:
        """The moment when the device gets here."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def seconds(self, mark: torch.cuda.Event) -> float:
        """When the device got there; it waits until it has."""
        mark.synchronize()
        return self._anchor_seconds + self._anchor.elapsed_time(mark) / 1e3


class _Queued(NamedTuple):
    """An action that the device may not have done yet."""

    action: Action
    start: torch.cuda.Event
    end: torch.cuda.Event
    clock: DeviceClock | None  # where a span was asked for


class Trace:
    """The clock of one stage."""

    def __init__(self, stage: int, device: torch.device) -> None:
        self._stage = stage
        self._device = device
        self._on = False
        self._busy_seconds = 0.0
        self._recent: dict[Kind, deque[float]] = {}  # durations, for planning
        self._spans: list[Span] = []
        self._queued: deque[_Queued] = deque()
        self._clock = DeviceClock(device) if device.type == "cuda" else None

    @property
    def on(self) -> bool:
        """Whether spans are recorded."""
        return self._on

    @on.setter
    def on(self, on: bool) -> None:
        if on and not self._on and self._clock is not None:
            self._clock = DeviceClock(self._device)  # anchored anew: device and host clocks drift apart
        self._on = on

    @property
    def busy_seconds(self) -> float:
        """Time in actions so far; on a GPU, in those the device has done."""
        self._read_queued()
        return self._busy_seconds

    @contextlib.contextmanager
    def action(
        self, kind: Kind, group: int, microbatch: int | None = None, version: int | None = None
    ) -> Iterator[None]:
        action = Action(kind, self._stage, microbatch, group, version)
        if self._clock is not None:
            start = self._clock.mark()
            yield
            self._queued.append(_Queued(action, start, self._clock.mark(), self._clock if self._on else None))
            self._read_queued()
            return
        began = time.perf_counter()
        yield
        ended = time.perf_counter()
        self._note(kind, ended - began)
        if self._on:
            self._spans.append(Span(self._stage, action, began, ended))

    def pair_seconds(self) -> tuple[float, float]:
        """One forward and one backward: the least time they took lately, and the typical time."""
        kinds = (Kind.FORWARD, Kind.BACKWARD)
        self._read_queued(wait=any(kind not in self._recent for kind in kinds))
        recent = [self._recent[kind] for kind in kinds]
        return sum(min(times) for times in recent), sum(median(times) for times in recent)

    def take(self) -> list[Span]:
        self._read_queued(wait=True)
        spans, self._spans = self._spans, []
        return spans

    def _note(self, kind: Kind, seconds: float) -> None:
        self._busy_seconds += seconds
        self._recent.setdefault(kind, deque(maxlen=RECENT)).append(seconds)

    def _read_queued(self, wait: bool = False) -> None:
        """Take the times of what the device has done."""
        while self._queued and (wait or self._queued[0].end.query()):
            action, start, end, clock = self._queued.popleft()
            end.synchronize()
            self._note(action.kind, start.elapsed_time(end) / 1e3)
            if clock is not None:
                self._spans.append(Span(self._stage, action, clock.seconds(start), clock.seconds(end)))
