"""Every schedule we emit obeys the laws; every kind of damage is found, and the grid marks the spot."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.errors import UserError
from slipstream.schedule import Action, Kind, Schedule, ScheduleError, Weights, build, check
from slipstream.schedule.generate import GENERATORS
from slipstream.schedule.staleness import with_versions
from slipstream.schedule.validate import messages


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(tuple(GENERATORS)), st.integers(1, 8), st.integers(1, 20), st.integers(1, 3), st.data()
)
def test_every_emitted_schedule_is_lawful(name, stages, microbatches, groups, data) -> None:
    options = {}
    if name == "pipedream_2bw":
        microbatches = max(stages, microbatches)
        options["in_flight"] = data.draw(st.integers(stages, microbatches + 1))
    elif name == "interleaved_1f1b":
        options["chunks"] = data.draw(st.integers(2, 4))
        microbatches = stages * data.draw(st.integers(1, 3))
    elif name == "paci":
        options["every"] = data.draw(st.integers(1, 12))
    elif name == "dualpipev":
        microbatches = max(2 * stages, microbatches)
    check(build(name, stages, microbatches, groups, **options))


def edit(schedule: Schedule, rank: int, change: Callable[[list[Action]], None]) -> Schedule:
    rows = [list(actions) for actions in schedule.ranks]
    change(rows[rank])
    return replace(schedule, ranks=tuple(map(tuple, rows)))


def swap(i: int, j: int) -> Callable[[list[Action]], None]:
    def change(row: list[Action]) -> None:
        row[i], row[j] = row[j], row[i]

    return change


def put(i: int, **fields) -> Callable[[list[Action]], None]:
    def change(row: list[Action]) -> None:
        row[i] = row[i]._replace(**fields)

    return change


def drop(i: int) -> Callable[[list[Action]], None]:
    return lambda row: row.__delitem__(i)


def twice(i: int) -> Callable[[list[Action]], None]:
    return lambda row: row.insert(i, row[i])


# 1f1b, P=2, m=4 on rank 0: F0 F1 B0 F2 B1 F3 B2 B3 U; on rank 1: F0 B0 F1 B1 F2 B2 F3 B3 U
@pytest.mark.parametrize(
    ("rank", "change", "words", "spot"),
    [
        (0, twice(1), "comes twice", ">0F1g0v0<"),
        (0, drop(1), "needs one forward and one backward", ">0F0g0v0<"),
        (0, drop(8), "reach no update", ">end<"),
        (0, swap(0, 2), "before its forward", ">0B0g0v0<"),
        (0, swap(7, 8), "reach no update", ">end<"),
        (0, put(0, stage=7), "no such stage", ">7F0g0v0<"),
        (0, put(0, stage=1), "stage 1 is on rank 0 and on rank 1", ">1F0g0v0<"),
        (0, put(0, microbatch=9), "no such microbatch", ">0F9g0v0<"),
        (0, put(0, group=3), "no such stage or group", ">0F0g3v0<"),
        (0, put(0, version=None), "does not say which weights", ">0F0g0<"),
        (0, put(0, version=1), "not published yet", ">0F0g0v1<"),
        (0, put(8, version=2), "out of turn", ">0Ug0v2<"),
        (0, put(8, microbatch=3), "of a whole group", ">0U3g0v1<"),
        (0, swap(1, 3), "received as the output of", ">0F2g0v0<"),
    ],
)
def test_damage_to_1f1b(rank, change, words, spot) -> None:
    broken = edit(build("1f1b", 2, 4), rank, change)
    with pytest.raises(ScheduleError) as caught:
        check(broken)
    assert words in str(caught.value)
    assert spot in str(caught.value)


def test_deadlock_shows_where_each_rank_is_stuck() -> None:
    """Rank 0 wants the first gradient before it sends the forward that rank 1 needs to get there."""
    broken = edit(build("gpipe", 2, 2), 0, swap(1, 2))
    with pytest.raises(ScheduleError) as caught:
        check(broken)
    message = str(caught.value)
    assert "deadlocks" in message
    assert ">0B0g0v0<" in message
    assert ">1F1g0v0<" in message


def test_unknown_rank_count() -> None:
    schedule = build("1f1b", 2, 2)
    with pytest.raises(ScheduleError, match="1 ranks for 2 stages"):
        check(replace(schedule, ranks=schedule.ranks[:1]))


def test_weight_gradient_before_its_input_gradient() -> None:
    schedule = build("zb_h1", 1, 1)
    with pytest.raises(ScheduleError, match="before its backward_input"):
        check(edit(schedule, 0, swap(1, 2)))


def test_2bw_with_too_deep_a_warm_up_reads_an_unpublished_bank() -> None:
    """One forward more in flight than m: group 2 starts before update 0, so two banks would not do."""
    row = [Action(Kind.FORWARD, 0, k % 2, k // 2) for k in range(6)]
    for k in range(6):
        row.append(Action(Kind.BACKWARD, 0, k % 2, k // 2))
        if k % 2:
            row.append(Action(Kind.UPDATE, 0, None, k // 2))
    schedule = with_versions(
        Schedule("deep", 1, 2, 3, (tuple(row),), weights=Weights.BANKS, synchronous=False)
    )
    with pytest.raises(ScheduleError, match="not published yet") as caught:
        check(schedule)
    assert ">0F0g2v1<" in str(caught.value)


def test_2bw_that_reads_the_newest_weights_is_refused() -> None:
    """PACI's order with group updates is 2BW's order: only the versions differ."""
    paci = build("paci", 4, 4, 3)
    with pytest.raises(ScheduleError, match="different weights"):
        check(replace(paci, weights=Weights.BANKS))


def test_2bw_with_another_delay_is_refused() -> None:
    """Group 2 still on the initial weights: published, the same in both directions, but two updates old."""
    schedule = build("2bw", 1, 2, 3)
    older = tuple(
        a._replace(version=0) if a.group == 2 and a.microbatch is not None else a for a in schedule.ranks[0]
    )
    with pytest.raises(ScheduleError, match="microbatch 0 of group 2 on stage 0 has delay 2") as caught:
        check(replace(schedule, ranks=(older,)))
    assert ">0F0g2v0<" in str(caught.value)


def test_stashing_forbids_a_mismatch() -> None:
    with pytest.raises(ScheduleError, match="different weights"):
        check(replace(build("paci", 4, 4, 3, every=1), weights=Weights.STASH))


def test_pipedream_must_read_the_newest_weights() -> None:
    schedule = build("pipedream", 1, 3, 1)
    stale = tuple(a._replace(version=0) if a.microbatch == 2 else a for a in schedule.ranks[0])
    with pytest.raises(ScheduleError, match="wrong weights: the rule 'stash' says version 2"):
        check(replace(schedule, ranks=(stale,)))


def test_an_update_named_after_another_group_is_refused() -> None:
    broken = edit(build("1f1b", 1, 1, 2), 0, put(2, group=1))
    with pytest.raises(ScheduleError, match="0Ug1v1 ends with a gradient of group 0"):
        check(broken)


@pytest.mark.parametrize("name", ["paci", "2bw"])
def test_a_schedule_that_says_it_flushes_and_does_not_is_refused(name) -> None:
    with pytest.raises(ScheduleError, match="has delay 1, where every group should end at a barrier"):
        check(replace(build(name, 4, 4, 3), synchronous=True))


def test_an_update_that_takes_another_groups_gradient_is_refused() -> None:
    schedule = build("2bw", 1, 2, 2)
    # F0 B0 F1 B1 U | F0 B0 F1 B1 U: the first update now also takes the first gradient of group 1
    broken = edit(schedule, 0, lambda row: row.insert(6, row.pop(4)))
    with pytest.raises(ScheduleError, match="feeds update 0"):
        check(broken)


def test_a_schedule_error_is_a_user_error() -> None:
    assert issubclass(ScheduleError, UserError)


def test_messages_of_2bw_never_share_a_channel_between_directions() -> None:
    """The forward channel runs down, the backward channel up: two communicators, each one way per pair."""
    schedule = build("2bw", 4, 8, 3)
    channels = messages(schedule)
    assert set(channels) == {("forward", s, s + 1) for s in range(3)} | {
        ("backward", s + 1, s) for s in range(3)
    }
    for sent, received in channels.values():
        assert sent == received
        assert len(sent) == 24


def test_a_neighbour_that_receives_out_of_order_is_found() -> None:
    schedule = build("gpipe", 2, 3)
    broken = edit(schedule, 1, swap(0, 1))
    with pytest.raises(ScheduleError, match="forward channel from rank 0 to rank 1"):
        check(broken)
