"""A study from its file to its tables, on the CPU, in worker processes."""

from __future__ import annotations

import errno
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from slipstream import __version__
from slipstream.cli import main
from slipstream.data.shards import write_shard
from slipstream.errors import UserError
from slipstream.metrics.events import read_run
from slipstream.study.parse import load_study
from slipstream.study.pool import Pool
from slipstream.study.results import (
    FAILED_FILE,
    Result,
    collect,
    losses,
    read_export,
    write_export,
    write_failure,
)
from slipstream.study.run import Clock, Limits, run_study, steady_seconds
from slipstream.study.show import Show
from slipstream.study.sweep import Point
from slipstream.study.worker import _run
from slipstream.train.provenance import code

TOY = Path(__file__).parents[2] / "studies" / "toy.toml"
RESULTS = TOY.parents[1] / "docs" / "results"
VOCAB = 64
SMALLER = [f"model.vocab={VOCAB}", "model.dim=16", "model.ffn=32", "data.sequence=16", "train.steps=8",
           "train.eval_every=4", "train.eval_batches=1"]  # fmt: skip


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    random = np.random.default_rng(0)
    for split in ("train", "val"):
        stream = np.cumsum(random.integers(0, 4, 20_000)) % VOCAB
        write_shard(folder / f"{split}_000.bin", stream.astype("<u2"))
    return folder


@pytest.fixture
def forked(monkeypatch):
    """A study's workers have imported torch already. Where there is a GPU they start cold, as a user's do."""
    if not torch.cuda.is_available():
        warm = SimpleNamespace(get_context=lambda _: multiprocessing.get_context("fork"))
        monkeypatch.setattr("slipstream.study.pool.multiprocessing", warm)


class HerePool:
    """A pool whose one worker is this process."""

    def __init__(self, size: int, out: Path) -> None:
        self.ended = []

    active = property(lambda self: self.ended)
    idle = property(lambda self: not self.ended)

    def __enter__(self):
        return self

    def __exit__(self, *_) -> None:
        pass

    def prepare(self, count: int) -> None:
        pass

    def interrupt(self) -> None:
        pass

    def start(self, point: Point, folder: Path) -> None:
        tree = point.config.model_dump()
        tree["run"]["dir"] = str(folder)
        self.ended.append((point, _run(tree)))

    def wait(self, timeout_seconds: float):
        ended, self.ended = self.ended, []
        return ended


def command(*arguments: object, code: int = 0) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["study", *map(str, arguments)])
    assert ended.value.code == code


