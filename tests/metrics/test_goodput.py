"""Goodput from measured costs: a simulated clock."""

import pytest

from slipstream.metrics.goodput import Faults, goodput, measured, table

COSTS = Faults(every=1800, checkpoint_every=60, restart=10, away=600)


def simulated(faults, share=None):
    """The same by walking along a long time, fault by fault, in whole seconds."""
    useful, periods = 0.0, 50
    for _ in range(periods):
        left = faults.every - faults.restart
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


def event(kind, at, **more):
    return {"event": kind, "time": at, **more}


def test_what_a_run_lost_is_read_from_its_events():
    """Killed at 8 s, back to the checkpoint of 4 s, training again at 11 s: 3 s of restart, 4 s of work taken back."""
    events = [
        event("start", 0.0, stages=4), event("step", 1.0), event("checkpoint", 2.0), event("checkpoint", 4.0),
        event("start", 9.0, stages=3, lost_steps=4, heard_of=8.0), event("step", 11.0), event("step", 21.0),
    ]  # fmt: skip
    found = measured(events)
    assert (found.count, found.restart, found.lost_steps) == (1, 3.0, 4)
    assert found.useful == pytest.approx(1 - 7 / 21)
    assert (found.checkpoint_every, found.stages) == (2.0, 4)
    assert measured(events[:4]) is None
    assert measured(events[:5]) is None  # it did not train again


def test_a_start_that_fails_again_is_one_restart():
    events = [
        event("start", 0.0), event("step", 2.0), event("start", 5.0, heard_of=4.0), event("start", 8.0, heard_of=5.0),
        event("step", 10.0),
    ]  # fmt: skip
    found = measured(events)
    assert (found.count, found.restart) == (1, 6.0)
    assert found.useful == pytest.approx(1 - 8 / 10)


def test_logs_of_older_runs_and_of_strangers_are_read():
    events = [event("start", 0.0), event("step", 2.0), event("start", 6.0), event("step", 8.0)]
    assert measured(events).restart == 6.0
    assert measured(
        [*events, event("start", "x"), event("start", 9.0, heard_of="y", lost_steps=None, stages=[])]
    )
    assert measured([]) is None
