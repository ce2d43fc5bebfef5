"""The clock: what an action waits for, and the figures drawn from a timeline."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from math import inf, nan

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.errors import UserError
from slipstream.schedule import Action, Costs, Kind, Span, Timeline, build, simulate, steady
from slipstream.schedule.generate import GENERATORS
from slipstream.schedule.simulate import Deadlock

positive = st.floats(0.05, 4.0)


@st.composite
def cases(draw):
    name = draw(st.sampled_from(tuple(GENERATORS)))
    stages = draw(st.integers(1, 5))
    microbatches = 2 * stages * draw(st.integers(1, 2))
    costs = Costs(
        forward=draw(st.lists(positive, min_size=stages, max_size=stages)),
        backward=draw(st.lists(positive, min_size=stages, max_size=stages)),
        update=draw(st.sampled_from([0.0, 0.7])),
        update_latency=draw(st.sampled_from([0.0, 1.5])),
        latency=draw(st.sampled_from([0.0, 0.4])),
        message_bytes=1.0,
        bandwidth=draw(st.sampled_from([inf, 2.0])),
        jitter=draw(st.sampled_from([0.0, 0.3])),
        on_demand=draw(st.booleans()),
        overhead=draw(st.sampled_from([0.0, 0.2])),
    )
    return build(name, stages, microbatches, draw(st.integers(1, 3))), costs


@settings(max_examples=80, deadline=None)
@given(cases())
def test_laws_of_the_clock(case) -> None:
    """No rank does two things at once; nothing starts before its input or its weights exist."""
    schedule, costs = case
    timeline = simulate(schedule, costs)
    arrival = costs.latency + costs.message_bytes / costs.bandwidth
    placement = schedule.placement()
    end = {(s.action.kind, *s.action[1:4]): s.end for s in timeline.spans}
    updates: dict[tuple[int, int], float] = {}
    for span in timeline.spans:
        if span.action.kind is Kind.UPDATE:
            updates[span.action.stage, span.action.version or 0] = span.end
    for row_starts, row_ends in zip(timeline.starts, timeline.ends, strict=True):
        assert all(start >= previous for start, previous in zip(row_starts[1:], row_ends, strict=False))
    for rank, (kind, stage, microbatch, group, version), start, _ in timeline.spans:
        if kind is Kind.UPDATE:
            continue
        if version:
            published = [updates[s, version] for s in range(schedule.model_stages) if (s, version) in updates]
            waits_for = max(published) if schedule.shared_update else updates[stage, version]
            assert start >= waits_for + costs.update_latency - 1e-9
        sources = []
        if kind is Kind.FORWARD and stage:
            sources = [(Kind.FORWARD, stage - 1)]
        elif kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT) and stage + 1 < schedule.model_stages:
            sources = [(k, stage + 1) for k in (Kind.BACKWARD, Kind.BACKWARD_INPUT)]
        for source_kind, source in sources:
            key = (source_kind, source, microbatch, group)
            if key in end:
                hop = 0.0 if placement[source] == rank else arrival
                assert start >= end[key] + hop - 1e-9


@settings(max_examples=40, deadline=None)
@given(cases())
def test_a_longer_run_begins_like_a_shorter_one(case) -> None:
    schedule, costs = case
    if costs.jitter:
        return
    longer = build(schedule.name, schedule.stages, schedule.microbatches, schedule.groups + 1)
    short, long = simulate(schedule, costs), simulate(longer, costs)
    for rank, (ours, theirs) in enumerate(zip(short.ranks, long.ranks, strict=True)):
        alike = next(
            (i for i, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]), len(ours)
        )
        assert alike >= (schedule.groups - 1) * schedule.microbatches * 2
        assert list(short.ends[rank][:alike]) == pytest.approx(list(long.ends[rank][:alike]))


def test_busy_time_is_the_sum_of_the_costs() -> None:
    costs = Costs(forward=[1, 2, 3], backward=[3, 2, 1], update=0.5)
    timeline = simulate(build("1f1b", 3, 4, 2), costs)
    for rank, idle in enumerate(timeline.idle_fraction):
        assert (1 - idle) * timeline.makespan == pytest.approx(2 * (4 * 4 + 0.5)), rank


def test_update_cost_is_exposed_when_flushed_and_only_its_compute_in_2bw() -> None:
    costs = Costs(update=3.0, update_latency=5.0)
    flushed = simulate(build("1f1b", 4, 8, 4), costs).time_per_update
    assert flushed == pytest.approx((8 + 3) * 3 + 3 + 5)
    overlapped = simulate(build("2bw", 4, 8, 6), costs).time_per_update
    assert overlapped == pytest.approx(8 * 3 + 3)


def test_2bw_waits_for_the_bank_when_the_chain_outlasts_the_slack() -> None:
    """Stage 0 has m - w_0 = 5 pairs of slack (15 s); a chain of 40 s cannot hide."""
    hidden = simulate(build("2bw", 4, 8, 8), Costs(update_latency=10.0)).time_per_update
    exposed = simulate(build("2bw", 4, 8, 8), Costs(update_latency=40.0)).time_per_update
    assert hidden == pytest.approx(24)
    assert exposed > 24 + 5


def test_costs_of_a_chunked_schedule_are_those_of_the_rank() -> None:
    """A rank's work is the same however it is cut: 3 m per group."""
    for name in ("1f1b", "interleaved_1f1b", "zb_h1", "zbv", "dualpipev"):
        timeline = simulate(build(name, 4, 8, 1))
        assert (1 - timeline.idle_fraction[0]) * timeline.makespan == pytest.approx(24), name


