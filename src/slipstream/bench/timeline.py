"""A short measured run of each schedule drawn over its prediction: fill, steady state and drain.

The prediction is the simulator's, for the same schedule, with the median time of each kind of action on each
stage as its costs; what then differs is communication, jitter and anything else the model leaves out.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist

from slipstream.bench.contenders import ENGINE, LABELS, EngineRun, build_run
from slipstream.bench.measure import WARM_UP_UPDATES
from slipstream.bench.sample import settle, warm_up
from slipstream.bench.work import Work
from slipstream.distributed import RankPool, World
from slipstream.errors import UserError
from slipstream.schedule import plot
from slipstream.schedule.costs import Costs, measured_costs
from slipstream.schedule.generate import build
from slipstream.schedule.simulate import simulate
from slipstream.schedule.timeline import Span, Timeline

GROUPS = 3  # one that fills, one in the steady state, one that drains


def draw(pool: RankPool, work: Work, path: Path, names: Sequence[str], seconds: float) -> dict[str, str]:
    """Measure each contender and write the picture after each: .html, .svg or .json (a trace), the two one under the
    other. Returns the errors of those that failed."""
    drawn: dict[str, Timeline] = {}
    errors: dict[str, str] = {}
    for name in names:
        try:
            measured, in_flight = measure_timeline(pool, work, name, seconds)
        except UserError as error:
            errors[name] = str(error)
            continue
        drawn[f"{LABELS[name]}, predicted"] = predict(work, measured, in_flight, name)
        drawn[f"{LABELS[name]}, measured"] = measured
        plot.save(path, drawn, unit="seconds")
    return errors


def measure_timeline(
    pool: RankPool, work: Work, name: str = ENGINE, seconds: float = 120.0
) -> tuple[Timeline, int | None]:
    """The timeline of `GROUPS` groups from an empty pipeline, and the microbatches in flight on our stage 0."""
    ranks = pool.run(trace_rank, name, work, ranks=work.stages, timeout=seconds)
    spans = [span for spans, _ in ranks for span in spans]
    return Timeline.from_spans(spans), ranks[0][1]


def trace_rank(world: World, name: str, work: Work) -> tuple[list[Span], int | None]:
    """One rank: warm up, then the spans of the next groups, numbered from 0."""
    run = build_run(name, work, world.rank, traced=True)
    warm_up(run, WARM_UP_UPDATES)
    run.take_trace()
    settle(work.device_of(world.rank))
    dist.barrier()
    for _ in range(GROUPS):
        run.step()
    in_flight = run.schedule.in_flight if isinstance(run, EngineRun) else None
    return [_renumbered(span) for span in run.take_trace()], in_flight


def predict(work: Work, measured: Timeline, in_flight: int | None, name: str = ENGINE) -> Timeline:
    """The simulator's timeline of the same groups, with the measured median costs."""
    costs = Costs(**measured_costs(measured.spans), latency=work.link_latency_seconds)
    generator = "pipedream_2bw" if name == ENGINE else name.removeprefix("torch_")
    return simulate(build(generator, work.stages, work.microbatches, GROUPS, in_flight=in_flight), costs)


def _renumbered(span: Span) -> Span:
    group, version = span.action.group, span.action.version
    assert version is not None
    return span._replace(
        action=span.action._replace(group=group - WARM_UP_UPDATES, version=max(0, version - WARM_UP_UPDATES))
    )
