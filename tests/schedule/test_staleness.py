"""The rule of who reads what, word for word from the method."""

from __future__ import annotations

import pytest

from slipstream.schedule import build
from slipstream.schedule.staleness import Read, gradients, reads, staleness


def test_nothing_synchronous() -> None:
    got = [reads(g, lambda _: False) for g in range(4)]
    assert got == [Read("master", 0), Read("bank", 0), Read("bank", 1), Read("bank", 2)]


def test_synchronous_start() -> None:
    """With a start of N groups, groups 0..N read the newest weights and the delay begins with N+1."""
    got = [reads(g, lambda g: g < 3) for g in range(6)]
    assert got == [*(Read("master", g) for g in range(4)), Read("bank", 3), Read("bank", 4)]


def test_synchronous_finish() -> None:
    got = [reads(g, lambda g: g >= 3) for g in range(1, 6)]
    assert got == [Read("bank", 0), Read("bank", 1), *(Read("master", g) for g in (3, 4, 5))]


def test_everything_synchronous_is_plain_training() -> None:
    assert [reads(g, lambda _: True) for g in range(5)] == [Read("master", g) for g in range(5)]


@pytest.mark.parametrize("delay", [2, 3])
def test_longer_delay_clamps_at_the_initial_bank(delay: int) -> None:
    got = [reads(g, lambda _: False, delay=delay).index for g in range(6)]
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
