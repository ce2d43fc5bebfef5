"""The number of microbatches in flight, chosen from measured times, against the simulator."""

import pytest
import torch

from slipstream.pipeline.depth import choose_in_flight, within_cutover
from slipstream.pipeline.trace import Trace
from slipstream.schedule import Costs, build, simulate
from slipstream.schedule.actions import Kind


def fraction_of_bound(stages, m, in_flight, latency):
    timeline = simulate(
        build("pipedream_2bw", stages, m, 6, in_flight=in_flight),
        Costs(forward=0.01, backward=0.02, latency=latency),
    )
    return m * 0.03 / timeline.time_per_update


@pytest.mark.parametrize("stages", [2, 4, 8])
@pytest.mark.parametrize("latency", [0.001, 0.003, 0.014, 0.02])
def test_the_chosen_depth_hides_the_link_and_no_smaller_one_does(stages, latency):
    m = 6 * stages
    chosen = choose_in_flight(stages, m, 0.03, latency)
    assert fraction_of_bound(stages, m, chosen, latency) == pytest.approx(1.0, abs=1e-9)
    assert fraction_of_bound(stages, m, chosen - 1, latency) < 0.999
    assert fraction_of_bound(stages, m, stages, latency) < 0.98


def test_a_fast_link_keeps_the_least():
    assert choose_in_flight(8, 16, 0.03, 1e-5) == 8


def test_two_banks_leave_room_for_one_more_than_a_group():
    assert choose_in_flight(8, 8, 0.03, 0.003) == 9
    assert choose_in_flight(8, 10, 0.03, 0.003) == 11
    assert within_cutover(8, 8, 9, 8, 0.03, 0.003) == 9


@pytest.mark.parametrize(("m", "in_flight"), [(2, 3), (3, 4), (4, 5), (8, 5), (32, 5)])
def test_stages_on_a_host_are_further_ahead_as_far_as_two_versions_allow(m, in_flight):
    assert choose_in_flight(2, m, 0.030, 1e-5, on_host=True) == in_flight
    assert choose_in_flight(2, 32, 0.030, 0.100, on_host=True) == 9, "a slow link wants more than a late core"


@pytest.mark.parametrize(("stages", "m"), [(2, 2), (2, 4), (4, 4), (4, 16), (8, 8), (8, 32)])
def test_the_depth_of_a_host_is_one_the_schedule_allows_and_makes_up_for_lateness(stages, m):
    chosen = choose_in_flight(stages, m, 0.03, 1e-5, on_host=True)
    late = Costs(forward=0.01, backward=0.02, jitter=0.2)
    ahead, least = (
        simulate(build("pipedream_2bw", stages, m, 60, in_flight=k), late).time_per_update
        for k in (chosen, stages)
    )
    assert ahead < least


def seconds_per_update(stages, m, in_flight, cutover, link):
    costs = Costs(forward=0.01, backward=0.02, latency=link, update_latency=link)
    schedule = build("pipedream_2bw", stages, m, 12, in_flight=in_flight, cutover=cutover)
    return simulate(schedule, costs).time_per_update


@pytest.mark.parametrize("link", [1e-5, 0.001, 0.003, 0.03, 0.05, 0.075])
@pytest.mark.parametrize(("stages", "m"), [(2, 8), (2, 32), (4, 8), (8, 24)])
@pytest.mark.parametrize("on_host", [False, True])
def test_with_the_least_cutover_the_depth_is_never_the_worse_one(stages, m, link, on_host):
    """50 ms each way between two nodes: the depth was held at the cutover, and the link hidden by nothing."""
    asked = choose_in_flight(stages, m, 0.03, link, on_host)
    chosen = within_cutover(stages, m, asked, stages, 0.03, link)
    assert stages <= chosen <= m + 1
    taken = seconds_per_update(stages, m, chosen, stages, link)
    assert taken <= 1.02 * seconds_per_update(stages, m, stages, stages, link)
    if link >= 0.03 and m >= 3 * stages:
        assert chosen > stages
        assert taken < 0.8 * seconds_per_update(stages, m, stages, stages, link)


def test_a_cutover_that_leaves_room_takes_nothing_away():
    assert within_cutover(2, 32, 9, 32, 0.03, 0.1) == 9
    assert within_cutover(2, 32, 5, 2, 0.03, 1e-5) == 2, "being late by chance is not worth a part of a flush"


def test_what_was_faster_while_the_pipeline_filled_is_no_jitter(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("slipstream.pipeline.trace.time.perf_counter", lambda: now[0])
    trace = Trace(0, torch.device("cpu"))

    def group(seconds):
        for kind in (Kind.FORWARD, Kind.BACKWARD):
            for microbatch in range(4):
                with trace.action(kind, 0, microbatch):
                    now[0] += seconds

    group(0.5)
    assert trace.pair_seconds() == pytest.approx((1.0, 1.0))
    group(0.75)
    assert trace.pair_seconds() == pytest.approx((1.5, 1.5))
    assert trace.pair_seconds() == (0.0, 0.0)
