"""A start that is trained otherwise than the rest: its time and what it leaves of delay's price are part of a plan."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from slipstream.config import load, resolve
from slipstream.errors import UserError
from slipstream.models.sizes import preset
from slipstream.plan import planner
from slipstream.plan.devices import Cluster, Runtime, find_device
from slipstream.plan.explain import explain, paying_batches
from slipstream.plan.layout import Job
from slipstream.plan.memory import BF16, FP32
from slipstream.plan.penalty import Penalty, find_penalty, load_penalties, penalty_at
from slipstream.plan.planner import plan
from slipstream.plan.price import Price, find_price
from slipstream.plan.start import split
from slipstream.plan.throughput import simulated
from slipstream.plan.written import to_json, to_toml
from slipstream.train.cutovers import expected

PLAIN = "error_feedback"
SYNC, FINE = f"{PLAIN}+sync_start", f"{PLAIN}+fine_start"


def job(correction: str, batch: int = 2**19, **rest) -> Job:
    cluster = Cluster(rest.pop("device", find_device("h100")), 8)
    return Job(preset("smollm2-360m"), cluster, batch, 1024, correction=correction, **({"stages": 8} | rest))


@pytest.fixture(scope="module")
def plans():
    return {name: plan(job(name)) for name in (PLAIN, SYNC, FINE)}


def late(plan):
    return [layout for layout in plan.layouts if layout.shape.asynchronous]


def test_a_synchronous_start_runs_at_the_speed_of_1f1b(plans):
    found = late(plans[SYNC])
    assert found
    for layout in found:
        flushed = replace(layout.shape, schedule="1f1b", in_flight=None, cutover=None)
        alone, start = simulated(layout.times, layout.shape).seconds, simulated(layout.times, flushed).seconds
        assert start > alone
        assert layout.tokens_per_second == pytest.approx(2**19 / (0.1 * start + 0.9 * alone))
        assert layout.start.seconds == start


def test_flushed_updates_are_driven_by_the_same_engine():
    """What torch's own schedules take of a rank is no part of them."""
    slow = replace(find_device("h100"), torch_engine=Runtime(action=5e-3))
    ours, theirs = (late(plan(job(SYNC, device=device)))[0] for device in (find_device("h100"), slow))
    assert theirs.start == ours.start


def test_what_is_not_late_has_no_start(plans):
    synchronous = [layout for layout in plans[PLAIN].layouts if not layout.shape.asynchronous]
    for other in plans.values():
        assert [one for one in other.layouts if not one.shape.asynchronous] == synchronous
    assert {layout.start for layout in plans[PLAIN].layouts} == {None}


def test_a_fine_start_has_four_times_as_many_microbatches_and_a_run_does_it(plans, tmp_path):
    found = plans[FINE]
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
        assert layout.mean_seconds == pytest.approx(mean)
        assert layout.tokens_per_second == pytest.approx(2**19 / mean)
        assert layout.penalty == found.price.at(shape.old, start=True)
    path = tmp_path / "run.toml"
    path.write_text(to_toml(found, fine[0], "smollm2-360m"))
    config = resolve(load(path))
    assert config.pipeline.fine_start == 0.2
    assert config.pipeline.fine_microbatches == fine[0].start.shape.microbatches
    assert config.optim.correction == PLAIN
    assert "sync_start = 0.1" in to_toml(plans[SYNC], late(plans[SYNC])[0], "smollm2-360m")
    told = to_json(found, "smollm2-360m")
    assert [one["start"] is None for one in told["layouts"]] == [one.start is None for one in found.layouts]
    assert told["penalty"]["correction"] == PLAIN
    assert told["penalty"]["start"]["correction"] == FINE
    assert told["penalty"]["start"]["leaves"] == found.price.left() < 1
    json.dumps(told)


@pytest.mark.parametrize(("device", "old"), [("h100", 9), ("cpu", 13)])
def test_a_fine_start_has_as_many_old_as_a_run_of_the_same_layout(device, old, tmp_path):
    """Of eight microbatches all are old, of 32 only those that have to be: one cutover for both."""
    on = find_device(device, memory_bytes=64e9)
    precision = FP32 if on.processor else BF16
    shape = {"schedule": "2bw", "microbatches": 8, "microbatch_size": 4}
    found = plan(job(FINE, 2**15, device=on, precision=precision, **shape))
    (layout,) = late(found)
    assert (layout.shape.cutover, layout.start.shape.cutover, layout.start.shape.microbatches) == (8, old, 32)
    path = tmp_path / "run.toml"
    path.write_text(to_toml(found, layout, "smollm2-360m"))
    usual = ["pipeline.cutover=", *([] if on.processor else ["train.device=cuda"])]
    assert resolve(load(path)).pipeline.cutover == old
    assert expected(resolve(load(path, usual))).pipeline.cutover == old


def test_the_ranking_before_the_simulator_counts_the_start(monkeypatch):
    """Of what is looked at closely, a start that takes ever so long leaves nothing near the front."""
    seen = {}
    whole = planner.mean_seconds
    monkeypatch.setattr(
        planner, "mean_seconds", lambda start, rest: seen.setdefault(rest, whole(start, rest))
    )
    plan(job(SYNC, schedule="2bw"))
    assert seen
    assert all(found > rest for rest, found in seen.items())
    assert len(seen) > len(plan(job(SYNC, schedule="2bw")).layouts)


