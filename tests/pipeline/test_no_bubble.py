"""The engine has no bubble: shown by who waits for whom, not by a clock.

Two facts together give the timeline under any costs. The order: each stage's forwards and backwards, as the engine
executed them, put on the simulator's clock with unit costs. And the waits: with one stage held up before any of its
actions, the others come exactly as far as the simulator says the data allow. A send that waits for its receiver, a
norm that is waited for too early, an exchange that needs a stage which is computing: each would stop one of them
short. `make bench` measures the same on a clock.
"""

from dataclasses import replace

import numpy as np
import pytest

from slipstream.schedule import Costs, Kind, build, simulate
from slipstream.schedule.actions import group_updates
from slipstream.schedule.simulate import Deadlock

GROUPS = 4
FORWARD, BACKWARD = 1, 2
JOB = "pipeline.hold_jobs:run"


def computed(actions):
    return [action for action in actions if action.kind is not Kind.UPDATE]


def reach(schedule, held):
    """For each action of `held` in turn: how many every rank can begin as long as `held` does not begin that one."""
    return [_stuck(schedule, held, before) for before in range(len(computed(schedule.ranks[held])))]


def _stuck(schedule, held, before):
    own = schedule.ranks[held]
    at = own.index(computed(own)[before])
    never = own[at]._replace(version=schedule.groups + 1)  # of weights that nobody will publish
    ranks = (*schedule.ranks[:held], (*own[:at], never), *schedule.ranks[held + 1 :])
    with pytest.raises(Deadlock) as found:
        simulate(replace(schedule, ranks=ranks))
    stuck = found.value.stuck
    return [len(computed(row[: stuck.get(rank, len(row))])) for rank, row in enumerate(ranks)]


def counters(folder, ranks):
    path = folder / "begun"
    np.zeros(ranks, dtype=np.int64).tofile(path)
    return str(path)


def replay(schedule, executed):
    """What was executed, on a clock of unit costs; each update right after the backward that completes its group."""
    ranks = []
    for row in executed:
        order = []
        for action in row:
            order.append(action)
            if action.kind is Kind.BACKWARD and action.microbatch == schedule.microbatches - 1:
                order += group_updates([action], action.group)
        ranks.append(tuple(order))
    return simulate(replace(schedule, ranks=tuple(ranks)), Costs(forward=FORWARD, backward=BACKWARD))


@pytest.mark.parametrize(
    ("stages", "microbatches", "in_flight", "cutover", "clip"),
    [
        (2, 3, 3, 3, 1.0),
        (3, 4, 4, 4, None),
        (4, 4, 4, 4, 1.0),
        (4, 8, 4, 4, 1.0),
        (4, 8, 8, 8, 1.0),
        (4, 5, 6, 5, 1.0),
    ],
)
def test_no_stage_waits_for_more_than_its_data(
    pool, tmp_path, stages, microbatches, in_flight, cutover, clip
):
    schedule = build("2bw", stages, microbatches, GROUPS, in_flight=in_flight, cutover=cutover)
    for held in range(stages):
        executed = pool.run(
            JOB, counters(tmp_path, stages), held, reach(schedule, held), microbatches, GROUPS,
            in_flight=in_flight, cutover=cutover, max_grad_norm=clip, ranks=stages, timeout=280,
        )  # fmt: skip
        timeline = replay(schedule, executed)
        pair, hops = FORWARD + BACKWARD, stages - 1
        assert timeline.bubble_fraction == (0.0,) * stages
        assert timeline.time_per_update == microbatches * pair
        # Filling and draining are paid once, whatever the number of groups; the last stage never waits at all.
        assert timeline.makespan == (GROUPS * microbatches + hops) * pair
        assert timeline.starts[-1][0] == hops * FORWARD
        assert timeline.ends[0][-1] - timeline.ends[-1][-1] == hops * BACKWARD
        assert timeline.ends[-1][-1] - timeline.starts[-1][0] == GROUPS * microbatches * pair


def test_a_flush_shows_its_bubble(pool, tmp_path):
    """The same replay of an engine that flushes after every group: 1F1B's bubble, to the digit."""
    stages, microbatches = 4, 4
    executed = pool.run(
        JOB, counters(tmp_path, stages), None, None, microbatches, GROUPS,
        synchronous=GROUPS, ranks=stages, timeout=280,
    )  # fmt: skip
    timeline = replay(build("1f1b", stages, microbatches, GROUPS), executed)
    bubble = (stages - 1) / (microbatches + stages - 1)
    assert timeline.bubble_fraction == pytest.approx([bubble] * stages, abs=1e-12)
    assert timeline.time_per_update == (microbatches + stages - 1) * (FORWARD + BACKWARD)