def test_a_cost_per_model_stage_is_taken_as_it_is() -> None:
    costs = Costs(forward=[1, 2, 3, 4], backward=0)
    timeline = simulate(build("interleaved_1f1b", 2, 2), costs)
    lengths = {s.action.stage: s.end - s.start for s in timeline.spans if s.action.kind is Kind.FORWARD}
    assert lengths == {0: 1, 1: 2, 2: 3, 3: 4}


def test_split_backward_costs_can_differ() -> None:
    costs = Costs(forward=1, backward_input=2, backward_weight=0.5)
    timeline = simulate(build("zb_h1", 2, 4), costs)
    lengths = {s.action.kind: s.end - s.start for s in timeline.spans}
    assert (lengths[Kind.BACKWARD_INPUT], lengths[Kind.BACKWARD_WEIGHT]) == pytest.approx((2, 0.5))
    assert simulate(build("1f1b", 1, 1), costs).makespan == pytest.approx(3.5)


def test_a_slow_link_carries_one_message_at_a_time() -> None:
    """GPipe's forwards leave every second, but each holds the link for 4: the last arrives at 1 + 4m."""
    timeline = simulate(build("gpipe", 2, 5), Costs(message_bytes=8, bandwidth=2))
    forwards = [s for s in timeline.spans if s.rank == 1 and s.action.kind is Kind.FORWARD]
    assert [s.start for s in forwards] == pytest.approx([1 + 4 * (k + 1) for k in range(5)])


def test_latency_per_link() -> None:
    timeline = simulate(build("gpipe", 3, 1), Costs(latency=[0.5, 2.0]))
    first = [next(s.start for s in timeline.spans if s.rank == r) for r in range(3)]
    assert first == pytest.approx([0, 1.5, 4.5])


def test_a_rank_that_is_slow_for_a_whole_group_costs_more_than_depth_can_hide() -> None:
    def lost(in_flight: int, **spread: float) -> float:
        costs = Costs(forward=1.0, backward=2.0, **spread)
        schedule = build("pipedream_2bw", 2, 8, 300, in_flight=in_flight)
        return simulate(schedule, costs).time_per_update / 24.0 - 1.0

    left_of_jitter = lost(5, jitter=0.2) / lost(2, jitter=0.2)
    left_of_drift = lost(5, drift=0.2) / lost(2, drift=0.2)
    assert 3 * left_of_jitter < left_of_drift < 1


def test_drift_makes_a_flushed_group_as_slow_as_its_slowest_rank() -> None:
    schedule = build("gpipe", 2, 50, 400)
    period = simulate(schedule, Costs(forward=1.0, backward=1.0, drift=0.1)).time_per_update
    # Two ranks: the mean of the larger of two normal draws is 1 + 0.1 / sqrt(pi); the bubble is 2 of 102.
    assert period == pytest.approx(102 * (1 + 0.1 / math.sqrt(math.pi)), rel=0.015)


