"""The number of microbatches in flight, chosen from measured times, against the simulator."""

import logging
import math

import pytest
import torch

from slipstream.pipeline import room
from slipstream.pipeline.depth import (
    MOST_GROUPS_TO_SETTLE,
    Depth,
    choose_in_flight,
    within_cutover,
    within_room,
)
from slipstream.pipeline.peers import RankStatus, RunStatus
from slipstream.pipeline.room import MARGIN, Room
from slipstream.pipeline.trace import Trace
from slipstream.schedule import Costs, build, simulate
from slipstream.schedule.actions import Kind
from slipstream.schedule.asynchronous import warm_up_2bw


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


@pytest.mark.parametrize("update", [0.0, 0.02, 0.05])
@pytest.mark.parametrize("link", [1e-5, 0.0005, 0.003, 0.02])
@pytest.mark.parametrize(("m", "cutover"), [(4, 4), (8, 8), (8, 5), (16, 5), (16, 8)])
def test_on_a_gpu_the_depth_is_the_least_of_the_best(m, cutover, link, update):
    """The update counts: as many in flight as two banks allow leave nothing to compute while it runs."""

    def seconds(in_flight):
        costs = Costs(forward=0.01, backward=0.02, latency=link, update=update, update_latency=link)
        schedule = build("pipedream_2bw", 4, m, 12, in_flight=in_flight, cutover=cutover)
        return simulate(schedule, costs).time_per_update

    asked = choose_in_flight(4, m, 0.03, link)
    chosen = within_cutover(4, m, asked, cutover, 0.03, link, update, least=4)
    for other in {4, asked}:
        assert seconds(chosen) <= 1.015 * seconds(other)
        assert chosen <= other or seconds(chosen) < seconds(other)


def test_where_one_more_gains_nothing_it_is_not_kept():
    """P = m = 4: a fifth is all that two banks allow, and hides a fifth of a percent of a message that is late."""
    assert choose_in_flight(4, 4, 6.3, 0.1) == 5
    assert within_cutover(4, 4, 5, 4, 6.3, 0.1, 3.5, least=4) == 4
    assert within_cutover(4, 4, 5, 4, 6.3, 0.1, 3.5) == 5, "a host keeps it"


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


def told(work, link=0.001):
    return RunStatus([], False, [work] * 4, [link] * 4, [math.inf] * 4, [0.0] * 4)


def test_a_stage_that_is_being_recorded_is_not_measured():
    """Its jitter is that of the recording: the depth is chosen when all of it is over."""
    depths = [Depth(stage, 4, 8, None, on_host=False, cutover=5) for stage in range(4)]
    recorded = depths[2]
    statuses, times = {}, {0: (0.01, 0.4), 1: (0.01, 0.4), 2: (0.01, 0.2), 3: (0.01, 0.01002)}
    for group in range(12):
        for depth in depths:
            depth.adapt(group, statuses)
        if group < 4:
            recorded.recording()
        found = []
        for depth in depths:
            status = RankStatus()
            depth.measure(status, lambda group=group: times.get(group, (0.01, 0.01002)))
            found.append(status)
        assert (found[2].work_seconds == math.inf) == (group < 5), (
            "its last backwards come with the next group's"
        )
        statuses[group] = RunStatus(
            [],
            False,
            [s.work_seconds for s in found],
            [s.link_seconds for s in found],
            [math.inf] * 4,
            [0.0] * 4,
        )
        assert recorded.is_open == (group < 7), "update 5 is told when group 7 enters"
    assert [depth.warm_up for depth in depths] == warm_up_2bw(4, 8, 4)


def test_a_stage_that_never_settles_keeps_the_least_depth():
    depth = Depth(0, 4, 8, None, on_host=False, cutover=8)
    groups = 3 + MOST_GROUPS_TO_SETTLE
    for group in range(groups + 1):
        assert depth.is_open
        depth.adapt(group, {group - 2: told(math.inf)})
    assert not depth.is_open
    assert depth.warm_up == warm_up_2bw(4, 8)[0]


@pytest.mark.parametrize("chosen", [4, 5, 7, 10, 13])
@pytest.mark.parametrize(
    "room", [(math.inf,) * 4, (3, 3, 3, 0), (9, 1, 9, 0), (0, 9, 9, 9), (9, 9, 0, 9), (2, 2, 2, 2)]
)
def test_no_stage_holds_more_than_it_has_room_for(chosen, room):
    stages, m = 4, 12
    held = within_room(stages, m, chosen, room)
    least = warm_up_2bw(stages, m)

    def fits(in_flight):
        more = warm_up_2bw(stages, m, in_flight)
        return all(a - b <= left for a, b, left in zip(more, least, room, strict=True))

    assert stages <= held <= chosen
    assert fits(held)
    assert held == chosen or not fits(held + 1), "one more would fit"


def test_a_run_takes_what_the_fullest_stage_has_room_for_and_says_so(caplog):
    told = RunStatus([], False, [0.03] * 4, [0.014] * 4, [math.inf, 1.0, math.inf, math.inf], [0.0] * 4)
    with caplog.at_level(logging.INFO, "slipstream"):
        found = []
        for stage in range(4):
            depth = Depth(stage, 4, 24, None, on_host=False, cutover=24)
            for group in range(4):
                depth.adapt(group, {1: told})
            found.append(depth.warm_up)
    asked = choose_in_flight(4, 24, 0.03, 0.014)
    held = within_room(4, 24, asked, told.room)
    assert 4 < held < asked
    assert found == warm_up_2bw(4, 24, held)
    assert [record.getMessage().split(":")[0] for record in caplog.records] == [
        f"{held} microbatches in flight"
    ]


def test_what_a_gpu_has_room_for(monkeypatch):
    """Two ranks on a GPU with 1000 bytes free, each with 100 of its own; forwards leave 40 at most, the peak is 240."""
    allocated = iter([60, 70, 60, 100, 60, 95])
    cuda = {
        "mem_get_info": lambda device: (1000, 2000),
        "memory_reserved": lambda device: 100,
        "memory_allocated": lambda device: next(allocated),
        "max_memory_allocated": lambda device: 240,
        "device_count": lambda: 1,
    }
    for name, answer in cuda.items():
        monkeypatch.setattr(room.torch.cuda, name, answer)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    found = Room(torch.device("cuda"), shared=True)
    assert found.microbatches() == math.inf, "nothing is known of them yet"
    for _ in range(3):
        with found.forward():
            pass
    assert found.microbatches() == ((1 - MARGIN) * 600 - 240) // 40
    status = RankStatus()
    depth = Depth(0, 2, 8, None, on_host=False, cutover=8)
    depth.room = found
    depth.measure(status, lambda: (0.03, 0.04))
    assert status.room == found.microbatches()
    depth.recording()
    assert found.microbatches() == ((1 - MARGIN) * 600 - 100) // 40, (
        "between recordings their memory counts as free"
    )
    own = Room(torch.device("cuda"))
    allocated = iter([0, 40])
    with own.forward():
        pass
    assert own.microbatches() == ((1 - MARGIN) * 1100 - 240) // 40, (
        "a GPU to itself, whoever else is on the machine"
    )
    assert Room(torch.device("cpu")).microbatches() == math.inf
