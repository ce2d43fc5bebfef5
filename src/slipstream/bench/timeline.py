"""A short measured run of our schedule drawn over its prediction: fill, steady state and drain.

The prediction is the simulator's, for the same schedule, with the median time of each kind of action on each
stage as its costs; what then differs is communication, jitter and anything else the model leaves out.
"""

from __future__ import annotations

from pathlib import Path
from statistics import median

from slipstream.bench.engine import EngineRun
from slipstream.bench.measure import WARM_UP_UPDATES
from slipstream.bench.work import Work
from slipstream.distributed import RankPool, World
from slipstream.errors import UserError
from slipstream.schedule import plot
from slipstream.schedule.actions import Kind
from slipstream.schedule.costs import Costs
from slipstream.schedule.generate import build
from slipstream.schedule.simulate import simulate
from slipstream.schedule.timeline import Span, Timeline

GROUPS = 3  # one that fills, one in the steady state, one that drains


def draw(pool: RankPool, work: Work, path: Path) -> None:
    """Measure and write the picture: .html, or .svg and .json (a trace) with the two one under the other."""
    measured, in_flight = measure_timeline(pool, work)
    predicted = predict(work, measured, in_flight)
    if path.suffix.lower() == ".html":
        plot.write_text(path, plot.figure(predicted, measured).to_html(include_plotlyjs=True))
    else:
        plot.save(path, {"predicted": predicted, "measured": measured})


def check_plottable(path: Path) -> None:
    """Fail before the measurement rather than after it."""
    if path.suffix.lower() not in plot.FORMATS:
        raise UserError(f"--plot {path}: end the file name in one of {', '.join(plot.FORMATS)}.")


def measure_timeline(pool: RankPool, work: Work) -> tuple[Timeline, int]:
    """The timeline of `GROUPS` groups from an empty pipeline, and the microbatches in flight on stage 0."""
    ranks = pool.run(trace_rank, work, ranks=work.stages, timeout=120)
    spans = [span for spans, _ in ranks for span in spans]
    return Timeline.from_spans(spans), ranks[0][1]


def trace_rank(world: World, work: Work) -> tuple[list[Span], int]:
    """One rank: warm up, then the spans of the next groups, numbered from 0."""
    run = EngineRun(work, world.rank)
    for _ in range(WARM_UP_UPDATES):
        run.step()
    run.drain()
    for _ in range(GROUPS):
        run.step()
    run.schedule.drain()
    return [_renumbered(span) for span in run.schedule.take_trace()], run.schedule.in_flight


def predict(work: Work, measured: Timeline, in_flight: int) -> Timeline:
    """The simulator's timeline of the same groups, with the measured median costs."""
    costs = Costs(
        forward=_medians(measured, Kind.FORWARD),
        backward=_medians(measured, Kind.BACKWARD),
        update=_medians(measured, Kind.UPDATE),
        latency=work.link_latency_seconds,
    )
    schedule = build("pipedream_2bw", work.stages, work.microbatches, GROUPS, in_flight=in_flight)
    return simulate(schedule, costs)


def _medians(timeline: Timeline, kind: Kind) -> list[float]:
    rows = zip(timeline.ranks, timeline.starts, timeline.ends, strict=True)
    return [
        median(end - start for action, start, end in zip(*row, strict=True) if action.kind is kind)
        for row in rows
    ]


def _renumbered(span: Span) -> Span:
    group, version = span.action.group, span.action.version
    assert version is not None
    return span._replace(
        action=span.action._replace(group=group - WARM_UP_UPDATES, version=max(0, version - WARM_UP_UPDATES))
    )