def test_jitter_is_drawn_from_the_seed() -> None:
    schedule = build("2bw", 4, 8, 4)
    one, again = (simulate(schedule, Costs(jitter=0.2, seed=1)) for _ in range(2))
    other = simulate(schedule, Costs(jitter=0.2, seed=2))
    assert one == again
    assert one.makespan != other.makespan
    assert one.makespan > simulate(schedule).makespan


def test_deadlock_names_positions() -> None:
    schedule = build("gpipe", 2, 1)
    backwards = tuple(reversed(schedule.ranks[0][:2])) + schedule.ranks[0][2:]
    with pytest.raises(Deadlock) as caught:
        simulate(replace(schedule, ranks=(backwards, schedule.ranks[1])))
    assert caught.value.stuck == {0: 0, 1: 0}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"forward": -1}, ["forward", "0 or more", "-1"]),
        ({"backward": [1, -2]}, ["backward", "0 or more"]),
        ({"update": nan}, ["update", "nan"]),
        ({"forward": inf}, ["forward", "at most 1e+15"]),
        ({"backward": 1e308}, ["backward", "at most 1e+15"]),
        ({"latency": -0.1}, ["latency"]),
        ({"jitter": -0.1}, ["jitter"]),
        ({"bandwidth": 0}, ["bandwidth", "above 0"]),
    ],
)
def test_bad_costs(fields, words) -> None:
    with pytest.raises(UserError) as caught:
        Costs(**fields)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("costs", "words"),
    [
        (Costs(forward=[1, 2, 3]), "3 values of forward do not fit 4 stages"),
        (Costs(latency=[1, 2]), "2 latencies do not fit 3 links"),
        (Costs(backward_input=1), "both backward_input and backward_weight"),
    ],
)
def test_costs_that_do_not_fit_the_schedule(costs: Costs, words: str) -> None:
    with pytest.raises(UserError, match=words):
        simulate(build("1f1b", 4, 4), costs)


def test_measured_spans_make_the_same_timeline() -> None:
    timeline = simulate(build("2bw", 3, 4, 4))
    shuffled = sorted(timeline.spans, key=lambda span: (span.end, -span.rank))
    again = Timeline.from_spans(shuffled)
    assert again.spans == timeline.spans
    assert again.time_per_update == timeline.time_per_update
    assert again.banks == timeline.banks == (2, 2, 2)
    assert again.peak_activations == timeline.peak_activations == (3, 2, 1)


def test_a_measured_timeline_may_begin_anywhere_and_lack_updates() -> None:
    spans = []
    for group in (7, 8, 9, 10):
        for k, kind in enumerate((Kind.FORWARD, Kind.BACKWARD)):
            begin = 100 + 4 * group + 2 * k
            spans.append(Span(0, Action(kind, 0, 0, group, group), begin, begin + 1))
    timeline = Timeline.from_spans(spans)
    assert timeline.makespan == 15
    assert timeline.time_per_update == 4
    assert timeline.bubble_fraction == (0.5,)
    with pytest.raises(UserError, match="at least one span"):
        Timeline.from_spans([])
    with pytest.raises(UserError, match="rank 2 but none of rank 1"):
        Timeline.from_spans([*spans, spans[0]._replace(rank=2)])


def test_a_measurement_may_stop_while_one_rank_is_ahead() -> None:
    whole = simulate(build("2bw", 3, 4, 6))
    part = Timeline.from_spans(span for span in whole.spans if span.end <= 50)
    assert len({span.action.group for span in part.spans if span.rank == 0}) == 5
    assert part.time_per_update == pytest.approx(12)


@pytest.mark.bench
def test_large_schedule_is_fast() -> None:
    """64 ranks, 512 microbatches, 10 groups in under 10 s, made and simulated."""
    begin = time.process_time()
    timeline = simulate(build("2bw", 64, 512, 10))
    assert timeline.time_per_update == pytest.approx(512 * 3)
    assert time.process_time() - begin < 10


