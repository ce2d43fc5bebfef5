"""What a stage did and when: spans for the timeline, busy time for the utilisation, the least times for planning.

Times are of the host's monotonic clock, which all processes of one machine share. On a GPU the host only queues work:
there an action lies between two events of the stage's stream, read when the device has passed them. Nothing here waits
for that stream unless `take` is called before it is done, so being traced does not hold a stage up.
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
ANCHORS = 5  # tries at setting the two clocks side by side; the shortest counts


class DeviceClock:
    """Moments of a GPU's stream, in seconds of the host's clock.

    The two clocks are set side by side at one event on a stream of its own, where nothing is queued before it: the
    host waits some microseconds for it, and never for the work that is under way.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        empty = torch.cuda.Stream(device)
        tries = []
        for _ in range(ANCHORS):
            event = torch.cuda.Event(enable_timing=True)
            before = time.perf_counter()
            event.record(empty)
            event.synchronize()
            after = time.perf_counter()
            tries.append((after - before, (before + after) / 2, event))
        _, self._anchor_seconds, self._anchor = min(tries, key=lambda found: found[0])

    def mark(self) -> torch.cuda.Event:
        """The moment when the device gets here."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def seconds(self, mark: torch.cuda.Event) -> float:
        """When the device got there; it waits until it has."""
        mark.synchronize()
        return self._anchor_seconds + self._anchor.elapsed_time(mark) / 1e3


Moment = float | torch.cuda.Event


class _Queued(NamedTuple):
    """An action that the device may not have done yet."""

    action: Action
    start: torch.cuda.Event
    end: torch.cuda.Event
    clock: DeviceClock | None  # where a span was asked for
    paused: bool  # the stage stood still on purpose before it


class Trace:
    """The clock of one rank; `stage` is the one whose actions it times unless told otherwise."""

    def __init__(self, stage: int, device: torch.device, rank: int | None = None) -> None:
        self._stage = stage
        self._rank = stage if rank is None else rank
        self._device = device
        self._on = False
        self._busy_seconds = 0.0
        self._recent: dict[Kind, deque[float]] = {}  # durations, for planning
        self._last_update = (-1, 0.0)
        self._update_ended: Moment | None = None  # the last one that has been read
        self._paused = False
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
        began = self.begin()
        yield
        self.end(began, Action(kind, self._stage, microbatch, group, version))

    def begin(self) -> Moment:
        """Now; on a GPU, when the device gets here."""
        return time.perf_counter() if self._clock is None else self._clock.mark()

    def end(self, began: Moment, action: Action) -> None:
        """`action` ran from `began` until now."""
        ended = self.begin()
        if isinstance(began, torch.cuda.Event):
            assert isinstance(ended, torch.cuda.Event)
            paused = self._take_pause(action)
            self._queued.append(_Queued(action, began, ended, self._clock if self._on else None, paused))
            self._read_queued()
            return
        assert not isinstance(ended, torch.cuda.Event)
        self._note(action.kind, ended - began)
        if action.kind is Kind.UPDATE:
            self._updated(action.group, ended, self._take_pause(action))
        if self._on:
            self._spans.append(Span(self._rank, action, began, ended))

    def pair_seconds(self) -> tuple[float, float]:
        """One forward and one backward since the last call: the least time they took, the typical one; 0: not known.

        While a pipeline fills, a stage whose neighbours are idle may be faster than it ever will be again: power and
        caches are shared. That is no jitter, so what was measured then is not compared with what comes later.
        It waits for no device: others may wait there for this very host.
        """
        self._read_queued()
        recent = [self._recent.pop(kind, None) for kind in (Kind.FORWARD, Kind.BACKWARD)]
        if not all(recent):
            return 0.0, 0.0
        recent = [times for times in recent if times]
        return sum(min(times) for times in recent), sum(median(times) for times in recent)

    def last_update(self) -> tuple[int, float]:
        """The last update that is known to be done, -1: none; and the time from the one before it to that, 0: there
        was none, or a pause between them. It waits for no device."""
        self._read_queued()
        return self._last_update

    def pause(self) -> None:
        """The stage stands still from here to its next action."""
        self._paused = True

    def take(self) -> list[Span]:
        """The spans recorded since the last call; it waits until the device has done them."""
        while any(queued.clock is not None for queued in self._queued):
            self._read_first()
        spans, self._spans = self._spans, []
        return spans

    def _note(self, kind: Kind, seconds: float) -> None:
        self._busy_seconds += seconds
        self._recent.setdefault(kind, deque(maxlen=RECENT)).append(seconds)

    def _take_pause(self, action: Action) -> bool:
        """Whether there was a pause before this update and after the one before."""
        paused = self._paused and action.kind is Kind.UPDATE
        self._paused = self._paused and not paused
        return paused

    def _updated(self, group: int, ended: Moment, paused: bool) -> None:
        before, self._update_ended = self._update_ended, ended
        seconds = 0.0
        if before is not None and not paused:
            if isinstance(ended, torch.cuda.Event):
                assert isinstance(before, torch.cuda.Event)
                seconds = before.elapsed_time(ended) / 1e3
            else:
                assert not isinstance(before, torch.cuda.Event)
                seconds = ended - before
        self._last_update = (group, seconds)

    def _read_queued(self) -> None:
        """Take the times of what the device has done."""
        while self._queued and self._queued[0].end.query():
            self._read_first()

    def _read_first(self) -> None:
        action, start, end, clock, paused = self._queued.popleft()
        end.synchronize()
        self._note(action.kind, start.elapsed_time(end) / 1e3)
        if action.kind is Kind.UPDATE:
            self._updated(action.group, end, paused)
        if clock is not None:
            self._spans.append(Span(self._rank, action, clock.seconds(start), clock.seconds(end)))
