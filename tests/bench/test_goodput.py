"""Goodput from measured costs: a simulated clock."""

import pytest

from slipstream.bench.goodput import Faults, goodput, measured, table

COSTS = Faults(every=1800, checkpoint_every=60, restart=10, away=600)


def simulated(faults, share=None):
    """The same by walking along a long time, fault by fault, in whole seconds."""
    useful, periods = 0.0, 50
    for _ in range(periods):
        left = faults.every - faults.restart - faults.notice
        useful -= faults.checkpoint_every / 2
        if share is None:
            useful += left - faults.away
            continue
        away = max(0.0, faults.away - faults.restart)
        useful += share * away + (left - away - (faults.restart if faults.away else 0.0))
    return useful / (periods * faults.every)


@pytest.mark.parametrize("share", [None, 0.5, 0.75])
def test_it_is_what_a_walk_along_the_clock_finds(share):
    assert goodput(COSTS, share) == pytest.approx(simulated(COSTS, share), abs=1e-12)


def test_an_elastic_run_is_the_better_one_when_ranks_stay_away():
    for _, plain, elastic in table(COSTS, (30, 60, 240), stages=4):
        assert elastic > plain
    quick = Faults(every=1800, checkpoint_every=60, restart=10)
    assert goodput(quick, 0.75) == goodput(quick)  # it was never away


def test_rare_faults_cost_nothing_and_constant_ones_everything():
    assert goodput(Faults(1e9, 60, 10, 600)) > 0.999999
    assert goodput(Faults(60, 60, 40, 600)) == 0.0


def test_what_a_run_lost_is_read_from_its_events():
    events = [("start", 0.0), ("step", 1.0), ("step", 2.0), ("start", 9.0), ("step", 12.0), ("step", 22.0)]
    assert measured(events) == pytest.approx((10.0, 12 / 22))
    assert measured(events[:3]) is None