def test_a_layout_whose_microbatches_cannot_be_cut_is_one_without_a_start():
    found = plan(job(FINE, schedule="2bw", microbatch_size=2))
    plain = plan(job(PLAIN, schedule="2bw", microbatch_size=2))
    assert found.layouts == plain.layouts
    words = explain(found)
    assert any("Best without a fine start:" in line and " 2 sequences on a device" in line for line in words)
    # What is said of its penalty is said of the one that it was ranked with.
    prices = [next(line for line in explain(one) if "penalty used" in line) for one in (found, plain)]
    assert prices[0] == prices[1]
    assert to_json(found, "x")["penalty"] == to_json(plain, "x")["penalty"]


@pytest.mark.parametrize("correction", [PLAIN, SYNC, FINE])
def test_the_break_even_batch_does_not_depend_on_the_batch_that_was_asked_for(correction):
    """A flushed start fills and drains once an update, however large that is: its cost grows less than the batch. The
    same layout, asked about at one batch and at four times that."""
    table = tuple(entry for entry in load_penalties() if entry.source.startswith("study "))
    ends = []
    for batch in (2**19, 2**21):
        found = plan(job(correction, batch, microbatch_size=8, penalties=table))
        layout = next(one for one in late(found) if one.shape.microbatches == batch // 1024 // 8)
        rival = next(one for one in found.layouts if one.shape.schedule == "1f1b")
        assert (layout.start is None) == (correction == PLAIN)
        price = found.price
        ends.append(
            paying_batches(layout, rival, batch, lambda old, p=price, s=bool(layout.start): p.at(old, s))
        )
    (one,), (other,) = ends
    assert one == pytest.approx(other, rel=0.02)


def test_the_start_is_told(plans):
    words = {name: " ".join(explain(found)) for name, found in plans.items()}
    assert "The first 10% of 2BW's updates, flushed, take" in words[SYNC]
    assert "The first 20% of 2BW's updates, in microbatches of 1/4, take" in words[FINE]
    assert "of 2BW's updates" not in words[PLAIN]
    # The paper's figure is of this model; what the start leaves is from a smaller one, and marked.
    assert "That penalty was not measured" not in words[FINE]
    assert "What the start leaves was not measured at this size: 42.1M active parameters" in words[FINE]


@pytest.mark.parametrize("old", [0.25, 0.5, 1.0])
def test_at_another_size_a_start_leaves_the_share_that_it_left_where_it_was_measured(plans, old):
    table, price = load_penalties(), plans[FINE].price
    there = {name: find_penalty(table, "muon", name, 16384, 4.2e7) for name in (PLAIN, FINE)}
    excess = {name: penalty_at(table, entry, old) - 1 for name, entry in there.items()}
    here = penalty_at(table, price.plain, old) - 1
    assert price.plain.parameters == 360e6
    assert price.at(old, start=True) == pytest.approx(1 + here * excess[FINE] / excess[PLAIN])
    assert price.at(old) == pytest.approx(1 + here)
    # Where both were measured it is what was measured.
    near = find_price(table, "muon", FINE, 16384, 4.2e7)
    assert near.at(old, start=True) == pytest.approx(1 + excess[FINE])
    assert near.entries(start=True) == [there[FINE]]


def test_a_start_takes_away_and_never_adds():
    started, plain = Penalty("muon", SYNC, 1.01, 1e4, 1e7), Penalty("muon", PLAIN, 1.0005, 1e4, 1e7)
    far = replace(plain, parameters=1e9, penalty=1.025)
    for there in (plain, replace(plain, penalty=1.0)):  # where it was measured delay costs less, or nothing
        assert Price((started, there, far), far, started).at(1.0, start=True) == pytest.approx(1.025)
    # Nothing beside it: then it is what was measured.
    assert Price((started, far), far, started).at(1.0, start=True) == 1.01


def test_a_table_of_ones_own_may_hold_a_start_alone():
    mine = (Penalty("muon", FINE, 1.02, 1e6, 1e9),)
    found = plan(job(FINE, penalties=mine))
    assert late(found)
    assert all(layout.start for layout in late(found)), "nobody knows what the others cost"
    assert late(found)[0].penalty == pytest.approx(1 + 0.02 * late(found)[0].shape.old)
    with pytest.raises(UserError, match="no entry for muon with correction error_feedback alone"):
        plan(job(FINE, penalties=mine, schedule="2bw", microbatch_size=2))
    assert plan(job(SYNC, penalties=(Penalty("muon", SYNC, 1.02, 1e6, 1e9),), schedule="2bw")).layouts


def test_only_the_starts_there_are_are_starts():
    assert split(SYNC) == (PLAIN, "sync_start")
    assert split(FINE) == (PLAIN, "fine_start")
    assert split(PLAIN) == (PLAIN, "")
    assert split(f"{PLAIN}+magic") == (f"{PLAIN}+magic", "")
    mine = tuple(
        Penalty("muon", name, figure, 1e6, 1e9) for name, figure in ((PLAIN, 1.1), (f"{PLAIN}+magic", 1.02))
    )
    found = plan(job(f"{PLAIN}+magic", penalties=mine, schedule="2bw"))
    assert late(found)[0].penalty == pytest.approx(1 + 0.02 * late(found)[0].shape.old)
    assert not any("start" in line for line in explain(found))


def test_where_all_is_old_whatever_the_microbatches_there_is_no_fine_start():
    """Delay compensation takes all gradients of an update at one bank."""
    names = ("delay_compensation", "delay_compensation+fine_start")
    mine = tuple(Penalty("muon", name, 1.05, 1e6, 1e9) for name in names)
    assert {layout.start for layout in late(plan(job(names[1], penalties=mine)))} == {None}
