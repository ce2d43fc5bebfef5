"""What a stage did and when: spans for the timeline, busy time for the utilisation, the least times for planning.

Times are of the host's monotonic clock, which all processes of one machine share. On a GPU the host only queues
work, so a stage that is being traced synchronises around each action.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import torch

from slipstream.schedule.actions import Action, Kind
from slipstream.schedule.timeline import Span


class Trace:
    """The clock of one stage."""

    def __init__(self, stage: int, device: torch.device) -> None:
        self.on = False
        self.busy_seconds = 0.0
        self.least_seconds: dict[Kind, float] = {}
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
        self.least_seconds[kind] = min(self.least_seconds.get(kind, end - start), end - start)
        if self.on:
            self._spans.append(
                Span(self._stage, Action(kind, self._stage, microbatch, group, version), start, end)
            )

    def take(self) -> list[Span]:
        spans, self._spans = self._spans, []
        return spans

    def _settle(self) -> None:
        if self.on and self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
