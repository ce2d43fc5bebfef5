"""The campaign of faults: its draws are the same for the same seed, and a few of its cases are run here (slow)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from chaos.campaign import draw, table
from chaos.faults import KINDS, STEPS
from chaos.inside import ARMS

CHEAP = [kind for kind in KINDS if not kind.needs_root]


def test_a_case_can_be_drawn_again():
    for number in range(50):
        assert draw(3, number, list(KINDS)) == draw(3, number, list(KINDS))
    assert draw(3, 0, list(KINDS)) != draw(4, 0, list(KINDS))


def test_every_kind_and_every_layout_is_drawn():
    drawn = [draw(0, number, list(KINDS))[0] for number in range(1000)]
    assert {case.kind for case in drawn} == {kind.name for kind in KINDS}
    assert {(case.stages, case.data_ranks) for case in drawn} == {
        (p, d) for p in (1, 2, 3, 4) for d in (1, 2)
    }


def test_every_fault_is_armed_somewhere_and_in_time():
    outside = {"early", "port"}  # done to the launcher, or before it starts
    for number in range(300):
        case, kind = draw(0, number, list(KINDS))
        assert case.spec["kind"] in ARMS.keys() | outside, kind.name
        assert all(rank < case.stages * case.data_ranks for rank in case.spec["ranks"])
        assert case.spec.get("step", 0) < STEPS


def test_the_table_counts_findings_apart():
    case = {
        "kind": "disk slow",
        "outcome": "equal, without a stop",
        "gone_seconds": 1.0,
        "again_seconds": None,
    }
    rows = table([case | {"findings": []}, case | {"findings": ["the weights differ"]}]).splitlines()
    assert rows[2].split("|")[2:7] == [" 2 ", " 1 ", "  ", "  ", " 1 "]


@pytest.mark.slow
def test_one_case_of_each_kind(tmp_path):
    """Those that need no root; disks and links of their own are for `make chaos`."""
    tests, out = Path(__file__).parents[1], tmp_path / "chaos.jsonl"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, str(tests)])}
    words = [sys.executable, "-m", "chaos.campaign", "--each", "--cases", str(len(KINDS)), "--out", str(out)]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=3000, check=False)
    cases = [json.loads(line) for line in out.read_text().splitlines()]
    found = {f"{case['kind']} ({case['number']})": case["findings"] for case in cases if case["findings"]}
    assert len(cases) == len(KINDS), done.stderr
    assert not found
