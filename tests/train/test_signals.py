"""A stop may be asked for at any moment, of any rank or of the command: the run saves, ends well, and goes on later."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from tests.train.conftest import Runs, assert_equal_weights

import warm

OPTIONS: dict[str, Any] = {
    "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True,
    "env": {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
}  # fmt: skip
SETTINGS = ["train.steps=60", "train.eval_every=15", "health.hash_every=5"]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, data, pool) -> Runs:
    made = Runs(tmp_path_factory.mktemp("undisturbed"), data, pool)
    made.train("run", "pipeline.schedule=emulate", *SETTINGS)
    return made


def assert_same_run(runs: Runs, undisturbed: Runs) -> None:
    assert_equal_weights(runs.weights("run"), undisturbed.weights("run"))
    assert runs.steps("run") == list(range(1, 61))


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 9))])
def test_at_any_moment_on_any_rank(runs, undisturbed, seed):
    """While ranks meet, build, load, train, validate, save or close: they stop at one step, and exit well."""
    chance = random.Random(seed)
    stops, most = [], 12 if seed else 5  # seed 0 is the one of the default run
    for attempt in range(most + 1):
        over = threading.Event()
        delay = chance.random() * 1.5
        who = chance.choice([[0], [1], [0, 1]])

        def ask(over=over, delay=delay, who=who, attempt=attempt) -> None:
            if attempt < most and not over.wait(delay):
                for index in who:
                    os.kill(runs.pool._workers[index].pid, signal.SIGTERM)

        thread = threading.Thread(target=ask, daemon=True)
        thread.start()
        try:
            every = f"checkpoint.every={chance.choice([0, 10])}"
            outcome = runs.train("run", "pipeline.stages=2", *SETTINGS, every)
        finally:
            over.set()
            thread.join()
        if outcome["reason"] == "finished":
            break
        assert outcome["reason"] == "signal"
        stops.append(outcome["step"])
    assert stops == sorted(stops)
    assert_same_run(runs, undisturbed)


def command(runs: Runs, *overrides: str) -> list[str]:
    paths = [f"run.dir={runs.folder / 'run'}", f"data.path={runs.data}"]
    from tests.train.conftest import TINY

    settings = [*SETTINGS, "checkpoint.every=0", "pipeline.stages=2", "pipeline.cutover=2"]
    arguments = [*TINY, *settings, *paths, *overrides]
    return [sys.executable, "-m", "slipstream", "train", *arguments]


def started(runs: Runs, *overrides: str) -> subprocess.Popen:
    """As a user's command, in a fresh interpreter."""
    return subprocess.Popen(command(runs, *overrides), **OPTIONS, process_group=0)


def started_warm(runs: Runs, *overrides: str) -> subprocess.Popen:
    """Sooner under way, which is all that most tests need."""
    return import_module("slipstream.distributed.launch").subprocess.Popen(
        command(runs, *overrides), **OPTIONS
    )


def ended(process: subprocess.Popen) -> tuple[int, str]:
    output, _ = process.communicate(timeout=250)
    return process.returncode, output


