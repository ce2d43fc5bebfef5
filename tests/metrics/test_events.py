"""The one reader: truncated, crashed, empty and resumed runs."""

from __future__ import annotations

import json
import random

import pytest

from slipstream.errors import UserError
from slipstream.metrics.events import Follower, Run, read_run
from slipstream.metrics.record import cut_back

from .conftest import step_event


def test_a_finished_run_is_read_whole(make_run):
    run = read_run(make_run(steps=50))
    assert run.status == "finished"
    assert run.unreadable == 0
    assert run.series("step", "loss")[0] == [float(step) for step in range(1, 51)]
    assert run.environment["data"] == {"hash": "ab"}


def test_a_line_cut_off_by_a_crash_is_counted_and_the_rest_kept(make_run):
    folder = make_run(steps=50, finish=False)
    path = folder / "events.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:30]) + lines[30][:25])
    run = read_run(folder)
    assert (len(run.events), run.unreadable, run.status) == (30, 1, "running")


def test_lines_that_are_json_but_no_event_are_counted(make_run):
    folder = make_run(steps=1)
    with (folder / "events.jsonl").open("a") as stream:
        stream.write('[1, 2]\n{"step": 3}\n"text"\n\n')
    assert read_run(folder).unreadable == 3


def test_steps_replayed_after_a_resume_replace_those_of_the_lost_trajectory(make_run):
    rng = random.Random(1)
    start = {"event": "start", "time": 0, "step": 6, "resumed": True}
    folder = make_run(steps=10, finish=False, extra=[start, step_event(7, rng, loss=-7.0)])
    steps, losses = read_run(folder).series("step", "loss")
    assert steps == [1, 2, 3, 4, 5, 6, 7]
    assert losses[-1] == -7.0


@pytest.mark.parametrize(
    ("last", "status"), [("error", "failed"), ("finish", "finished"), ("step", "running"), (None, "empty")]
)
def test_status_is_the_last_word(tmp_path, last, status):
    events = ({"event": "start", "step": 0}, {"event": last, "step": 1}) if last else ()
    assert Run(tmp_path, events).status == status


def test_a_resume_after_a_failure_is_running(tmp_path):
    assert Run(tmp_path, ({"event": "error"}, {"event": "start", "step": 0})).status == "running"


def test_values_that_are_no_finite_number_are_no_points(tmp_path):
    odd = [float("nan"), float("inf"), "3", None, True, [1]]
    events = tuple({"event": "step", "step": n, "loss": value} for n, value in enumerate([1.5, *odd]))
    assert Run(tmp_path, events).series("step", "loss") == ([0.0], [1.5])


def test_the_clock_of_a_run_stands_still_while_it_is_down(tmp_path):
    words = (
        ("start", 0, 100.0),
        ("step", 1, 103.0),
        ("step", 2, 104.0),
        ("start", 2, 9000.0),
        ("step", 3, 9002.5),
    )
    events = tuple({"event": kind, "step": step, "time": time} for kind, step, time in words)
    run = Run(tmp_path, (*events, {"event": "note"}))
    assert [run.clock().get(id(event)) for event in run.events] == [0.0, 3.0, 4.0, 4.0, 6.5, None]


def test_a_folder_that_is_no_run_names_the_runs_inside_it(make_run):
    folder = make_run("mine")
    with pytest.raises(UserError, match="mine"):
        read_run(folder.parent)
    with pytest.raises(UserError, match="no run folder"):
        read_run(folder / "nowhere")


def test_follower_waits_for_the_end_of_a_half_written_line(tmp_path):
    follower = Follower(tmp_path)
    assert follower.poll() == []
    line = json.dumps({"event": "step", "step": 1, "message": "ä"}, ensure_ascii=False).encode() + b"\n"
    path = tmp_path / "events.jsonl"
    path.write_bytes(line + line[:-4])
    assert len(follower.poll()) == 1
    with path.open("ab") as stream:
        stream.write(line[-4:])
    assert [event["message"] for event in follower.poll()] == ["ä"]
    assert follower.poll() == []


def test_follower_reads_anew_what_a_resumed_run_puts_in_the_place_of_its_log(make_run):
    folder = make_run(steps=100, finish=False)
    follower = Follower(folder)
    follower.poll()
    cut_back(folder, 40)
    with (folder / "events.jsonl").open("a") as stream:
        for event in ({"event": "start", "step": 40}, {"event": "step", "step": 41, "loss": 7.0}):
            stream.write(json.dumps(event) + "\n")
    follower.poll()
    assert follower.events == list(read_run(folder).events)
    assert follower.events[-1]["loss"] == 7.0
