"""Ranks that are lost and come back: the run goes on with what there is, and its weights are those of a quiet run."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import suppress

import pytest
from tests.train.conftest import Runs, assert_equal_weights

from slipstream.config import Config
from slipstream.distributed import RankPool
from slipstream.distributed.launch import Stop
from slipstream.errors import ConfigError, LostRankError, UserError
from slipstream.train import claim
from slipstream.train.elastic import Places, feasible, fitted, supervise

STEPS = ["train.steps=60", "checkpoint.every=5"]


@pytest.fixture(scope="module")
def quiet(tmp_path_factory, data, pool) -> Runs:
    made = Runs(tmp_path_factory.mktemp("quiet"), data, pool)
    made.train("run", "pipeline.schedule=emulate", *STEPS)
    return made


class Killer:
    """Kills the process of a place as soon as it is seen, once or for as long as the place is to be down."""

    def __init__(self, runs: Runs, pool: RankPool, place: int, *, at_step: int, times: int | None) -> None:
        self._runs, self._pool, self._place = runs, pool, place
        self._at_step, self._times = at_step, times
        self.killed: set[int] = set()
        self.mend = threading.Event()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True)

    def _work(self) -> None:
        while not (self._over.wait(0.01) or self.mend.is_set()):
            if not self.killed and max(self._runs.steps("run"), default=0) < self._at_step:
                continue
            if self._times is not None and len(self.killed) >= self._times:
                return
            worker = self._pool._workers.get(self._place)
            if worker is not None and worker.pid not in self.killed:
                self.killed.add(worker.pid)
                with suppress(ProcessLookupError):  # it may have ended by itself since
                    os.kill(worker.pid, signal.SIGKILL)

    def __enter__(self) -> Killer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


def stages_by_start(runs: Runs) -> list[int]:
    return [event["stages"] for event in runs.events("run", "start")]


def test_the_launcher_starts_a_lost_rank_again(runs, quiet, quick):
    said: list[str] = []
    config = runs.config("run", "pipeline.stages=2", "train.restarts=1", *STEPS)
    with RankPool(2) as pool, Killer(runs, pool, 1, at_step=12, times=1):
        assert supervise(pool, Stop(), config, "", said.append) == "finished"
    assert stages_by_start(runs) == [2, 2]
    assert said[0].startswith("Rank 1 was killed by SIGKILL before it finished.")
    assert said[1].startswith("Starting again from step ")
    assert runs.steps("run") == list(range(1, 61))
    assert_equal_weights(runs.weights("run"), quiet.weights("run"))


def test_a_run_shrinks_and_grows(runs, quiet, quick):
    """Place 1 is down for a while: one stage goes on from the newest state, and two when the place is back."""
    said: list[str] = []
    wanted = ["pipeline.stages=2", "pipeline.elastic=true", "pipeline.return_seconds=0.2", *STEPS]
    config = runs.config("run", *wanted)

    def mend_later(killer: Killer) -> None:
        while len(stages_by_start(runs)) < 2 or max(runs.steps("run"), default=0) < 25:
            if killer._over.wait(0.01):
                return
        killer.mend.set()

    with RankPool(2) as pool, Killer(runs, pool, 1, at_step=12, times=None) as killer:
        thread = threading.Thread(target=mend_later, args=(killer,), daemon=True)
        thread.start()
        assert supervise(pool, Stop(), config, "", said.append) == "finished"
    thread.join()
    starts = stages_by_start(runs)
    assert starts[:2] == [2, 1], said
    assert killer.mend.is_set()
    # A process of the place may live until the killer sees it: long enough to be taken for back, and lost again.
    assert starts[-1] == 2, said
    assert any("goes on with 2 stages" in words for words in said)
    assert runs.steps("run") == list(range(1, 61))
    assert_equal_weights(runs.weights("run"), quiet.weights("run"))
    assert "stages = 2" in (runs.folder / "run" / "config.toml").read_text()  # as it was asked for


def test_what_is_left_goes_on_from_memory(runs, quiet, quick):
    """Nothing is on disk before the end."""
    wanted = ["pipeline.stages=2", "pipeline.elastic=true", "train.restarts=8", "train.steps=60"]
    config = runs.config("run", *wanted, "checkpoint.every=0", "checkpoint.memory_every=1")
    with RankPool(2) as pool, Killer(runs, pool, 1, at_step=12, times=None):
        assert supervise(pool, Stop(), config, "", print) == "finished"
    assert stages_by_start(runs)[-1] == 1
    assert all(event["step"] >= 6 for event in runs.events("run", "start")[1:])
    assert_equal_weights(runs.weights("run"), quiet.weights("run"))
    assert not claim.memory_of(runs.folder / "run").exists()


def test_a_run_that_gets_nowhere_is_given_up(runs, quick):
    said: list[str] = []
    config = runs.config("run", "pipeline.stages=2", "train.restarts=2", "checkpoint.every=0")
    with (
        RankPool(2) as pool,
        Killer(runs, pool, 1, at_step=0, times=None),
        pytest.raises(UserError, match=r"Given up: 2 restarts from the beginning did not get to a newer"),
    ):
        supervise(pool, Stop(), config, "", said.append)


def test_a_person_who_stops_a_run_is_not_contradicted(runs, quick):
    stop = Stop()
    stop.asked.set()
    config = runs.config("run", "pipeline.stages=2", "train.restarts=3")
    with RankPool(2) as pool, Killer(runs, pool, 1, at_step=0, times=1), pytest.raises(LostRankError):
        supervise(pool, stop, config, "", print)


def test_without_restarts_a_lost_rank_ends_the_run(runs, quick):
    config = runs.config("run", "pipeline.stages=2")
    with RankPool(2) as pool, Killer(runs, pool, 1, at_step=0, times=1), pytest.raises(LostRankError):
        supervise(pool, Stop(), config, "", print)


def test_a_place_is_out_when_nothing_comes_up_or_it_fails_again():
    places = Places(3)
    places.lost([1], lambda place: True)
    assert places.up == [0, 1, 2]
    places.lost([1], lambda place: True)
    assert places.out == [1]
    places.back(1)
    places.lost([2], lambda place: False)
    assert places.up == [0, 1]
    places.progressed()
    places.lost([1], lambda place: True)
    assert places.up == [0, 1]


def elastic_config(runs: Runs, *overrides: str) -> Config:
    return runs.config("x", "pipeline.stages=4", "pipeline.elastic=true", *overrides)


def test_the_stages_fit_the_ranks_that_are_there(runs):
    """Of torchrun's ranks as of our own; ranks that do not fill a stage are spare."""
    config = elastic_config(runs)
    assert feasible(config, 4) == [1, 2, 3, 4]
    assert [fitted(config, ranks).pipeline.stages for ranks in (1, 2, 3, 4, 9)] == [1, 2, 3, 4, 4]
    pairs = elastic_config(runs, "pipeline.data_ranks=2", "pipeline.least_stages=2")
    assert [fitted(pairs, ranks).ranks for ranks in (4, 5, 6, 8)] == [4, 4, 6, 8]
    with pytest.raises(UserError, match=r"3 ranks are left.*least_stages = 2"):
        fitted(pairs, 3)
    zbv = elastic_config(runs, "pipeline.schedule=interleaved_1f1b", "pipeline.stages=2")
    assert feasible(zbv, 2) == [1, 2]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["pipeline.elastic=true", "pipeline.schedule=emulate"], "runs in one process"),
        (["train.restarts=2", "pipeline.schedule=emulate"], "runs in one process"),
        (["pipeline.elastic=true", "pipeline.boundaries=[2]"], "pipeline.boundaries"),
        (["pipeline.elastic=true", "train.restarts=0"], "train.restarts = 0"),
        (
            ["pipeline.elastic=true", "pipeline.least_stages=3", "pipeline.stages=2"],
            "more than pipeline.stages",
        ),
        (["pipeline.least_stages=2", "pipeline.stages=2"], "without pipeline.elastic"),
    ],
)
def test_what_cannot_take_effect_is_refused(runs, overrides, words):
    with pytest.raises(ConfigError, match=words):
        runs.config("x", *overrides)