def test_a_command_that_is_still_starting_its_workers(runs, undisturbed):
    process = started(runs)
    deadline = time.monotonic() + 120
    while not warm.children(process.pid) and time.monotonic() < deadline:
        time.sleep(0.005)
    process.send_signal(signal.SIGTERM)  # the first worker has just been born; the second has not
    code, output = ended(process)
    assert code == 75, output
    assert re.search(r"Stopped at step \d+, saved\. The same command resumes it\.", output), output
    assert runs.train("run", "pipeline.stages=2", *SETTINGS)["reason"] == "finished"
    assert_same_run(runs, undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize("delay", [0.5 * k for k in range(1, 15)])
@pytest.mark.parametrize("kind", ["SIGTERM", "Ctrl-C"])
def test_the_command_at_any_moment(runs, undisturbed, delay, kind):
    """Ctrl-C reaches every process of the terminal's group; SIGTERM the command alone."""
    process = started(runs)
    time.sleep(delay)
    if process.poll() is None:
        if kind == "Ctrl-C":
            os.killpg(process.pid, signal.SIGINT)
        else:
            process.send_signal(signal.SIGTERM)
    code, output = ended(process)
    began = (runs.folder / "run" / "config.toml").exists()
    assert code in (0, 75) or not began, output  # before there is a run, the command simply dies
    assert "Traceback" not in output or not began, output
    assert runs.train("run", "pipeline.stages=2", *SETTINGS)["reason"] == "finished"
    assert_same_run(runs, undisturbed)


@pytest.mark.parametrize("kind", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("schedule", ["emulate", "2bw"])
def test_what_comes_after_the_end_of_a_run_changes_nothing(runs, schedule, kind):
    """A command takes some tenths of a second to leave, and a finished run ended with 130 or -15 in them."""
    stages = [] if schedule == "2bw" else ["pipeline.stages="]
    process = started_warm(
        runs, f"pipeline.schedule={schedule}", *stages, "train.steps=3", "health.hash_every=0"
    )
    assert_finishes_under(process, kind)


def test_nor_where_a_script_has_put_it_into_the_background(runs):
    """Shells have such a command ignore Ctrl-C; it took itself for no command, and ended with -15."""
    settings = ["pipeline.schedule=emulate", "pipeline.stages=", "train.steps=3", "health.hash_every=0"]
    ignoring = ["sh", "-c", 'trap "" INT; exec "$@"', "sh"]
    process = subprocess.Popen([*ignoring, *command(runs, *settings)], **OPTIONS)
    assert_finishes_under(process, signal.SIGTERM)


def assert_finishes_under(process, kind):
    assert process.stdout is not None
    said = []
    for line in process.stdout:
        said.append(line)
        if "Everything the run wrote" in line:
            break
    while process.poll() is None:
        process.send_signal(kind)
        time.sleep(0.02)
    output = "".join(said) + process.stdout.read()
    assert process.returncode == 0, output
    assert "Stopped at once" not in output
    assert "Traceback" not in output


ENDLESS = ["train.steps=100000", "checkpoint.every=10", "optim.schedule=constant", "optim.warmup=0"]


def wait_for_step(runs: Runs, step: int) -> None:
    deadline = time.monotonic() + 120
    while max(runs.steps("run"), default=0) < step and time.monotonic() < deadline:
        time.sleep(0.1)


@pytest.mark.parametrize("kind", [signal.SIGUSR1, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_a_stop_is_answered_though_a_rank_was_stopped(runs, kind):
    """SIGTERM, or the SIGUSR1 of a batch system: a rank that a SIGSTOP holds is let go on, and the run saves."""
    process = started_warm(runs, *ENDLESS)
    wait_for_step(runs, 5)
    held = warm.children(process.pid)[0]
    os.kill(held, signal.SIGSTOP)
    while Path(f"/proc/{held}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        time.sleep(0.01)
    process.send_signal(kind)
    code, output = ended(process)
    assert code == 75, output
    assert f"Process {held} was stopped (SIGSTOP): it is let go on, to save." in output
    assert re.search(r"Stopped at step \d+, saved\.", output), output


def test_a_second_signal_kills(runs, undisturbed):
    # It cannot answer the first one.
    process = started_warm(runs, *ENDLESS, "train.callback=tests.train.own:stall")
    wait_for_step(runs, 12)
    deadline = time.monotonic() + 240
    workers = warm.children(process.pid)

    def working() -> bool:
        return any(Path(f"/proc/{pid}").exists() for pid in workers)

    process.send_signal(signal.SIGTERM)
    time.sleep(0.3)
    process.send_signal(signal.SIGTERM)  # a key pressed twice is one request
    time.sleep(1.0)
    assert process.poll() is None
    while working() and time.monotonic() < deadline:
        process.send_signal(signal.SIGTERM)  # one that comes too soon after the first is taken for the same
        patience = (
            time.monotonic() + 20
        )  # the process may be slow; a signal after its last word would kill it
        while working() and time.monotonic() < patience:
            time.sleep(0.1)
    code, output = ended(process)
    assert code == 130
    assert "Stopping: the run finishes the updates under way, then saves." in output
    newest = max(event["step"] for event in runs.events("run", "checkpoint"))
    assert f"Stopped at once: nothing more was saved. The newest checkpoint is of step {newest}" in output
    assert "SIGKILL" not in output
    assert "Traceback" not in output
    assert len(workers) == 2
    assert not any(Path(f"/proc/{pid}").exists() for pid in workers)
