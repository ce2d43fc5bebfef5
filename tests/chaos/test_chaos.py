"""The campaign of faults: its draws are the same for the same seed, and a few of its cases are run here (slow)."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import warm
from chaos.campaign import wanted, work
from chaos.cases import NOT_POSSIBLE, draw
from chaos.faults import KINDS, STEPS
from chaos.inside import ARMS
from chaos.table import read, table


def test_a_case_can_be_drawn_again():
    for number in range(50):
        assert draw(3, number) == draw(3, number)
    assert draw(3, 0) != draw(4, 0)


def test_every_kind_and_every_layout_is_drawn():
    drawn = [draw(0, number)[0] for number in range(1000)]
    assert {case.kind for case in drawn} == {kind.name for kind in KINDS}
    assert {(case.stages, case.data_ranks) for case in drawn} == {
        (p, d) for p in (1, 2, 3, 4) for d in (1, 2)
    }


def test_every_fault_is_armed_somewhere_and_in_time():
    outside = {"early", "port"}  # done to the launcher, or before it starts
    for number in range(300):
        case, kind = draw(0, number)
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


def test_a_case_that_was_impossible_here_is_no_case_that_was_run(tmp_path):
    here, there = tmp_path / "here.jsonl", tmp_path / "there.jsonl"
    case = {"seed": 0, "kind": "link cut", "findings": [], "gone_seconds": None, "again_seconds": None}
    impossible = [case | {"number": number, "outcome": NOT_POSSIBLE} for number in (1, 2)]
    here.write_text("".join(json.dumps(one) + "\n" for one in impossible) + '{"seed": 0, "num')
    there.write_text(json.dumps(case | {"number": 2, "outcome": "equal, after a restart"}) + "\n")
    for order in ([here, there], [there, here]):
        merged = {one["number"]: one["outcome"] for one in read(order)}
        assert merged == {1: NOT_POSSIBLE, 2: "equal, after a restart"}
        assert table(read(order)).splitlines()[2].split("|")[2:8] == [" 1 ", "  ", " 1 ", "  ", "  ", " 1 "]


def given(out, **more):
    usual = {"seed": 3, "first": 0, "cases": 200, "case": None, "only": None, "each": False, "worker": None}
    return argparse.Namespace(**(usual | {"workers": 1, "out": out} | more))


def test_a_campaign_goes_on_where_it_stopped(tmp_path):
    """What is recorded is not run again, but for what was not possible there and is here."""
    out = tmp_path / "chaos.jsonl"
    drawn = {number: draw(3, number) for number in range(200)}
    needy = [number for number, (_, kind) in drawn.items() if kind.needs == "line"]
    for number in (5, *needy):
        outcome = NOT_POSSIBLE if drawn[number][1].needs == "line" else "equal, without a stop"
        with out.open("a") as file:
            file.write(json.dumps({"seed": 3, "number": number, "outcome": outcome}) + "\n")
    without = {case.number for case, _ in wanted(given(out), {"", "disk"})}
    assert without == set(range(200)) - {5, *needy}
    assert {case.number for case, _ in wanted(given(out), {"", "disk", "line"})} == set(range(200)) - {5}
    assert {case.number for case, _ in wanted(given(out, seed=4), {""})} == set(range(200))


def test_workers_have_every_case_once(tmp_path):
    shares = [wanted(given(None, workers=3, worker=number), {""}) for number in range(3)]
    assert sorted(case.number for share in shares for case, _ in share) == list(range(200))


def test_a_worker_begins_and_ends_where_there_is_no_case(monkeypatch, tmp_path):
    """With a server of its own, which is gone afterwards; that of this process, if it has one, goes on."""
    monkeypatch.setattr(warm, "_place", warm._place)
    monkeypatch.setattr(warm, "_server", None)
    assert work(given(tmp_path / "chaos.jsonl", cases=0, seconds=None, keep=False)) == []
    server = warm._server[0]
    assert server.returncode == 0
    assert not Path(f"/proc/{server.pid}").exists()


@pytest.mark.slow
def test_one_case_of_each_kind(tmp_path):
    """Two at a time; disks and links of their own only where they are possible."""
    tests, out = Path(__file__).parents[1], tmp_path / "chaos.jsonl"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, str(tests)])}
    words = [
        sys.executable,
        "-m",
        "chaos.campaign",
        "--each",
        "--cases",
        str(len(KINDS)),
        "--out",
        str(out),
        "--workers",
        "2",
    ]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=3000, check=False)
    cases = [json.loads(line) for line in out.read_text().splitlines()]
    found = {f"{case['kind']} ({case['number']})": case["findings"] for case in cases if case["findings"]}
    assert len(cases) == len(KINDS), done.stderr
    assert not found