def test_the_toy_study_end_to_end(tmp_path, data, capsys, monkeypatch, forked):
    """Run, fail in one run, skip, continue, export, tabulate from the export: as a user would."""
    file, out = tmp_path / "toy.toml", tmp_path / "runs"
    broken = '"broken" = { optim = { correction = "none", options.no_such_option = 1 } }'
    text = TOY.read_text().replace("[runs]", f"{broken}\n\n[runs]")
    file.write_text(text.replace('product = ["seed", ', 'product = ["seed:0", '))
    overrides = [*SMALLER, f"data.path={data}"]

    command("run", file, *overrides, "--out", out, "--workers", 2, "--only", "optimizer=muon", code=3)
    told = capsys.readouterr().out
    assert "toy: 5 of 10 runs, 0 done." in told
    assert "\n5/5  " in told
    assert "4 runs finished, 1 failed" in told
    monkeypatch.setattr("slipstream.study.run.Pool", HerePool)  # the rest needs no processes
    study = load_study(file, overrides)
    found = collect(out)
    points = {(p.labels["optimizer"], p.labels["mode"]): p for p in study.expand(losses(found)).points}
    assert set(found) == {point.digest for (name, _), point in points.items() if name == "muon"}
    assert "no_such_option" in found[points["muon", "broken"].digest].failed
    assert (out / points["muon", "broken"].folder / FAILED_FILE).exists()

    sync, late = (found[points["muon", mode].digest] for mode in ("sync", "delay"))
    assert sync.loss is not None
    assert late.loss is not None
    assert sync.loss != late.loss  # delay is seen in the loss
    assert [tokens for tokens, _ in sync.validation] == [4 * 64, 8 * 64]
    assert sync.validation[-1][1] == sync.loss
    assert len(sync.held_out) == len(sync.data) == len(sync.source) == 64
    assert sync.versions["slipstream"] == __version__
    assert sync.commit == (code().commit or "")
    folder = out / points["muon", "sync"].folder
    assert read_run(folder).status == "finished"
    kept = {path.name for path in folder.iterdir()}  # a study keeps numbers, not weights
    assert kept == {"config.toml", "environment.json", "events.jsonl", "lock"}

    # Everything above is done, so a second call starts nothing; nor does one whose time is too short.
    stamp = (folder / "events.jsonl").stat().st_mtime_ns
    again = run_study(study, out, Limits(only="optimizer=muon"), Show(out))
    assert (again.finished, again.failed, again.failed_before, again.left) == ([], {}, 1, 0)
    command("run", file, *overrides, "--out", out, "--only", "optimizer=muon", code=3)  # still on record
    command("run", file, *overrides, "--out", out, "--only", "optimizer=muon mode=sync")
    assert (folder / "events.jsonl").stat().st_mtime_ns == stamp
    hurried = run_study(study, out, Limits(minutes=1e-9), Show(out))
    assert (hurried.finished, hurried.stopped, hurried.left) == ([], "time", 5)

    command("list", file, *overrides, "--results", out)
    told = capsys.readouterr().out
    assert told.count("missing") == 5
    assert f"mode=sync  {sync.loss:.4f}" in told
    command("export", file, *overrides, "--results", out, "--out", tmp_path / "docs")
    assert "5 runs" in capsys.readouterr().out
    export = tmp_path / "docs" / "toy.jsonl.gz"
    assert collect(export) == found
    command("table", file, *overrides, "--results", export)
    told = capsys.readouterr().out
    assert "| muon | sync | 1 |" in told
    assert "Net gain (simulated)" in told
    assert (
        "- 5 of 10 runs are missing.\n- seed=0 optimizer=muon mode=broken failed: muon has no option" in told
    )
    assert (tmp_path / "docs" / "toy.html").exists()

    # An export in the folder of another machine stands for its runs, and so does one named beside it.
    elsewhere = run_study(study, tmp_path / "docs", Limits(only="optimizer=muon"), Show(out))
    assert elsewhere.finished == []
    empty = tmp_path / "empty"
    elsewhere = run_study(study, empty, Limits(only="optimizer=muon"), Show(out), also=[export])
    assert elsewhere.finished == []
    command("table", file, *overrides, "--results", empty, "--results", export)
    assert "| muon | sync | 1 |" in capsys.readouterr().out

    # A retry begins from nothing, and what fails again is recorded again.
    again = run_study(study, out, Limits(only="mode=broken", retry=True), Show(out))
    assert list(again.failed) == ["seed=0 optimizer=muon mode=broken", "seed=0 optimizer=adamw mode=broken"]


def test_a_study_is_compiled_ahead_once_for_each_shape(monkeypatch):
    """Without compiling: what would be run, and that it can be."""
    from slipstream.study import warm

    study = load_study(TOY, [*SMALLER, "data.path=/nowhere", "train.compile=true"])
    (point,) = warm._one_of_each_shape(study)
    monkeypatch.setattr(warm, "_one_of_each_shape", lambda _: [point])
    eager = point.config.train.model_copy(update={"compile": False})
    point = replace(point, config=point.config.model_copy(update={"train": eager}))
    assert [name for name, _ in warm.warm_up(study)] == ["seed=0 optimizer=muon mode=sync"]


def test_time_without_compiling_is_what_later_runs_take():
    result = Result("d", "run", {}, loss=1.0, tokens=1000, tokens_per_second=100.0)
    assert steady_seconds(result, 60.0) == pytest.approx(10.8 + 2)
    assert steady_seconds(result, 11.0) == 11.0


def test_tables_of_nothing_are_a_clear_error(tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["study", "table", str(TOY), "--results", str(tmp_path)])
    assert ended.value.code == 2
    assert "No run of" in capsys.readouterr().err


def test_a_table_without_the_data_path_of_its_runs_names_it(tmp_path, capsys):
    root = Path(__file__).parents[2]
    results = root / "docs" / "results" / "a-core.jsonl.gz"
    with pytest.raises(SystemExit):
        main(
            [
                "study",
                "table",
                str(root / "studies/a-core.toml"),
                "--results",
                str(results),
                "--out",
                str(tmp_path),
            ]
        )
    held = len(read_export(results))
    assert f"It holds {held} other runs, made with data.path=/tmp/wiki16k." in capsys.readouterr().err


def test_missing_data_is_said_once(tmp_path):
    study = load_study(TOY, ["data.path=/nowhere"])
    with pytest.raises(UserError, match="There is no data folder '/nowhere'"):
        run_study(study, tmp_path, Limits(), Show(tmp_path))
    (tmp_path / "bare").mkdir()
    study = load_study(TOY, [f"data.path={tmp_path / 'bare'}"])
    with pytest.raises(UserError, match="bare has no"):
        run_study(study, tmp_path, Limits(), Show(tmp_path))
    assert collect(tmp_path) == {}  # nothing on record as failed


