"""The scheduler on a clock, at depths the machine does not have: stages that sleep. Run on an idle machine.

Fractions are of the fastest samples: whatever else the machine does only ever adds to a time. What a broken schedule
reaches is far below (1F1B with a flush: 0.57 at m = P = 4).
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from slipstream.bench.contenders import RIVALS
from slipstream.bench.measure import Result, measure
from slipstream.bench.timeline import GROUPS, measure_timeline, predict
from slipstream.bench.work import Work
from slipstream.distributed import RankPool
from slipstream.schedule.timeline import Timeline

pytestmark = pytest.mark.bench
FOUR_STAGES = Work("sleep", stages=4, microbatches=4)


@pytest.fixture(scope="module")
def eight() -> Iterator[RankPool]:
    with RankPool(8) as pool:
        yield pool


def fraction(result: Result) -> float:
    bound, ours = (
        min(sample.period_seconds for sample in result.samples[name]) for name in ("bound", "slipstream")
    )
    return bound / ours


@pytest.mark.parametrize(("stages", "microbatches", "clip"), [(4, 4, 1.0), (4, 8, None), (8, 16, 1.0)])
def test_no_bubble(eight: RankPool, stages: int, microbatches: int, clip: float | None) -> None:
    work = Work("sleep", stages, microbatches, max_grad_norm=clip)
    result = measure(eight, work, ["bound", "slipstream"], rounds=2, updates=6, timeout_seconds=60)
    assert fraction(result) > 0.9


@pytest.fixture(scope="module")
def timelines(eight: RankPool) -> list[tuple[Timeline, int | None]]:
    return [measure_timeline(eight, FOUR_STAGES) for _ in range(3)]


def test_fill_and_drain_are_paid_once(timelines: list[tuple[Timeline, int | None]]) -> None:
    """(P-1) forwards before the last stage starts, (P-1) backwards after it is done, and no wait of its own."""
    work = FOUR_STAGES
    fill, drain, last = (
        min(seconds(measured) for measured, _ in timelines) for seconds in (_fill, _drain, _last_stage)
    )
    hops = work.stages - 1
    assert hops * work.forward_seconds <= fill < 2 * hops * work.forward_seconds
    assert hops * work.backward_seconds <= drain < 2 * hops * work.backward_seconds
    busy = GROUPS * work.microbatches * (work.forward_seconds + work.backward_seconds)
    assert busy <= last < 1.15 * busy


def _fill(measured: Timeline) -> float:
    return measured.starts[-1][0] - measured.starts[0][0]


def _drain(measured: Timeline) -> float:
    return _ended(measured, 0) - _ended(measured, -1)


def _last_stage(measured: Timeline) -> float:
    return _ended(measured, -1) - measured.starts[-1][0]


def _ended(measured: Timeline, rank: int) -> float:
    """The end of the rank's last backward: what follows is the update."""
    computed = zip(measured.ranks[rank], measured.ends[rank], strict=True)
    return max(end for action, end in computed if action.microbatch is not None)


def test_the_measured_timeline_takes_the_predicted_time(
    timelines: list[tuple[Timeline, int | None]],
) -> None:
    ratios = [
        measured.makespan / predict(FOUR_STAGES, measured, in_flight).makespan
        for measured, in_flight in timelines
    ]
    assert min(ratios) == pytest.approx(1.0, abs=0.15)


@pytest.mark.parametrize("name", RIVALS)
def test_torchs_schedules_take_the_predicted_time(eight: RankPool, name: str) -> None:
    work = Work("sleep", stages=2, microbatches=4, forward_seconds=0.004, backward_seconds=0.008)
    measured, in_flight = measure_timeline(eight, work, name)
    assert measured.makespan >= 0.9 * predict(work, measured, in_flight, name).makespan


def test_depth_chosen_from_measured_latency_hides_it(eight: RankPool) -> None:
    chosen = Work("sleep", stages=8, microbatches=16, link_latency_seconds=0.003)
    least = Work("sleep", stages=8, microbatches=16, link_latency_seconds=0.003, in_flight=8)
    fractions = [
        fraction(measure(eight, work, ["bound", "slipstream"], rounds=2, updates=7, timeout_seconds=120))
        for work in (chosen, least)
    ]
    assert fractions[0] > 0.93
    assert fractions[1] < 0.9, "with the least depth every link's latency is waited for"
