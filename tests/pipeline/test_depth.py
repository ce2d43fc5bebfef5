"""The number of microbatches in flight, chosen from measured times, against the simulator."""

import pytest

from slipstream.pipeline.depth import choose_in_flight
from slipstream.schedule import Costs, build, simulate


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
    assert choose_in_flight(8, 8, 0.03, 0.003) == 8, "m leaves no room"
    assert choose_in_flight(8, 10, 0.03, 0.003) == 10


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