@pytest.mark.parametrize("name", tuple(GENERATORS))
@pytest.mark.parametrize("latency", [0.0, 0.3])
def test_steady_state_equals_a_long_run(name: str, latency: float) -> None:
    costs = Costs(forward=[1, 1.2, 0.9, 1], backward=[2, 2.1, 2, 2.5], update=0.5, latency=latency)
    figures = steady(name, 4, 40, costs)
    long = simulate(build(name, 4, 40, 20), costs)
    assert figures.time_per_update == pytest.approx(long.time_per_update, rel=2e-3)
    assert figures.rank_bubbles == pytest.approx(long.bubble_fraction, abs=2e-3)


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(["1f1b", "gpipe", "zb_h1", "zbv", "2bw"]), st.integers(1, 8), st.integers(2, 64))
def test_steady_state_is_exact_for_uniform_costs(name, stages, microbatches) -> None:
    microbatches = max(microbatches, 2 * stages)
    form = {"zb_h1": 3, "zbv": 6}.get(name, 1)
    expected = 0.0 if name == "2bw" else (stages - 1) / (form * microbatches + stages - 1)
    assert steady(name, stages, microbatches).bubble_fraction == pytest.approx(expected, abs=1e-9)


def test_interleaving_over_slow_links_is_not_extrapolated() -> None:
    """Rounds of 3 repeat only every five of them there: what three show is 2.5 % too fast for 32."""
    costs = Costs(forward=1.75, backward=1.78, latency=1.12, message_bytes=0.96, bandwidth=1.0)
    whole = simulate(build("interleaved_1f1b", 3, 96, 2), costs).time_per_update
    assert steady("interleaved_1f1b", 3, 96, costs).time_per_update == pytest.approx(whole, rel=1e-9)


def test_steady_figures_are_per_rank_in_units_of_a_stage() -> None:
    assert steady("1f1b", 4, 32).peak_activations == (4, 3, 2, 1)
    assert steady("zbv", 4, 32).peak_activations == (4, 4, 4, 4)
    assert steady("gpipe", 4, 32).peak_activations == (32,) * 4
    assert steady("pipedream", 4, 2).delay == (3, 2, 1, 0)
    assert steady("pipedream", 4, 1).banks == (4, 3, 2, 1)
    assert steady("2bw", 4, 32).banks == (2,) * 4
    assert steady("2bw", 4, 32).delay == (1,) * 4
    assert steady("paci", 4, 32, every=1).mismatch == (3, 2, 1, 0)


def test_a_v_schedule_turns_round_without_a_link() -> None:
    """Stages P-1 and P share the last rank: only 2(P-1) hops each way lie on the path of one microbatch."""
    costs = Costs(forward=0, backward=0, latency=1, message_bytes=1, bandwidth=2)
    assert simulate(build("zbv", 3, 1), costs).makespan == pytest.approx(2 * 2 * 2 * 1.5)


def test_an_update_too_long_to_hide_is_not_extrapolated_away() -> None:
    """At small m this update is the bottleneck and the times lie on another line than at m itself."""
    costs = Costs(forward=1, backward=2, update=0.1, update_latency=400)
    expected = simulate(build("pipedream_2bw", 8, 512, 4), costs).time_per_update
    assert steady("2bw", 8, 512, costs).time_per_update == pytest.approx(expected, rel=1e-3)
    assert expected > 1500


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "pipedream_2bw"])
def test_overhead_is_paid_by_every_action(name) -> None:
    """As if every forward and backward were that much longer."""
    costs, schedule = Costs(forward=1.0, backward=2.0, update=0.5, latency=0.1), build(name, 3, 6, 4)
    longer = replace(costs, forward=1.25, backward=2.25)
    assert simulate(schedule, replace(costs, overhead=0.25)).ends == simulate(schedule, longer).ends


def test_a_message_on_demand_is_waited_for_every_time() -> None:
    """Two equal stages: posted ahead, GPipe's messages arrive while others are worked on."""
    m, hop = 4, 0.25
    costs, schedule = Costs(forward=1.0, backward=2.0, latency=hop), build("gpipe", 2, m, 2)
    ahead = simulate(schedule, costs).time_per_update
    demanded = simulate(schedule, replace(costs, on_demand=True)).time_per_update
    assert ahead == pytest.approx((m + 1) * 3.0 + 2 * hop)
    assert demanded == pytest.approx((m + 1) * 3.0 + 2 * m * hop)
