"""The figures of a schedule in its steady state, as tables and the planner want them: one number per rank.

For uniform stages and free updates a time per update becomes affine in m once the pipeline is full,
T(m + P) - T(m) = const, so a large m is extrapolated from smaller ones as soon as three of them lie on a line.
Uneven stages and costly updates have kinks further out (an update that a larger m hides), and interleaving over slow
links has a rhythm of its own, so they are simulated at m itself. Groups are simulated until two in a row take equally
long.

All figures are per stage in the sense of one rank: a schedule with v chunks per rank counts a chunk's
activations as 1/v, so that schedules compare at equal model and equal number of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from slipstream.schedule import occupancy
from slipstream.schedule.actions import Schedule
from slipstream.schedule.generate import GENERATORS, build, canonical
from slipstream.schedule.simulate import Costs, simulate
from slipstream.schedule.staleness import staleness
from slipstream.schedule.timeline import Timeline

_MOST_GROUPS = 32  # a steady state that takes longer to reach is averaged over the last half of these
_EQUAL = 1e-9


@dataclass(frozen=True)
class Steady:
    """Steady-state figures. `time_per_update` is per m microbatches, whatever the schedule's own updates."""

    name: str
    stages: int
    microbatches: int
    time_per_update: float
    bubble_fraction: float  # mean over ranks
    rank_bubbles: tuple[float, ...]
    peak_activations: tuple[float, ...]  # microbatches of a whole stage
    banks: tuple[int, ...]
    delay: tuple[int, ...]
    mismatch: tuple[int, ...]


def steady(
    name: str, stages: int, microbatches: int, costs: Costs | None = None, **options: int | None
) -> Steady:
    """The steady state of `build(name, stages, microbatches, ..., **options)` under `costs`."""
    costs = costs or Costs()
    full = canonical(name)
    least = _full_pipeline(full, stages, microbatches, costs, options)
    while least + 2 * stages < microbatches:
        points = [_settle(full, stages, least + n * stages, costs, options) for n in range(3)]
        if _collinear(*(timeline.time_per_update for _, timeline in points)):
            return _extrapolate(_figures(*points[1]), _figures(*points[2]), microbatches)
        least += 2 * stages
    return _figures(*_settle(full, stages, microbatches, costs, options))


def _full_pipeline(
    name: str, stages: int, microbatches: int, costs: Costs, options: dict[str, int | None]
) -> int:
    """The least m' = m - nP that fills the pipeline; m itself where a smaller m is another schedule."""
    # Rounds over slow links settle into a rhythm of several rounds: three that lie on a line prove nothing.
    slow_links = bool(costs.latency or costs.message_bytes)
    uneven_rounds = name == "interleaved_1f1b" and stages > 0 and (microbatches % stages != 0 or slow_links)
    uneven_stages = any(isinstance(getattr(costs, field.name), Sequence) for field in fields(costs))
    kinked = (
        uneven_rounds or uneven_stages or costs.update or costs.update_latency or costs.jitter or costs.drift
    )
    if stages < 1 or kinked or options.get("every") is not None or options.get("cutover") is not None:
        return microbatches
    filled = max(2 * stages, (options.get("in_flight") or 0) + stages)
    return filled + (microbatches - filled) % stages


def _collinear(a: float, b: float, c: float) -> bool:
    return abs((c - b) - (b - a)) <= _EQUAL * c


def _settle(
    name: str, stages: int, microbatches: int, costs: Costs, options: dict[str, int | None]
) -> tuple[Schedule, Timeline]:
    """A run just long enough: two groups where each ends at a barrier, else until the period repeats."""
    if GENERATORS[name].synchronous and not (costs.jitter or costs.drift):
        groups = 2
    else:  # the deepest delay, 2(P-1) microbatches, must have shown
        groups = 4 + 2 * stages // max(microbatches, 1)
    while True:
        schedule = build(name, stages, microbatches, groups, **options)
        timeline = simulate(schedule, costs)
        if groups == 2 or groups >= _MOST_GROUPS or timeline.settled(_EQUAL):
            return schedule, timeline
        groups *= 2


def _figures(schedule: Schedule, timeline: Timeline) -> Steady:
    bubbles = timeline.bubble_fraction
    stale = staleness(schedule)
    peaks = occupancy.peak_rank_activations(schedule.ranks)
    return Steady(
        name=schedule.name,
        stages=schedule.stages,
        microbatches=schedule.microbatches,
        time_per_update=timeline.time_per_update,
        bubble_fraction=sum(bubbles) / len(bubbles),
        rank_bubbles=bubbles,
        peak_activations=tuple(peak / schedule.chunks for peak in peaks),
        banks=_worst_per_rank(schedule, timeline.banks),
        delay=_worst_per_rank(schedule, stale.delay),
        mismatch=_worst_per_rank(schedule, stale.mismatch),
    )


def _worst_per_rank(schedule: Schedule, per_stage: tuple[int, ...]) -> tuple[int, ...]:
    placement = schedule.placement()
    worst = [0] * schedule.stages
    for stage, value in enumerate(per_stage):
        worst[placement[stage]] = max(worst[placement[stage]], value)
    return tuple(worst)


def _extrapolate(one: Steady, two: Steady, microbatches: int) -> Steady:
    steps = (microbatches - one.microbatches) // (two.microbatches - one.microbatches)

    def affine(first: float, second: float) -> float:
        return first + steps * (second - first)

    time = affine(one.time_per_update, two.time_per_update)
    busy = [
        affine((1 - a) * one.time_per_update, (1 - b) * two.time_per_update)
        for a, b in zip(one.rank_bubbles, two.rank_bubbles, strict=True)
    ]
    bubbles = tuple(max(0.0, 1 - b / time) if time else 0.0 for b in busy)
    return replace(
        one,
        microbatches=microbatches,
        time_per_update=time,
        bubble_fraction=sum(bubbles) / len(bubbles),
        rank_bubbles=bubbles,
        peak_activations=tuple(map(affine, one.peak_activations, two.peak_activations)),
    )
