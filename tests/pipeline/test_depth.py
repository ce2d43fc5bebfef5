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
from slipstream.pipeline.depth_trial import GROUPS_OF_A_TRIAL, depths_to_try
from slipstream.pipeline.peers import RankStatus, RunStatus
from slipstream.pipeline.room import MARGIN, Room
from slipstream.pipeline.trace import Trace
from slipstream.schedule import Costs, build, simulate
from slipstream.schedule.actions import Kind
from slipstream.schedule.asynchronous import warm_up_2bw
from slipstream.schedule.cutover import Cutover


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
    assert within_cutover(4, 32, 13, 4, 0.03, 1e-5) == 5, (
        "being late by chance is not worth a part of a flush"
    )


@pytest.mark.parametrize(("stages", "m"), [(2, 4), (2, 6), (4, 8), (8, 24)])
@pytest.mark.parametrize("slack", [0, 1])
def test_one_more_in_flight_than_are_old_costs_no_flush_and_makes_up_for_lateness(stages, m, slack):
    cutover = stages + slack

    def seconds(in_flight, jitter):
        late = Costs(forward=0.01, backward=0.02, update=0.003, jitter=jitter)
        schedule = build("pipedream_2bw", stages, m, 40, in_flight=in_flight, cutover=cutover)
        return simulate(schedule, late).time_per_update

    assert seconds(cutover + 1, 0.0) == pytest.approx(seconds(cutover, 0.0))
    assert seconds(cutover + 1, 0.2) < seconds(cutover, 0.2)
    asked = choose_in_flight(stages, m, 0.03, 1e-5, on_host=True)
    chosen = within_cutover(stages, m, asked, cutover, 0.03, 1e-5)
    assert chosen > cutover
    assert seconds(chosen, 0.0) <= 1.01 * seconds(cutover, 0.0)


@pytest.mark.parametrize(
    ("stages", "m", "cutover"), [(2, 4, 3), (4, 8, 4), (4, 8, 5), (8, 16, 10), (8, 16, 13), (8, 24, 9)]
)
@pytest.mark.parametrize("lateness", [0.05, 0.1])
def test_with_stages_that_are_late_the_depth_is_no_worse_than_one_more_than_are_old(
    stages, m, cutover, lateness
):
    link, work = 0.0003, 0.03

    def seconds(in_flight):
        taken = 0.0
        for seed in range(3):
            late = Costs(
                0.01, 0.02, update=0.003, latency=link, update_latency=link, jitter=lateness, seed=seed
            )
            schedule = build("pipedream_2bw", stages, m, 40, in_flight=in_flight, cutover=cutover)
            taken += simulate(schedule, late).time_per_update
        return taken

    asked = choose_in_flight(stages, m, work, link + lateness * work, on_host=True)
    chosen = within_cutover(stages, m, asked, cutover, work, link, lateness * work)
    # Lateness is taken for a latency, which with nine of 24 old overrates what depth does for it.
    assert seconds(chosen) <= (1.025 if (cutover, lateness) == (9, 0.1) else 1.005) * seconds(cutover + 1)


@pytest.mark.parametrize(("stages", "m"), [(4, 8), (8, 8), (8, 24)])
def test_groups_that_are_flushed_keep_no_more_than_they_need(stages, m):
    asked = choose_in_flight(stages, m, 0.03, 1e-5, on_host=True)
    assert within_cutover(stages, m, asked, 0, 0.03, 1e-5) == stages


def test_an_update_whose_exchange_takes_long_is_left_a_pair_to_hide_it():
    assert within_cutover(2, 4, 5, 3, 0.03, 1e-5) == 4
    assert within_cutover(2, 4, 5, 3, 0.03, 0.0015) == 3
    assert within_cutover(2, 4, 5, 3, 0.03, 1e-5, late_seconds=0.0015) == 4, (
        "a late stage tells its norm in time"
    )


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


