"""A rank that stands still or never comes: the others give up in time, and somebody says which rank it was."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module

import pytest
from tests.train.conftest import Runs

from slipstream.distributed import RankPool
from slipstream.errors import StageError

ENDLESS = ["train.steps=100000", "optim.schedule=constant", "optim.warmup=0", "checkpoint.every=10"]


@contextmanager
def stopped_when_training(runs: Runs, rank: int) -> Iterator[None]:
    """Stop the process of `rank` once the run has come to step 5."""
    over = threading.Event()

    def stop() -> None:
        while not over.wait(0.02):
            if max(runs.steps("run"), default=0) >= 5:
                os.kill(runs.pool._workers[rank].pid, signal.SIGSTOP)
                return

    thread = threading.Thread(target=stop, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@pytest.mark.parametrize(
    ("rank", "layout"),
    [
        (0, ("pipeline.stages=1", "pipeline.data_ranks=2")),
        (1, ("pipeline.stages=2",)),
    ],
)
def test_a_stopped_rank_is_named_by_the_others(runs, quick, rank, layout):
    """With one stage and two data ranks, rank 1 asked rank 0's store for a loss, for ever."""
    with stopped_when_training(runs, rank), pytest.raises(StageError) as told:
        runs.train("run", *layout, *ENDLESS, "train.timeout_seconds=10")
    launcher, _, other = str(told.value).partition("\n")
    assert re.fullmatch(rf"Rank {rank} \(process \d+\) is stopped \(SIGSTOP\) and was ended\.", launcher)
    assert re.search(rf"[Rr]ank {rank}\b.*10 s", other), other
    assert "gloo" not in other


def test_a_single_stopped_rank_is_noticed(runs, quick, capfd, monkeypatch):
    """Nobody else waits for it: the launcher misses its beat, says so, and ends it after the timeout."""
    answers = import_module("slipstream.distributed.answers")
    monkeypatch.setattr(answers, "NOTICE_SECONDS", 1.0)
    config = runs.config("run", "pipeline.stages=1", *ENDLESS)
    with (
        stopped_when_training(runs, 0),
        pytest.raises(StageError, match=r"Rank 0 \(process \d+\).* is stopped"),
    ):
        runs.pool.run("slipstream.train.session:run_rank", config.model_dump(), ranks=1, patience_seconds=3.0)
    told = capfd.readouterr().err
    assert "kill -CONT" in told, told


def test_a_rank_that_was_stopped_for_a_moment_goes_on(runs, capfd, monkeypatch):
    answers = import_module("slipstream.distributed.answers")
    monkeypatch.setattr(answers, "NOTICE_SECONDS", 1.0)
    pid = 0

    def stop() -> None:
        nonlocal pid
        while max(runs.steps("run"), default=0) < 5:
            time.sleep(0.02)
        pid = runs.pool._workers[0].pid
        os.kill(pid, signal.SIGSTOP)
        time.sleep(3.0)
        os.kill(pid, signal.SIGCONT)

    thread = threading.Thread(target=stop, daemon=True)
    thread.start()
    config = runs.config("run", "pipeline.stages=1", "train.steps=60")
    found = runs.pool.run(
        "slipstream.train.session:run_rank", config.model_dump(), ranks=1, patience_seconds=120.0
    )
    thread.join()
    assert found[0]["reason"] == "finished"
    assert "Rank 0 is heard again" in capfd.readouterr().err


def test_a_rank_that_never_comes_is_waited_for_as_long_as_the_run_says(quick):
    """The ranks met under a timeout of their own, of five minutes."""
    with RankPool(2) as pool:
        pool.run("distributed.jobs:total", 1)
        os.kill(pool._workers[1].pid, signal.SIGSTOP)
        with pytest.raises(StageError, match=r"Rank 0 waited for rank 1 at the start: no answer .*\(2 s\)"):
            pool.run("distributed.jobs:total", 1, patience_seconds=2.0, timeout=100)
