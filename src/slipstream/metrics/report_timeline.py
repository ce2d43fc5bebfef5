"""A run's `timeline` event -> the measured timeline over the predicted one, and the delay of every
microbatch.

The prediction is `simulate` of the same schedule with the stage costs recorded in the event. A run is
recorded somewhere in its middle, so the simulated schedule is given LEAD groups of running-in, and the
two are laid over one another at the start of the first recorded group's first forward on rank 0.
"""

from __future__ import annotations

import math
from statistics import fmean
from typing import Any

from slipstream.errors import UserError
from slipstream.metrics.events import Event, number
from slipstream.metrics.report_page import Grid, Lanes
from slipstream.schedule.cutover import FELT
from slipstream.schedule.generate import build, canonical
from slipstream.schedule.simulate import Costs, simulate

LEAD = 3  # simulated groups before the first one drawn: the pipeline is full by then
NEGLIGIBLE_WAIT = 0.005  # of an update: below it a wait at the cutover is not worth a word
MOST_BARS = 6000  # more than this is neither readable nor quick to draw

Bar = tuple[int, str, int, int | None, int, int | None, float, float]  # the rows of the event's `spans`


def lanes(event: Event, start: Event, title: str) -> Lanes | None:
    """Measured bars, and the predicted ones where the event holds the costs to predict with."""
    measured = spans(event)
    if not measured:
        return None
    note = "Numbers are microbatches; shades alternate between groups. Hover for stage, group and version."
    if len(measured) > MOST_BARS:
        note += f" The first {MOST_BARS} of {len(measured)} actions are drawn."
        measured = measured[:MOST_BARS]
    origin = measured[0][6]
    measured = [_shift(bar, -origin) for bar in measured]
    try:
        predicted = predict(measured, event.get("predicted"), start)
    except (UserError, ValueError, TypeError, KeyError) as error:
        predicted, note = [], f"{note} No prediction: {error}"
    if predicted:
        real, model = period(measured), period(predicted)
        note += " The thin row below each rank is the prediction."
        if real and model:
            note += (
                f" Seconds per update: measured {real:.4g}, predicted {model:.4g} ({real / model - 1:+.1%})."
            )
    note += at_cutover(measured, event.get("predicted"), start)
    ranks = 1 + max(bar[0] for bar in measured)
    return Lanes(title, [f"rank {rank}" for rank in range(ranks)], measured, predicted, note)


def spans(event: Event) -> list[Bar]:
    """The well-formed rows of the event, in order of their start."""
    rows = event.get("spans")
    found = [tuple(row) for row in rows if _well_formed(row)] if isinstance(rows, list) else []
    return sorted(found, key=lambda row: row[6])


def _well_formed(row: Any) -> bool:
    if not isinstance(row, list) or len(row) != 8 or not isinstance(row[1], str):
        return False
    whole = all(isinstance(value, int) and value >= 0 for value in (row[0], row[2], row[4]))
    maybe = all(value is None or isinstance(value, int) for value in (row[3], row[5]))
    return whole and maybe and row[0] < 4096 and number(row[6]) is not None and number(row[7]) is not None


def predict(measured: list[Bar], costs: Any, start: Event) -> list[Bar]:
    """The same groups as `measured`, simulated with the stage costs the run recorded."""
    if not isinstance(costs, dict) or not costs:
        return []
    name, stages, m = str(start["schedule"]), int(start["stages"]), int(start["microbatches"])
    entered = [bar[4] for bar in measured if bar[:2] == (0, "F") and bar[3] == 0]
    if not entered:
        raise UserError("no group begins in what was recorded.")
    first, last = min(entered), max(bar[4] for bar in measured)  # backwards of the group before come first
    options: dict[str, int | None] = {}
    if canonical(name) == "pipedream_2bw":
        options = {"in_flight": in_flight(measured, stages, m), "cutover": cutover(start)}
    schedule = build(name, stages=stages, microbatches=m, groups=LEAD + last - first + 2, **options)
    known = {key: value for key, value in costs.items() if key in Costs.__dataclass_fields__}
    timeline = simulate(schedule, Costs(**known))
    bars: list[Bar] = [
        (span.rank, span.action.kind.value, span.action.stage, span.action.microbatch,
         span.action.group - LEAD + first,
         None if span.action.version is None else span.action.version - LEAD + first, span.start, span.end)
        for span in timeline.spans
    ]  # fmt: skip
    shift = _entry(measured, first) - _entry(bars, first)
    wanted = {bar[:5] for bar in measured}
    return [_shift(bar, shift) for bar in bars if bar[:5] in wanted]


def cutover(start: Event) -> int | None:
    """How many microbatches of an update are old; None: all, or the run does not say."""
    found = start.get("cutover")
    return found if isinstance(found, int) else None


