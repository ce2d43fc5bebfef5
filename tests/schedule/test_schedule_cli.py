"""`slipstream schedule` as a person types it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slipstream.cli import main
from slipstream.schedule.generate import GENERATORS

FIELDS = [
    "name",
    "stages",
    "microbatches",
    "time_per_update",
    "bubble_fraction",
    "peak_activations",
    "banks",
    "delay",
]


def run(*arguments: str) -> int:
    """The exit status of one command line."""
    with pytest.raises(SystemExit) as caught:
        main(["schedule", *arguments])
    return int(caught.value.code or 0)


def test_json_is_a_list_of_steady_figures(capsys) -> None:
    assert run("1f1b", "--stages", "4", "--microbatches", "8", "--compare", "2bw,zbv", "--json") == 0
    flushed, async_, zbv = json.loads(capsys.readouterr().out)
    assert list(flushed) == FIELDS
    assert (flushed["name"], async_["name"], zbv["name"]) == ("1f1b", "pipedream_2bw", "zbv")
    assert flushed["time_per_update"] == pytest.approx(33)
    assert flushed["bubble_fraction"] == pytest.approx(3 / 11)
    assert flushed["peak_activations"] == [4, 3, 2, 1]
    assert (async_["time_per_update"], async_["bubble_fraction"]) == pytest.approx((24, 0))
    assert (async_["banks"], async_["delay"]) == ([2] * 4, [1] * 4)
    assert zbv["bubble_fraction"] == pytest.approx(3 / 51)


@pytest.mark.parametrize("name", [*GENERATORS, "2bw"])
def test_every_schedule_prints_a_picture_and_a_table(name: str, capsys) -> None:
    assert run(name, "--stages", "2", "--microbatches", "4", "--groups", "2") == 0
    out = capsys.readouterr().out
    assert "Steady state" in out
    assert "F0" in out or "F" in out.splitlines()[1]
    assert "idle" in out


def test_json_is_per_m_microbatches_and_independent_of_groups(capsys) -> None:
    """PipeDream steps at every microbatch, yet its time is per m like everyone's."""
    figures = []
    for groups in ("1", "5"):
        assert run("pipedream", "--microbatches", "6", "--groups", groups, "--update", "1", "--json") == 0
        figures.append(json.loads(capsys.readouterr().out)[0])
    assert figures[0] == figures[1]
    assert figures[0]["time_per_update"] == pytest.approx(6 * (3 + 1))
    assert figures[0]["delay"] == [3, 2, 1, 0]


def test_costs_per_stage_and_latency(capsys) -> None:
    assert run("2bw", "--forward", "1,1,2,1", "--link", "0", "--json") == 0
    assert json.loads(capsys.readouterr().out)[0]["time_per_update"] == pytest.approx(8 * 4)
    assert run("2bw", "--link", "0.1", "--json") == 0
    shallow = json.loads(capsys.readouterr().out)[0]
    assert run("2bw", "--link", "0.1", "--in-flight", "7", "--json") == 0
    deep = json.loads(capsys.readouterr().out)[0]
    assert deep["time_per_update"] < shallow["time_per_update"]
    assert deep["peak_activations"] == [7, 5, 3, 1]


def test_options_go_to_the_schedules_that_know_them(capsys) -> None:
    arguments = (
        "2bw",
        "--compare",
        "interleaved_1f1b,paci",
        "--in-flight",
        "6",
        "--chunks",
        "4",
        "--every",
        "2",
    )
    assert run(*arguments, "--json") == 0
    assert [entry["name"] for entry in json.loads(capsys.readouterr().out)] == [
        "pipedream_2bw",
        "interleaved_1f1b",
        "paci",
    ]


def test_files(tmp_path: Path, capsys) -> None:
    html, svg, csv, trace = (tmp_path / name for name in ("a.html", "b.svg", "c.csv", "d.json"))
    assert run("1f1b", "--plot", str(html), "--csv", str(csv), "--trace", str(trace)) == 0
    assert f"Wrote {html}" in capsys.readouterr().out
    assert run("1f1b", "--plot", str(svg), "--json") == 0
    json.loads(capsys.readouterr().out)
    assert csv.read_text().startswith("0F0,0F1,0F2,0F3,0B0,0F4")
    assert len(csv.read_text().splitlines()) == 4
    assert svg.read_text().startswith("<svg")
    assert "<html" in html.read_text()[:200]
    assert html.stat().st_size < 200_000
    assert json.loads(trace.read_text())["traceEvents"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["1fb1"], ["no schedule '1fb1'", "1f1b"]),
        (["1f1b", "--compare", "2bq"], ["no schedule '2bq'", "2bw"]),
        (["2bw", "--microbatches", "3"], ["3 < 4"]),
        (["1f1b", "--stages", "0"], ["stages", "0"]),
        (["1f1b", "--groups", "0"], ["groups", "0"]),
        (["1f1b", "--groups", "1000000000"], ["more than a picture shows", "Lower --groups"]),
        (["1f1b", "--forward", "-1"], ["forward", "0 or more"]),
        (["1f1b", "--forward", "x"], ["--forward", "'x'"]),
        (["1f1b", "--forward", "1,2"], ["2 values of forward", "4 stages"]),
        (["1f1b", "--link", "1,2"], ["2 latencies", "3 links"]),
        (["1f1b", "--update", "nan"], ["update", "nan"]),
        (["1f1b", "--in-flight", "5"], ["--in-flight", "pipedream_2bw"]),
        (["2bw", "--in-flight", "2"], ["2 microbatches in flight"]),
        (["2bw", "--cutover", "-1"], ["A cutover of -1", "from 0", "to 8"]),
        (["2bw", "--cutover", "9"], ["A cutover of 9", "to 8"]),
        (["2bw", "--every", "2"], ["--every", "paci"]),
        (["interleaved_1f1b", "--microbatches", "9"], ["multiple of 4"]),
        (["2bw", "--csv", "x.csv"], ["never flushes"]),
        (["1f1b", "--plot", "picture.png"], ["picture.png", ".html or .svg"]),
        (["1f1b", "--plot", "/nowhere/at/all.svg"], ["Cannot write /nowhere/at/all.svg"]),
        (["1f1b", "--csv", "/nowhere/a.csv"], ["Cannot write /nowhere/a.csv"]),
        (["1f1b", "--trace", "/"], ["Cannot write /"]),
    ],
)
def test_mistakes_exit_with_2_and_no_traceback(arguments, words, capsys, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(*arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Traceback" not in captured.err
    text = captured.err.replace("\n", " ")
    for word in words:
        assert word in text


def test_no_name_is_a_usage_error(capsys) -> None:
    assert run() == 2
    assert "NAME" in capsys.readouterr().err