def test_an_update_is_timed_from_the_one_before_unless_there_was_a_pause(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("slipstream.pipeline.trace.time.perf_counter", lambda: now[0])
    trace = Trace(0, torch.device("cpu"))
    assert trace.last_update() == (-1, 0.0)
    found = []
    for group in range(5):
        now[0] += 4.0
        with trace.action(Kind.FORWARD, group, 0):
            now[0] += 1.0
        with trace.action(Kind.UPDATE, group):
            now[0] += 2.0
        found.append(trace.last_update())
        if group == 2:
            trace.pause()
            now[0] += 100.0
    assert found == [(0, 0.0), (1, 7.0), (2, 7.0), (3, 0.0), (4, 7.0)]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_an_update_of_a_gpu_is_timed_on_the_device():
    """And a pause belongs to the update that comes after it, however late the host reads of both."""
    device = torch.device("cuda", torch.cuda.current_device())
    trace = Trace(0, device)
    with torch.cuda.device(device):
        torch.cuda._sleep(10_000)
        torch.cuda.synchronize()
        for group in range(6):
            if group == 3:
                trace.pause()
            with trace.action(Kind.UPDATE, group):
                torch.cuda._sleep(20_000_000)
            if group == 3:
                assert trace.last_update()[0] < 3, "the host is ahead"
        found = []
        while not found or found[-1][0] < 5:
            if (last := trace.last_update()) not in found:
                found.append(last)
    assert all((seconds == 0.0) == (group in (-1, 0, 3)) for group, seconds in found)
    assert all(seconds < 1.0 for _, seconds in found)


class Ranks:
    """The depths of all stages of a run whose groups take as long as `seconds` says for a number in flight."""

    def __init__(
        self, seconds, m=16, cutover=5, stages=4, link=1.5, room=math.inf, synchronous=lambda g: False
    ):
        self.seconds, self.link, self.room = seconds, link, room
        self.cutover = Cutover(m, cutover, synchronous)
        self.depths = [Depth(s, stages, m, None, False, self.cutover) for s in range(stages)]
        self.statuses, self.group = {}, 0
        self.had = []  # in flight on stage 0, by group
        self.taken = [0.0]  # by update, as the one after it is measured
        self.recording = lambda group, in_flight: False

    def step(self):
        group = self.group
        for depth in self.depths:
            depth.adapt(group, self.statuses)
        in_flight = self.depths[0].warm_up + 1
        expected = warm_up_2bw(len(self.depths), self.cutover.microbatches, in_flight)
        assert [depth.warm_up for depth in self.depths] == expected, "stages disagree"
        self.had.append(in_flight)
        self.taken.append(self.seconds(in_flight, group))
        told = []
        for depth in self.depths:
            if self.recording(group, in_flight):
                depth.recording()
            status = RankStatus()
            # The update before this one is the last that the device is known to have done.
            depth.measure(status, lambda: (1.0, 1.0 + self.link), lambda: (group - 1, self.taken[group]))
            told.append(status)
        self.statuses[group] = RunStatus(
            [],
            False,
            [s.work_seconds for s in told],
            [s.link_seconds for s in told],
            [s.late_seconds for s in told],
            [self.room] * len(told),
            [s.update for s in told],
            [s.update_seconds for s in told],
        )
        self.group += 1

    def run(self, most=400):
        while self.depths[0].is_open and self.group < most:
            self.step()
        assert not any(depth.is_open for depth in self.depths)
        for _ in range(3):
            self.step()
        return self.had[-1]


@pytest.mark.parametrize("best", [4, 5, 7, 13])
@pytest.mark.parametrize("update", [0.001, 1.0, 300.0])
def test_on_a_gpu_the_depth_with_the_shortest_updates_is_taken(best, update):
    """Jitter of one and a half pairs may ask for thirteen in flight (c = 5 of 16)."""
    ranks = Ranks(lambda in_flight, group: update * (1.0 if in_flight == best else 1.1))
    assert ranks.run() == best
    assert list(dict.fromkeys(ranks.had[:-3]))[:4] == [4, 5, 7, 13], "the least first"
    assert len(ranks.had) <= GROUPS_OF_A_TRIAL + 8


@pytest.mark.parametrize(
    "taken", [{4: 1.0, 5: 1.0, 7: 0.995, 13: 1.1}, {4: 1.004, 5: 1.001, 7: 1.0, 13: 0.999}]
)
def test_of_depths_that_are_as_good_the_least_is_taken(taken):
    assert Ranks(lambda in_flight, group: taken[in_flight]).run() == 4


def test_links_that_are_hidden_by_the_least_depth_ask_for_no_trial():
    ranks = Ranks(lambda in_flight, group: 1.0, link=0.001)
    assert ranks.run() == 4
    assert set(ranks.had) == {4}


@pytest.mark.parametrize(
    "simulated", [(8, 8, 0.0005), (16, 5, 0.0005), (16, 5, 0.02), (16, 8, 0.003), (4, 4, 0.003)]
)
def test_the_trial_agrees_with_the_simulator_on_its_own_pipeline(simulated):
    m, cutover, link = simulated

    def seconds(in_flight, group=0):
        costs = Costs(forward=0.01, backward=0.02, latency=link, update=0.05, update_latency=link)
        schedule = build("pipedream_2bw", 4, m, 12, in_flight=in_flight, cutover=cutover)
        return simulate(schedule, costs).time_per_update

    chosen = Ranks(seconds, m=m, cutover=cutover).run()
    tried = depths_to_try(4, cutover, choose_in_flight(4, m, 1.0, 1.5))
    assert seconds(chosen) <= 1.011 * min(map(seconds, tried))


def test_a_flushed_start_says_nothing_about_depths():
    ranks = Ranks(
        lambda in_flight, group: 3.0 if group < 100 else {4: 1.2, 5: 1.0, 7: 1.1, 13: 1.3}[in_flight],
        synchronous=lambda group: group < 99,
    )
    assert ranks.run() == 5
    assert set(ranks.had[:101]) == {4}


def test_updates_that_are_long_by_chance_or_cannot_be_compared_do_not_count():
    """A checkpoint, or one before which the pipeline was drained: 0 seconds, which is not known."""
    best = {4: 1.2, 5: 1.0, 7: 1.1, 13: 1.3}
    ranks = Ranks(
        lambda in_flight, group: 9.0 if group % 5 == 2 else 0.0 if group % 7 == 3 else best[in_flight]
    )
    assert ranks.run() == 5


def test_a_state_that_is_loaded_in_the_middle_of_a_trial_begins_with_the_least_depth():
    ranks = Ranks(lambda in_flight, group: 1.0 if in_flight == 13 else 1.3)
    while not ranks.had or ranks.had[-1] != 13:
        ranks.step()
    for depth in ranks.depths:
        depth.begin_again()
    ranks.statuses.clear()
    ranks.step()
    assert ranks.had[-1] == 4
    assert ranks.run() == 13


@pytest.mark.parametrize("cutover", [0, 5])
def test_a_run_of_flushed_groups_only_tries_nothing_and_watches_no_memory(cutover):
    ranks = Ranks(lambda in_flight, group: 1.0, cutover=cutover, synchronous=lambda group: True)
    for _ in range(200):
        ranks.step()
    assert set(ranks.had) == {4}
    assert not any(depth.asks_for_room for depth in ranks.depths)


def test_a_stage_that_is_being_recorded_is_not_measured():
    """Its jitter is that of the recording. Depths are tried when all of it is over, and each makes some of its own."""
    begun = {}

    def recording(group, in_flight):
        return group - begun.setdefault(in_flight, group) < 4

    def seconds(in_flight, group):
        return 9.0 if recording(group, in_flight) else {4: 1.2, 5: 1.0, 7: 1.1, 13: 1.3}[in_flight]

    ranks = Ranks(seconds)
    ranks.recording = recording
    for group in range(8):
        ranks.step()
        assert (math.inf in ranks.statuses[group].work_seconds) == (group < 5), (
            "its last backwards come with the next group's"
        )
    assert ranks.run() == 5


def test_a_stage_that_never_settles_keeps_the_least_depth():
    ranks = Ranks(lambda in_flight, group: 1.0)
    ranks.recording = lambda group, in_flight: True
    assert ranks.run() == 4
    assert len(ranks.had) <= 3 + MOST_GROUPS_TO_SETTLE + 5


def test_a_run_that_pauses_all_the_time_keeps_what_it_has():
    ranks = Ranks(lambda in_flight, group: 0.0)
    assert ranks.run() == 4
    assert len(ranks.had) < 80


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


def test_a_run_tries_no_more_than_the_fullest_stage_has_room_for_and_says_so(caplog):
    ranks = Ranks(lambda in_flight, group: 1.0 / in_flight, m=24, cutover=24, link=0.4, room=2.0)
    asked = choose_in_flight(4, 24, 1.0, 0.4)
    held = within_room(4, 24, asked, [2.0] * 4)
    assert 4 < held < asked
    with caplog.at_level(logging.INFO, "slipstream"):
        assert ranks.run() == held
    assert max(ranks.had) == held
    assert [record.getMessage().split(":")[0] for record in caplog.records] == [
        f"At most {held} microbatches in flight"
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
    depth = Depth(0, 2, 8, None, False, Cutover(8, 8, lambda group: False))
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
