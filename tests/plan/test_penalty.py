"""The token penalty as a function of how much of an update is old."""

from __future__ import annotations

from dataclasses import replace

import pytest

from slipstream.errors import UserError
from slipstream.plan.penalty import Penalty, find_penalty, load_penalties, penalty_at, write_penalties

WHOLE = Penalty("muon", "error_feedback", 1.08, 16384, 42e6)
HALF = replace(WHOLE, penalty=1.05, old=0.5)
ELSEWHERE = replace(WHOLE, penalty=1.5, old=0.25, parameters=8e6)


def test_between_measured_points_the_penalty_is_linear_and_1_where_nothing_is_old():
    table = (HALF, ELSEWHERE, WHOLE)
    found = [penalty_at(table, WHOLE, old) for old in (0, 0.25, 0.5, 0.75, 1)]
    assert found == pytest.approx([1, 1.025, 1.05, 1.065, 1.08])
    assert penalty_at((WHOLE,), WHOLE, 0.5) == pytest.approx(1.04), (
        "in proportion where nothing else is known"
    )


def test_an_entry_is_looked_for_among_whole_updates():
    assert find_penalty((HALF, WHOLE), "muon", "error_feedback", 16384, 42e6) == WHOLE
    with pytest.raises(UserError, match="has no entry for muon"):
        find_penalty((HALF,), "muon", "error_feedback", 16384, 42e6)


def test_the_packages_table_has_the_curve():
    table = load_penalties()
    whole = find_penalty(table, "muon", "error_feedback", 16384, 42e6)
    curve = [penalty_at(table, whole, old) for old in (0.25, 0.34, 0.5, 1)]
    assert curve == sorted(curve)
    assert curve[2] - 1 < 0.6 * (curve[3] - 1)


def test_an_old_part_is_written_and_replaces_its_like_alone(tmp_path):
    path = tmp_path / "penalty.json"
    write_penalties(path, [WHOLE, HALF])
    assert write_penalties(path, [replace(HALF, penalty=1.04)]) == [HALF]
    assert set(load_penalties(path)) == {WHOLE, replace(HALF, penalty=1.04)}
    with pytest.raises(UserError, match=r"old 1\.5"):
        replace(WHOLE, old=1.5)
