"""A start that is trained otherwise than the rest: its time and its penalty are part of a plan."""

from __future__ import annotations

from dataclasses import replace

import pytest

from slipstream.config import load, resolve
from slipstream.models.sizes import preset
from slipstream.plan.devices import Cluster, find_device
from slipstream.plan.explain import explain, to_json, to_toml
from slipstream.plan.layout import Job
from slipstream.plan.penalty import Penalty, find_penalty, load_penalties, penalty_at, with_start
from slipstream.plan.planner import plan
from slipstream.plan.throughput import simulated

PLAIN = "error_feedback"


def job(correction: str, **rest) -> Job:
    cluster = Cluster(find_device("h100"), 8)
    return Job(preset("smollm2-360m"), cluster, 2**19, 1024, correction=correction, stages=8, **rest)


@pytest.fixture(scope="module")
def plans():
    return {name: plan(job(name)) for name in (PLAIN, f"{PLAIN}+sync_start", f"{PLAIN}+fine_start")}


def late(plan):
    return [layout for layout in plan.layouts if layout.shape.asynchronous]


def test_a_synchronous_start_runs_at_the_speed_of_1f1b(plans):
    found = late(plans[f"{PLAIN}+sync_start"])
    assert found
    for layout in found:
        flushed = replace(layout.shape, schedule="1f1b", in_flight=None, cutover=None)
        alone, start = simulated(layout.times, layout.shape).seconds, simulated(layout.times, flushed).seconds
        assert start > alone
        assert layout.tokens_per_second == pytest.approx(2**19 / (0.1 * start + 0.9 * alone))
        assert layout.start.seconds == start


def test_what_is_not_late_has_no_start(plans):
    synchronous = [layout for layout in plans[PLAIN].layouts if not layout.shape.asynchronous]
    for other in plans.values():
        assert [one for one in other.layouts if not one.shape.asynchronous] == synchronous
    assert {layout.start for layout in plans[PLAIN].layouts} == {None}


def test_a_fine_start_has_four_times_as_many_microbatches_and_a_run_does_it(plans, tmp_path):
    found = plans[f"{PLAIN}+fine_start"]
    fine = [layout for layout in late(found) if layout.start]
    assert fine
    for layout in fine:
        shape, start = layout.shape, layout.start
        assert start.shape.microbatches == 4 * shape.microbatches
        assert start.shape.microbatch_size == shape.microbatch_size // 4
        assert (start.share, start.shape.cutover) == (0.2, shape.cutover)
        # A message takes its latency however small it is.
        assert start.seconds > layout.speed.seconds
        mean = 0.2 * start.seconds + 0.8 * layout.speed.seconds
        assert layout.tokens_per_second == pytest.approx(2**19 / mean)
        assert layout.penalty == penalty_at(load_penalties(), found.penalty, shape.old)
    path = tmp_path / "run.toml"
    path.write_text(to_toml(found, fine[0], "smollm2-360m"))
    config = resolve(load(path))
    assert config.pipeline.fine_start == 0.2
    assert config.pipeline.fine_microbatches == fine[0].start.shape.microbatches
    assert config.optim.correction == PLAIN
    told = to_json(found, "smollm2-360m")["layouts"]
    assert [one["start"] is not None for one in told] == [
        layout.start is not None for layout in found.layouts
    ]
    assert "sync_start = 0.1" in to_toml(
        plans[f"{PLAIN}+sync_start"], late(plans[f"{PLAIN}+sync_start"])[0], "x"
    )


def test_a_layout_whose_microbatches_cannot_be_cut_has_the_penalty_of_none():
    found = plan(job(f"{PLAIN}+fine_start", schedule="2bw", microbatch_size=2))
    plain = plan(job(PLAIN, schedule="2bw", microbatch_size=2))
    assert [(one.start, one.penalty) for one in found.layouts] == [
        (None, one.penalty) for one in plain.layouts
    ]
    assert any("No fine start: microbatches of 2 sequences" in line for line in explain(found))


def test_the_start_is_told(plans):
    words = {name: " ".join(explain(found)) for name, found in plans.items()}
    assert "The first 10% of 2BW's updates, flushed, take" in words[f"{PLAIN}+sync_start"]
    assert "The first 20% of 2BW's updates, in microbatches of 1/4, take" in words[f"{PLAIN}+fine_start"]
    assert "of 2BW's updates" not in words[PLAIN]


def test_at_another_size_a_start_leaves_the_share_that_it_left_where_it_was_measured(plans):
    """Plain error feedback has a figure at 360M, and no start has one there."""
    table = load_penalties()
    small = {name: find_penalty(table, "muon", name, 16384, 4.2e7).penalty for name in plans}
    plain = plans[PLAIN].penalty
    assert plain.parameters == 360e6
    for name, found in plans.items():
        left = (small[name] - 1) / (small[PLAIN] - 1)
        assert found.penalty.penalty == pytest.approx(1 + left * (plain.penalty - 1), abs=1e-4)
        assert found.penalty.parameters == plain.parameters
        assert ("the start leaves" in found.penalty.source) == (name != PLAIN)


def test_a_start_that_was_measured_at_the_same_place_or_beside_nothing_is_taken_as_it_is():
    started, plain = Penalty("muon", "x+start", 1.02, 1e4, 1e7), Penalty("muon", "x", 1.05, 1e4, 1e7)
    assert with_start([started, plain], started, plain) is started
    elsewhere = replace(plain, parameters=1e9, penalty=1.03)
    assert with_start([started, elsewhere], started, elsewhere) is started
    assert with_start([started, plain, elsewhere], started, elsewhere).penalty == 1.012
    half = replace(plain, old=0.5, penalty=1.9)  # of another share: not beside it
    assert with_start([started, half, elsewhere], started, elsewhere) is started


def test_a_table_of_ones_own_may_hold_a_start_alone():
    mine = (Penalty("muon", f"{PLAIN}+sync_start", 1.02, 1e6, 1e9),)
    found = plan(job(f"{PLAIN}+sync_start", penalties=mine, schedule="2bw"))
    assert found.penalty == mine[0]