def at_cutover(bars: list[Bar], costs: Any, start: Event) -> str:
    """Sentences about the old part: how large it is, what the first fresh microbatch waits for, and what that costs."""
    old, m = cutover(start), start.get("microbatches")
    if old is None or not isinstance(m, int) or start.get("schedule") not in ("2bw", "pipedream_2bw"):
        return ""
    if old >= m:
        return f" Cutover: all {m} microbatches are old, as in PipeDream-2BW."
    text = f" Cutover: {old} of {m} microbatches are old."
    waits = waits_at(bars, old)
    one = period(bars)
    if waits and one:
        worst = max(waits, key=lambda rank: waits[rank])
        text += (
            f" Rank {worst} waits {waits[worst] * 1e3:.3g} ms ({waits[worst] / one:.1%} of an update) for the newest "
            "weights."
            if waits[worst] >= NEGLIGIBLE_WAIT * one
            else " No rank waits for the newest weights."
        )
    longer = _longer(bars, costs, start, old)
    if longer is not None and longer >= FELT:
        text += f" By the simulator, with these times, an update takes {longer:.2f} times as long as if all were old."
    return text


def waits_at(bars: list[Bar], old: int) -> dict[int, float]:
    """By rank, how much longer it does nothing before the first fresh microbatch, in the mean over groups, than before
    nine in ten of its other forwards: where links are slow some of them come late too."""
    at: dict[int, list[float]] = {}
    others: dict[int, list[float]] = {}
    before: dict[int, float] = {}  # when each rank's last action ended
    for rank, kind, _, microbatch, group, version, begin, end in bars:
        if kind == "F" and rank in before:
            fresh = microbatch == old and version == group
            (at if fresh else others).setdefault(rank, []).append(max(0.0, begin - before[rank]))
        before[rank] = max(end, before.get(rank, end))
    return {rank: max(0.0, fmean(idle) - _most(others.get(rank, []))) for rank, idle in at.items()}


def _most(idle: list[float]) -> float:
    """Of nine in ten."""
    return sorted(idle)[math.ceil(0.9 * len(idle)) - 1] if idle else 0.0


def _longer(bars: list[Bar], costs: Any, start: Event, old: int) -> float | None:
    """How many times as long an update takes with this cutover as with all microbatches old, by the simulator."""
    try:
        stages, m = int(start["stages"]), int(start["microbatches"])
        given = Costs(**{key: value for key, value in costs.items() if key in Costs.__dataclass_fields__})
        depth = in_flight(bars, stages, m)
        mixed, whole = (
            simulate(build("2bw", stages, m, 2 * LEAD, in_flight=depth, cutover=c), given).time_per_update
            for c in (old, m)
        )
    except (UserError, ValueError, TypeError, KeyError, AttributeError):
        return None
    return mixed / whole if whole else None


def in_flight(bars: list[Bar], stages: int, microbatches: int) -> int | None:
    """Microbatches that rank 0 had between forward and backward; None where that is not to be seen."""
    entered, most = -1, 0
    for _, kind, _, microbatch, group, *_ in (bar for bar in bars if bar[0] == 0 and bar[1] in "FB"):
        place = group * microbatches + (microbatch or 0)
        if kind == "F":
            entered = max(entered, place)
        elif entered >= 0:
            most = max(most, entered - place + 1)
    return most if stages <= most <= microbatches + 1 else None


def period(bars: list[Bar]) -> float | None:
    """Seconds per update: between the first forwards of the first and the last group on rank 0."""
    entries = [_entry(bars, group) for group in sorted({bar[4] for bar in bars})]
    known = [entry for entry in entries if entry != float("inf")]
    return (known[-1] - known[0]) / (len(known) - 1) if len(known) > 1 else None


def _entry(bars: list[Bar], group: int) -> float:
    """When a group's first forward began on rank 0 (infinity when it was not recorded)."""
    return min(
        (bar[6] for bar in bars if bar[0] == 0 and bar[1] == "F" and bar[4] == group), default=float("inf")
    )


def _shift(bar: Bar, seconds: float) -> Bar:
    return (*bar[:6], bar[6] + seconds, bar[7] + seconds)


def delays(event: Event, title: str) -> Grid | None:
    """Stages by microbatches in the order they entered. A cell is group - version: how many updates the
    weights a microbatch was computed on are behind those its gradient is applied to."""
    delay: dict[tuple[int, int, int], int] = {}
    for _, kind, stage, microbatch, group, version, _, _ in spans(event):
        if kind == "F" and microbatch is not None and version is not None:
            delay[stage, group, microbatch] = group - version
    if not delay:
        return None
    stages = sorted({stage for stage, _, _ in delay})
    entries = sorted({(group, microbatch) for _, group, microbatch in delay})[: MOST_BARS // len(stages)]
    return Grid(
        title,
        rows=[f"stage {stage}" for stage in stages],
        columns=[f"g{group} m{microbatch}" for group, microbatch in entries],
        cells=[[delay.get((stage, *entry)) for entry in entries] for stage in stages],
        cell_label="delay",
        note="Updates between the weights a microbatch was computed on and those its gradient is applied to.",
    )
