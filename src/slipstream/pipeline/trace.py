"""What a stage did and when: spans for the timeline, busy time for the utilisation, the least times for planning.

Times are of the host's monotonic clock, which all processes of one machine share. On a GPU the host only queues
work, so a stage that is being traced synchronises around each action.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Iterator
from statistics import median

import torch

from slipstream.schedule.actions import Action, Kind
from slipstream.schedule.timeline import Span

RECENT = 64  # actions of a kind that are remembered


class Trace:
    """The clock of one stage."""

    def __init__(self, stage: int, device: torch.device) -> None:
        self.on = False
        self.busy_seconds = 0.0
        self._recent: dict[Kind, deque[float]] = {}  # durations, for planning
        self._stage = stage
        self._device = device
        self._spans: list[Span] = []

    @contextlib.contextmanager
    def action(
        self, kind: Kind, group: int, microbatch: int | None = None, version: int | None = None
    ) -> Iterator[None]:
        self._settle()
        start = time.perf_counter()
        yield
        self._settle()
        end = time.perf_counter()
        self.busy_seconds += end - start
        self._recent.setdefault(kind, deque(maxlen=RECENT)).append(end - start)
        if self.on:
            self._spans.append(
                Span(self._stage, Action(kind, self._stage, microbatch, group, version), start, end)
            )

    def pair_seconds(self) -> tuple[float, float]:
        """One forward and one backward: the least time they took lately, and the typical time."""
        recent = [self._recent[kind] for kind in (Kind.FORWARD, Kind.BACKWARD)]
        return sum(min(times) for times in recent), sum(median(times) for times in recent)

    def take(self) -> list[Span]:
        spans, self._spans = self._spans, []
        return spans

    def _settle(self) -> None:
        if self.on and self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
