"""A run's rows as named, coloured curves, and figures in words: what report sections and the live view share."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from slipstream.metrics.events import Event, Run, columns, number
from slipstream.metrics.report_page import Series

STAGE_CURVES = 8  # beyond this many stages a curve per stage is unreadable: a band instead


def labels(runs: Sequence[Run]) -> list[str]:
    """Distinct names: the folder's, with its parent's where two agree, numbered where even those do."""
    short = [run.name for run in runs]
    names = [
        name if short.count(name) == 1 else f"{run.path.resolve().parent.name}/{name}"
        for run, name in zip(runs, short, strict=True)
    ]
    return [
        name if names.count(name) == 1 else f"{name} ({names[:index].count(name) + 1})"
        for index, name in enumerate(names)
    ]


class Columns:
    """One run's step rows, read once, and how its curves are named and coloured."""

    def __init__(self, run: Run, name: str, alone: bool, colour: int) -> None:
        self.run, self.name, self.alone, self.colour = run, name, alone, colour
        self.steps = run.surviving("step")
        self.validation = run.surviving("validation")
        self.start = run.last("start")
        self.clock = run.clock()

    def curve(
        self, rows: Sequence[Event], key: str, name: str, *, scale: float = 1.0, **style: Any
    ) -> Series:
        xs, ys = columns(rows, key)
        style.setdefault("colour", None if self.alone else self.colour)
        return Series(self.label(name), xs, [y * scale for y in ys], **style)

    def label(self, name: str) -> str:
        return name if self.alone else f"{self.name}: {name}"

    def stage_curves(self, key: str, scale: float = 1.0) -> list[Series]:
        """A curve per stage for one run of few stages; else the mean over stages in a band of their range."""
        rows = [(row["step"], row[key]) for row in self.steps if isinstance(row.get(key), list)]
        count = max((len(values) for _, values in rows), default=0)
        table = [  # a stage whose figure is missing keeps its place, and has no point
            (step, [None if (found := number(value)) is None else found * scale for value in values])
            for step, values in rows
            if len(values) == count and numbers(values)
        ]
        if not table:
            return []
        if self.alone and count <= STAGE_CURVES:
            by_stage = [
                {step: value for step, row in table if (value := row[stage]) is not None}
                for stage in range(count)
            ]
            return [
                Series(f"stage {stage}", list(known), list(known.values()))
                for stage, known in enumerate(by_stage)
            ]
        xs, known = [step for step, _ in table], [[v for v in row if v is not None] for _, row in table]
        mean = [statistics.fmean(row) for row in known]
        band = ([min(row) for row in known], [max(row) for row in known])
        return [
            Series(self.label("mean of stages"), xs, mean, *band, colour=None if self.alone else self.colour)
        ]

    def seconds_at(self, event: Event) -> float | None:
        """Wall clock of the run when an event was written; while it was down it stood still."""
        return self.clock.get(id(event))


def numbers(values: object) -> list[float]:
    """The finite numbers of a list; nothing of anything else."""
    if not isinstance(values, list):
        return []
    return [found for value in values if (found := number(value)) is not None]


def duration(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{seconds:.1f} s"


def shape(start: Event) -> str:
    """A run's layout in words, from its start event."""
    if not start:
        return ""
    if "schedule" not in start:
        return "layout not recorded"
    schedule, stages, data = (start.get(key, "?") for key in ("schedule", "stages", "data_ranks"))
    words = f"{schedule}, {stages} stage{'' if stages == 1 else 's'}"
    return words if data == 1 else f"{words} x {data} data ranks"