def test_a_pattern_that_matches_nothing_shows_names(tmp_path, data):
    study = load_study(TOY, [*SMALLER, f"data.path={data}"])
    with pytest.raises(UserError, match="seed=0 optimizer=muon mode=sync"):
        run_study(study, tmp_path, Limits(only="sgd"), Show(tmp_path))
    tuned = load_study(TOY.with_name("cpu-optimizers.toml"))  # its grid has one seed alone
    with pytest.raises(UserError, match="81 more get their names once a grid has ended"):
        run_study(tuned, tmp_path, Limits(only="seed=2"), Show(tmp_path))


def test_a_killed_worker_is_reported_and_replaced(tmp_path, data):
    point = load_study(TOY, [*SMALLER, f"data.path={data}"]).expand({}).points[0]
    with Pool(1, tmp_path) as pool:
        pool.start(point, tmp_path / "run")
        (worker,) = pool.active
        assert worker.process.pid is not None
        os.kill(worker.process.pid, signal.SIGKILL)
        ended = []
        deadline = time.monotonic() + 120
        while not ended and time.monotonic() < deadline:
            ended = pool.wait(1.0)
        ((which, report),) = ended
        assert which is point
        assert report.broken
        assert "exit code -9" in report.message
        assert pool.idle


def test_a_run_that_another_process_is_at_is_left_to_it(tmp_path, data, monkeypatch):
    """Two `study run` on one folder: what the second finds locked must not be put on record as failed."""
    from slipstream.train import folder as folders

    monkeypatch.setattr("slipstream.study.run.Pool", HerePool)
    monkeypatch.setattr(Clock, "left", lambda *_: None)
    monkeypatch.setattr(folders, "LOCK_PATIENCE_SECONDS", 0.0)
    study = load_study(TOY, [*SMALLER, f"data.path={data}"])
    point = study.expand({}).points[0]
    limits = Limits(only=point.name)
    with folders.lock(tmp_path / point.folder):
        outcome = run_study(study, tmp_path, limits, Show(tmp_path))
    assert (outcome.finished, outcome.failed, outcome.left) == ([], {}, 1)
    assert not (tmp_path / point.folder / FAILED_FILE).exists()
    assert run_study(study, tmp_path, limits, Show(tmp_path)).finished == [point.name]


@pytest.mark.parametrize("when", ["at once", "while it trains"])
def test_an_interrupted_run_ends_and_is_neither_finished_nor_failed(
    tmp_path, data, monkeypatch, request, when
):
    """Ctrl-C must reach the trainer, or a study could be stopped at the end of its runs only.

    SIGINT is ignored where a shell has started the tests in the background, and so it is here in any case.
    """
    wait, waited = Pool.wait, []
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))

    def interrupted(pool: Pool, timeout_seconds: float):
        logs = tmp_path.glob("*/events.jsonl")
        steps = [event for path in logs for event in read_run(path.parent).of("step")]
        if not waited and (steps or when == "at once"):
            waited.append(True)
            raise KeyboardInterrupt
        return wait(pool, 0.1)

    if when == "while it trains":  # at once: before it has imported anything
        request.getfixturevalue("forked")
    monkeypatch.setattr(Pool, "wait", interrupted)
    study = load_study(TOY, [*SMALLER, f"data.path={data}", "train.steps=1000000", "train.log_every=1"])
    outcome = run_study(study, tmp_path, Limits(only="seed=0 optimizer=muon mode=sync"), Show(tmp_path))
    assert (outcome.finished, outcome.failed, outcome.left, outcome.stopped) == ([], {}, 1, "interrupt")
    assert collect(tmp_path) == {}


