"""The rule of who reads what, word for word from the method."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from slipstream.errors import UserError
from slipstream.schedule import build
from slipstream.schedule.cutover import Cutover, always, never
from slipstream.schedule.staleness import Read, gradients, reads, staleness

M = 4


def cutover(given: int | Callable[[int], int] = M, flushed: Callable[[int], bool] = never) -> Cutover:
    return Cutover(M, given, flushed)


def test_nothing_synchronous() -> None:
    got = [reads(g, k, cutover()) for g in range(4) for k in (0, M - 1)]
    assert got[::2] == got[1::2] == [Read("master", 0), Read("bank", 0), Read("bank", 1), Read("bank", 2)]


def test_synchronous_start() -> None:
    """With a start of N groups, groups 0..N read the newest weights and the delay begins with N+1."""
    got = [reads(g, 0, cutover(flushed=lambda g: g < 3)) for g in range(6)]
    assert got == [*(Read("master", g) for g in range(4)), Read("bank", 3), Read("bank", 4)]


def test_synchronous_finish() -> None:
    got = [reads(g, 0, cutover(flushed=lambda g: g >= 3)) for g in range(1, 6)]
    assert got == [Read("bank", 0), Read("bank", 1), *(Read("master", g) for g in (3, 4, 5))]


def test_a_cutover_of_nothing_is_plain_training() -> None:
    for nothing in (cutover(0), cutover(flushed=always)):
        assert [reads(g, 0, nothing) for g in range(5)] == [Read("master", g) for g in range(5)]


def test_a_cutover_parts_a_group_in_old_and_fresh() -> None:
    by_group = cutover(lambda g: g % (M + 1))
    for given, old in ((cutover(1), lambda g: 1), (cutover(3), lambda g: 3), (by_group, by_group)):
        for g in range(1, 8):
            for k in range(M):
                expected = Read("bank", g - 1) if k < old(g) else Read("master", g)
                assert reads(g, k, given) == expected


@pytest.mark.parametrize("wrong", [-1, M + 1, True, 1.5, "1"])
def test_a_cutover_outside_its_group_is_refused(wrong: Any) -> None:
    with pytest.raises(UserError, match=r"from 0 .* to 4"):
        cutover(wrong)
    with pytest.raises(UserError, match="of group 2"):
        cutover(lambda g: wrong)(2)


@pytest.mark.parametrize("delay", [2, 3])
def test_longer_delay_clamps_at_the_initial_bank(delay: int) -> None:
    got = [reads(g, 0, cutover(), delay=delay).index for g in range(6)]
    assert got == [max(g - delay, 0) for g in range(6)]


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zbv", "dualpipev"])
def test_flushed_schedules_have_no_delay(name: str) -> None:
    schedule = build(name, 4, 8, 3)
    assert set(staleness(schedule).delay) == set(staleness(schedule).mismatch) == {0}
    assert {(g.forward, g.backward, g.update) for g in gradients(schedule)} == {(g, g, g) for g in range(3)}


@pytest.mark.parametrize("name", ["1f1b", "zbv", "pipedream", "2bw", "paci"])
def test_every_gradient_is_applied_exactly_once(name: str) -> None:
    schedule = build(name, 3, 7, 4)
    found = [(g.stage, g.group, g.microbatch) for g in gradients(schedule)]
    assert len(found) == len(set(found)) == schedule.model_stages * 7 * 4


def test_paci_leftover_backwards_make_a_last_update() -> None:
    schedule = build("paci", 2, 5, 2, every=4)
    assert sorted({g.update for g in gradients(schedule)}) == [0, 1, 2]
