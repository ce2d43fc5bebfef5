"""The number of microbatches in flight, chosen from measured times, against the simulator."""

import pytest

from slipstream.pipeline.depth import choose_in_flight, effective_link_seconds
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


def test_a_stage_that_is_often_late_gets_more_in_flight_on_a_host_than_on_a_device():
    device, host = (effective_link_seconds(0.0, 0.030, 0.036, on_host) for on_host in (False, True))
    assert choose_in_flight(2, 8, 0.030, device) == 3
    assert choose_in_flight(2, 8, 0.030, host) == 4
    assert effective_link_seconds(0.002, 0.030, 0.030, on_host=True) == 0.002
