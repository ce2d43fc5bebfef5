"""Timelines as the bench draws them: what was executed is what was predicted, action by action.

Times are of another kind: `tests/bench/test_clock.py`, run by `make bench`. That our schedule has no bubble is shown
without a clock in `tests/pipeline/test_no_bubble.py`.
"""

from __future__ import annotations

import pytest

from slipstream.bench.contenders import RIVALS
from slipstream.bench.timeline import GROUPS, measure_timeline, predict
from slipstream.bench.work import Work
from slipstream.distributed import RankPool
from slipstream.schedule.actions import Action, Kind

QUICK = {"forward_seconds": 0.0, "backward_seconds": 0.0}


def computed(actions: tuple[Action, ...]) -> list[tuple[Kind, int | None, int]]:
    return [(a.kind, a.microbatch, a.group) for a in actions if a.microbatch is not None]


def test_the_executed_order_is_the_predicted_one(pool: RankPool) -> None:
    work = Work("sleep", stages=4, microbatches=4, **QUICK)
    measured, in_flight = measure_timeline(pool, work)
    predicted = predict(work, measured, in_flight)
    for ran, planned in zip(measured.ranks, predicted.ranks, strict=True):
        assert computed(ran) == computed(planned)
        assert len(computed(ran)) == GROUPS * 4 * 2


@pytest.mark.parametrize("name", RIVALS)
def test_torchs_schedules_are_measured_and_predicted_alike(pool: RankPool, name: str) -> None:
    work = Work("sleep", stages=2, microbatches=4, **QUICK)
    measured, in_flight = measure_timeline(pool, work, name)
    assert in_flight is None
    predicted = predict(work, measured, in_flight, name)
    for ran, planned in zip(measured.ranks, predicted.ranks, strict=True):
        assert [a for a in ran if a.microbatch is not None] == [
            a for a in planned if a.microbatch is not None
        ]
        assert [a.group for a in ran if a.microbatch is None] == list(range(GROUPS))