def test_a_term_signal_stops_the_command_as_ctrl_c_does(tmp_path, data):
    """Clusters send SIGTERM when the time is up."""
    options = [*SMALLER, f"data.path={data}", "train.steps=1000000", "--out", str(tmp_path)]
    process = import_module("slipstream.distributed.launch").subprocess.Popen(
        [sys.executable, "-m", "slipstream", "study", "run", str(TOY), *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    deadline = time.monotonic() + 120
    while not list(tmp_path.glob("*/events.jsonl")):
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=200)
    assert process.returncode == 0, out
    assert "Stopping: the runs under way end" in out
    assert "0 runs finished, 0 failed" in out
    assert "leaked" not in out


def test_a_full_disk_ends_the_study_and_is_no_failure_of_its_runs(tmp_path, data, monkeypatch):
    from slipstream.train import folder as folders

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("slipstream.study.run.Pool", HerePool)
    monkeypatch.setattr(Clock, "left", lambda *_: None)
    monkeypatch.setattr(folders, "write_config", full)
    study = load_study(TOY, [*SMALLER, f"data.path={data}"])
    with pytest.raises(UserError, match="No space left on device"):
        run_study(study, tmp_path, Limits(), Show(tmp_path))
    assert collect(tmp_path) == {}


def test_a_worker_that_died_while_idle_is_replaced(tmp_path, data):
    point = load_study(TOY, [*SMALLER, f"data.path={data}"]).expand({}).points[0]
    with Pool(1, tmp_path) as pool:
        pool.prepare(1)
        (dead,) = pool._workers
        dead.process.kill()
        dead.process.join()
        pool.start(point, tmp_path / "run")
        (worker,) = pool.active
        assert worker.process.pid != dead.process.pid
        assert worker.point is point


def test_a_retry_forgets_the_failures_it_runs_again_and_no_others(tmp_path, data, monkeypatch):
    monkeypatch.setattr("slipstream.study.run.Pool", HerePool)
    study = load_study(TOY, [*SMALLER, f"data.path={data}"])
    wanted, other, foreign = study.expand({}).points[:3]
    write_failure(tmp_path / wanted.folder, wanted, "died")
    write_failure(tmp_path / other.folder, other, "died")
    write_failure(tmp_path / "of-another-study", replace(foreign, digest="0123456789"), "died")
    no_time = Limits(only=wanted.name, retry=True, minutes=0.0)
    outcome = run_study(study, tmp_path, no_time, Show(tmp_path))
    assert (outcome.left, outcome.failed_before) == (1, 0)
    assert set(collect(tmp_path)) == {other.digest, "0123456789"}


def test_a_run_that_failed_at_once_says_nothing_about_time(tmp_path, data, monkeypatch):
    monkeypatch.setattr("slipstream.study.run.Pool", HerePool)
    monkeypatch.setattr(Clock, "left", lambda *_: None)
    seen = []
    monkeypatch.setattr(Clock, "observe", lambda _, point, seconds: seen.append(point.name))
    study = load_study(TOY, [*SMALLER, f"data.path={data}", "optim.options.no_such_option=1"])
    outcome = run_study(study, tmp_path, Limits(only="seed=0 optimizer=muon mode=sync"), Show(tmp_path))
    assert len(outcome.failed) == 1
    assert seen == []


def test_time_is_estimated_from_the_nearest_runs():
    points = load_study(TOY).expand({}).points
    muon, adamw = points[0], next(p for p in points if p.labels["optimizer"] == "adamw")
    clock = Clock({})
    assert clock.seconds(muon) is None
    assert clock.left([muon], [], 1) is None
    clock.observe(muon, 10.0)
    assert clock.seconds(adamw) == pytest.approx(10.0)  # nothing nearer
    clock.observe(adamw, 4.0)
    assert clock.seconds(adamw) == pytest.approx(4.0)
    longer = load_study(TOY, ["train.steps=120"]).expand({}).points[0]
    assert clock.seconds(longer) == pytest.approx(20.0)
    assert clock.left([muon, adamw], [], 2) == pytest.approx(7.0)


def test_an_export_says_what_it_leaves_out_for_want_of_a_grid(tmp_path, capsys):
    """Runs chosen by a grid whose results are elsewhere: no one can tell that they are this study's."""
    name = "cpu-optimizers"
    file, kept = TOY.with_name(f"{name}.toml"), RESULTS / f"{name}.jsonl.gz"
    found = collect(kept)
    grid = [point.digest for point in load_study(file).expand({}).points]
    rest = [result for digest, result in found.items() if digest not in grid]
    write_export(tmp_path / "rest.jsonl.gz", [*rest, found[grid[0]]])
    command("export", file, "--results", tmp_path / "rest.jsonl.gz", "--out", tmp_path / "out")
    told = capsys.readouterr().out
    assert "  1 runs" in told
    assert f"{len(rest)} runs that were read are not in it" in told
    command(
        "export", file, "--results", tmp_path / "rest.jsonl.gz", "--results", kept, "--out", tmp_path / "all"
    )
    assert "not in it" not in capsys.readouterr().out
    assert collect(tmp_path / "all" / f"{name}.jsonl.gz").keys() == found.keys()
