"""The measured timeline of a few groups, as one event: what each stage did and when, beside its mean costs.

The event's `predicted` holds the costs a simulator needs to lay its prediction over the measurement.
"""

from __future__ import annotations

from statistics import fmean
from typing import Any

from slipstream.metrics.record import Recorder
from slipstream.schedule.actions import Kind
from slipstream.schedule.timeline import Span
from slipstream.train.board import Board
from slipstream.train.engine import Engine
from slipstream.train.reporter import Seat

GROUPS = 3  # recorded from the chosen step on


class Tracing:
    """Switches the trace on and off on each rank; the leader collects and writes."""

    def __init__(self, engine: Engine, board: Board, recorder: Recorder | None, seat: Seat, at: int) -> None:
        self._engine, self._board, self._recorder = engine, board, recorder
        self._rank, self._stages, self._at = seat.rank, seat.stages, at
        self._collecting = False

    def before(self, step: int) -> None:
        """Called with the number of groups submitted, before the next one is."""
        if self._at and step == self._at:
            self._engine.trace(True)
        elif self._at and step == self._at + GROUPS:
            self._post(self._engine.trace(False))
        self._collect()

    def finish(self) -> None:
        """After the last drain: what is still being recorded or collected."""
        self._post(self._engine.trace(False))
        self._collect(wait=True)

    def _post(self, spans: list[Span]) -> None:
        if spans and self._rank < self._stages:
            rows = [
                [span.rank, str(span.action.kind), *span.action[1:], span.start, span.end] for span in spans
            ]
            self._board.post(f"timeline/{self._rank}", rows)
            self._collecting = True

    def _collect(self, *, wait: bool = False) -> None:
        if self._recorder is None or not self._collecting:
            return
        keys = [f"timeline/{rank}" for rank in range(self._stages)]
        found = self._board.wait(*keys) if wait else self._board.read(*keys)
        if found is not None:
            self._collecting = False
            rows = [row for part in found for row in part]
            self._recorder.write("timeline", self._at, spans=rows, predicted=costs(rows, self._stages))


def costs(rows: list[list[Any]], stages: int) -> dict[str, list[float]]:
    """Mean seconds of each kind of action, by stage."""
    names = {Kind.FORWARD: "forward", Kind.BACKWARD: "backward", Kind.UPDATE: "update"}
    found = {}
    for kind, name in names.items():
        times = [
            [row[7] - row[6] for row in rows if row[0] == stage and row[1] == kind] for stage in range(stages)
        ]
        found[name] = [fmean(values) if values else 0.0 for values in times]
    return found
