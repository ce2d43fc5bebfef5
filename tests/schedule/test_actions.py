"""The schedule as a value: its text form, its CSV form, and what is refused."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.errors import UserError
from slipstream.schedule import build
from slipstream.schedule.actions import Action, Kind, from_csv, from_text, to_csv, to_text
from slipstream.schedule.generate import ALIASES, GENERATORS

NAMES = tuple(GENERATORS)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(NAMES), st.integers(1, 5), st.integers(1, 4), st.integers(1, 3))
def test_text_form_round_trips(name, stages, rounds, groups) -> None:
    schedule = build(name, stages, 2 * stages * rounds, groups)
    assert from_text(to_text(schedule)) == schedule


@pytest.mark.parametrize("name", [name for name in NAMES if GENERATORS[name].synchronous])
def test_csv_form_round_trips_one_group(name: str) -> None:
    assert from_csv(to_csv(build(name, 4, 8, groups=3)), name) == build(name, 4, 8, groups=1)


def test_an_action_reads_like_torch_with_group_and_version() -> None:
    assert str(Action(Kind.FORWARD, 2, 5, 1, 0)) == "2F5g1v0"
    assert str(Action(Kind.UPDATE, 2, None, 1, 2)) == "2Ug1v2"
    assert str(Action(Kind.BACKWARD_WEIGHT, 0, 3, 0)) == "0W3g0"


def test_text_of_a_small_2bw() -> None:
    """Two stages, two microbatches: groups 0 and 1 read version 0, group 2 reads what update 0 made."""
    last_rank = to_text(build("2bw", 2, 2, 3)).splitlines()[2]
    assert last_rank == (
        "1F0g0v0 1B0g0v0 1F1g0v0 1B1g0v0 1Ug0v1 "
        "1F0g1v0 1B0g1v0 1F1g1v0 1B1g1v0 1Ug1v2 "
        "1F0g2v1 1B0g2v1 1F1g2v1 1B1g2v1 1Ug2v3"
    )


def test_alias_is_the_same_schedule() -> None:
    for alias, name in ALIASES.items():
        assert build(alias, 4, 8, 2) == build(name, 4, 8, 2)
        assert build(alias, 4, 8, 2).name == name


@pytest.mark.parametrize(
    ("arguments", "options", "words"),
    [
        (("pipedream_2bw", 4, 3), {}, ["at least as many microbatches", "3 < 4"]),
        (("2bw", 4, 8), {"in_flight": 3}, ["3 microbatches in flight", "from 4", "to 9"]),
        (("2bw", 4, 8), {"in_flight": 10}, ["10 microbatches in flight", "to 9"]),
        (("1f1b", 0, 8), {}, ["stages", "at least 1", "0"]),
        (("1f1b", -2, 8), {}, ["stages", "-2"]),
        (("1f1b", 4, 0), {}, ["microbatches", "0"]),
        (("1f1b", 4, 8, 0), {}, ["groups", "0"]),
        (("1f1b", 4, 2.5), {}, ["microbatches", "2.5"]),
        (("1f1b", True, 8), {}, ["stages", "True"]),
        (("1fb1", 4, 8), {}, ["no schedule '1fb1'", "Did you mean '1f1b'"]),
        (("xyz", 4, 8), {}, ["no schedule 'xyz'", "Choose from", "zbv"]),
        (("1f1b", 4, 8), {"in_flight": 5}, ["'1f1b' does not take 'in_flight'", "pipedream_2bw"]),
        (("1f1b", 4, 8), {"wings": 5}, ["does not take 'wings'", "no schedule does"]),
        (("interleaved_1f1b", 4, 8), {"chunks": 1}, ["2 chunks", "use 1f1b"]),
        (("interleaved_1f1b", 4, 9), {}, ["9 microbatches", "multiple of 4"]),
        (("dualpipev", 4, 7), {}, ["dualpipev", "7", "8 or more"]),
        (("paci", 4, 8), {"every": 0}, ["every", "0"]),
    ],
)
def test_bad_numbers_are_user_errors(arguments, options, words) -> None:
    with pytest.raises(UserError) as caught:
        build(*arguments, **options)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "0F0 0B0",
        "# slipstream schedule name=x stages=1",
        "# slipstream schedule name=x stages=a microbatches=1 groups=1 chunks=1 weights=newest synchronous=1",
        to_text(build("1f1b", 1, 1)).replace("0F0g0v0", "0X0g0"),
        to_text(build("1f1b", 1, 1)).replace("0F0g0v0", "0Fg0"),
        to_text(build("1f1b", 1, 1)).replace("0Ug0v1", "0U0g0v1"),
    ],
)
def test_bad_text_is_a_user_error(text: str) -> None:
    with pytest.raises(UserError):
        from_text(text)


@pytest.mark.parametrize("text", ["", ",,\n", "0F0,hello\n", "0SEND_F0\n", "0F0,2B0\n1F0\n"])
def test_bad_csv_is_a_user_error(text: str) -> None:
    with pytest.raises(UserError):
        from_csv(text)


def test_an_asynchronous_schedule_has_no_csv_form() -> None:
    with pytest.raises(UserError, match="never flushes"):
        to_csv(build("2bw", 2, 2, 2))
