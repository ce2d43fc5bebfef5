"""The terminal view: one frame of runs in every state, and following a run to its end."""

from __future__ import annotations

import io
import json
import random
import threading
import time

import pytest
from rich.console import Console

from slipstream.errors import UserError
from slipstream.metrics.events import read_run
from slipstream.metrics.watch import QUIET_SECONDS, frame, sparkline, watch

from .conftest import step_event


def shown(folder, now: float | None = None, width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    run = read_run(folder)
    console.print(frame(run, 200, width, 1e9 + 200 if now is None else now))
    return console.file.getvalue()


def test_a_frame_shows_progress_curves_and_stages(make_run):
    text = shown(make_run(steps=100, finish=False))
    for word in ("running", "step 100 / 200", "loss", "tokens / s", "stage 2", "90.0% busy", "256 MiB"):
        assert word in text
    assert "1 min 40 s left" in text


def test_time_left_and_so_far_leave_out_the_time_a_run_was_down(make_run):
    later = [step_event(step, random.Random(0), time=2e9 + step) for step in range(101, 111)]
    folder = make_run(
        steps=100, finish=False, extra=[{"event": "start", "time": 2e9 + 100, "step": 100}, *later]
    )
    text = " ".join(shown(folder, now=2e9 + 110).split())
    assert "step 110 / 200 1 min 50 s so far, 1 min 30 s left" in text


def test_a_silent_job_is_called_silent(make_run):
    folder = make_run(steps=10, finish=False)
    assert "may have been killed" not in shown(folder, now=1e9 + 11)
    assert "may have been killed" in shown(folder, now=1e9 + 11 + QUIET_SECONDS)


def test_an_empty_run_and_a_failed_one(make_run):
    assert "No step" in shown(make_run("empty", steps=0, finish=False))
    failed = make_run(
        "bad", steps=3, finish=False, extra=[{"event": "error", "step": 3, "message": "stage 1 died"}]
    )
    assert "failed" in shown(failed)
    assert "stage 1 died" in shown(failed)


def test_escape_sequences_in_a_sample_are_not_sent_to_the_terminal(make_run):
    sample = {"event": "sample", "step": 1, "prompt": "[bold]x", "text": "\x1b]0;owned\x07"}
    text = shown(make_run(extra=[sample]))
    assert "\x1b" not in text
    assert "[bold]x" in text


@pytest.mark.parametrize(("values", "picture"), [([0, 1, 2], "▁▅█"), ([3, 3], "▁▁"), ([0, 0, 4, 4], "▁█")])
def test_sparkline(values, picture):
    assert sparkline([float(value) for value in values], 3 if len(values) == 3 else 2) == picture


def test_watch_follows_until_the_run_finishes(make_run):
    folder = make_run(steps=5, finish=False)

    def end() -> None:
        time.sleep(0.3)
        with (folder / "events.jsonl").open("a") as stream:
            stream.write(json.dumps({"event": "finish", "step": 5, "seconds": 1.0}) + "\n")

    console = Console(file=io.StringIO(), width=80)
    writer = threading.Thread(target=end, daemon=True)
    writer.start()
    watch(folder, console, interval=0.05)
    writer.join()
    assert "finished" in console.file.getvalue()


@pytest.mark.parametrize("interval", [-1.0, 0.0, float("nan"), float("inf")])
def test_an_interval_that_is_none_is_named(make_run, interval):
    with pytest.raises(UserError, match="--interval"):
        watch(make_run(steps=2, finish=False), Console(file=io.StringIO()), interval=interval)
