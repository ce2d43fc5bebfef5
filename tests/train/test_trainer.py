"""The trainer's laws: one trajectory at every depth, through kills, resumes and validations."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import signal
import sys
import threading
import time
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tests.train.conftest import assert_equal_weights

from slipstream.config import load, resolve
from slipstream.errors import CheckpointError, StageError, UserError
from slipstream.metrics.record import Recorder
from slipstream.train import checkpoint, folder
from slipstream.train.preflight import torch_release
from slipstream.train.trackers import open_trackers


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_every_depth_ends_with_the_same_weights(runs, reference, stages):
    runs.train("run", f"pipeline.stages={stages}")
    assert_equal_weights(runs.weights("run"), reference.weights("2bw"))
    assert runs.steps("run") == list(range(1, 13))
    losses = [event["loss"] for event in runs.events("run", "step")]
    assert losses == [event["loss"] for event in reference.events("2bw", "step")]


def test_a_cut_inside_a_layer_changes_no_bit(runs, reference):
    """Nor does going on with another cut: attention and MLP of layer 1 meet on one stage, those of layer 2 part."""
    runs.train("run", "pipeline.stages=3", "pipeline.boundaries=[1.5,3]", "checkpoint.keep=9")
    assert_equal_weights(runs.weights("run"), reference.weights("2bw"))
    forget_after(runs, 4)
    runs.train("run", "pipeline.stages=2", "pipeline.boundaries=[2.5]", "checkpoint.keep=9")
    assert_equal_weights(runs.weights("run"), reference.weights("2bw"))
    forget_after(runs, 8)
    runs.train("run", "pipeline.stages=4", "pipeline.boundaries=[0.5,1,3.5]")
    assert_equal_weights(runs.weights("run"), reference.weights("2bw"))


def forget_after(runs, step):
    """The checkpoints of later updates of the run called run."""
    for path in (runs.folder / "run" / "checkpoints").iterdir():
        if path.is_dir() and int(path.name.rpartition("-")[2]) > step:
            shutil.rmtree(path)


def test_validation_and_logging_do_not_change_the_trajectory(runs, reference):
    runs.train("run", "pipeline.stages=2", "train.eval_every=3", "train.log_every=5", "checkpoint.every=0")
    assert_equal_weights(runs.weights("run"), reference.weights("2bw"))
    assert [event["step"] for event in runs.events("run", "validation")] == [3, 6, 9, 12]
    assert runs.steps("run") == list(
        range(1, 13)
    )  # every step is on record, however seldom lines are printed


HOUR = 3600.0


def test_a_kill_between_a_checkpoint_and_its_validation_loses_and_doubles_none(runs):
    """The state such a kill leaves: the checkpoint is there, and the log ends before what follows it."""
    settings = ["checkpoint.keep=9", "train.eval_every=4"]
    runs.train("whole", "pipeline.schedule=emulate", *settings)

    def numbers(name):
        return [(event["step"], event["loss"]) for event in runs.events(name, "validation")]

    assert [step for step, _ in numbers("whole")] == [4, 8, 12]
    last = {
        "mid": lambda event: event["step"] <= 8 and (event["event"], event["step"]) != ("validation", 8),
        "end": lambda event: event["event"] != "finish",
    }
    for name, kept in last.items():
        shutil.copytree(runs.folder / "whole", runs.folder / name)
        first, *others = (event for event in runs.events("whole") if kept(event))
        first["time"] -= HOUR  # the first process had worked for that long
        lines = [json.dumps(event) + "\n" for event in (first, *others)]
        (runs.folder / name / "events.jsonl").write_text("".join(lines))
        if name == "mid":
            shutil.rmtree(runs.folder / name / "checkpoints" / "step-00000012")
        runs.train(name, "pipeline.stages=2", *settings)
        assert numbers(name) == [(step, pytest.approx(loss, rel=1e-6)) for step, loss in numbers("whole")]
        assert_equal_weights(runs.weights(name), runs.weights("whole"))
        (finish,) = runs.events(name, "finish")
        assert HOUR < finish["seconds"] < 2 * HOUR


def kill_when(runs, name: str, step: int, index: int, delay: float = 0.0) -> threading.Thread:
    """SIGKILL worker `index` of the pool once `step` is in the log."""

    def watch() -> None:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and max(runs.steps(name), default=0) < step:
            time.sleep(0.005)
        time.sleep(delay)
        os.kill(runs.pool._workers[index].pid, signal.SIGKILL)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    return thread


def test_killed_and_resumed_into_another_depth(runs, quick):
    """Rank 1 of 2 is killed, then rank 0 of 4, then one process finishes: the weights never notice."""
    settings = ["train.steps=24", "checkpoint.every=5", "checkpoint.keep=3"]
    runs.train("whole", "pipeline.schedule=emulate", *settings)
    for stages, group, rank in ((2, 8, 1), (4, 18, 0)):
        config = runs.config("run", f"pipeline.stages={stages}", *settings).model_dump()
        with pytest.raises(StageError, match="SIGKILL"):
            runs.pool.run("train.jobs:killed_rank", config, rank, group, ranks=stages, timeout=200)
    assert runs.train("run", "pipeline.stages=1", *settings)["reason"] == "finished"
    assert_equal_weights(runs.weights("run"), runs.weights("whole"))
    assert runs.steps("run") == list(range(1, 25))
    losses = [event["loss"] for event in runs.events("run", "step")]
    assert losses == [event["loss"] for event in runs.events("whole", "step")]
    saved = [event["step"] for event in runs.events("run", "checkpoint")]
    assert saved == sorted(set(saved))
    assert saved[-1] == 24
    for log in (runs.folder / "run" / "logs").glob("rank-*.log"):
        told = [int(line.split()[1]) for line in log.read_text().splitlines() if line.startswith("step ")]
        assert told == sorted(set(told)), log.name


@pytest.fixture(scope="module")
def long_run(tmp_path_factory, data, pool):
    from tests.train.conftest import Runs

    made = Runs(tmp_path_factory.mktemp("long"), data, pool)
    made.train("run", "pipeline.schedule=emulate", "train.steps=60", "checkpoint.every=10")
    return made


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_killed_at_random_moments(runs, long_run, seed):
    chance = random.Random(seed)
    settings = ["train.steps=60", "checkpoint.every=10"]
    reached = 0
    while reached < 45:
        stages = chance.choice([1, 2, 4])
        target = reached + chance.randint(3, 20)
        thread = kill_when(runs, "run", target, chance.randrange(stages), chance.random() * 0.05)
        with pytest.raises(StageError):
            runs.train("run", f"pipeline.stages={stages}", *settings)
        thread.join()
        newest = checkpoint.committed(runs.folder / "run" / "checkpoints")
        reached = checkpoint.verify(newest[0]).step if newest else 0
        reached = max(reached, target - 10)
    runs.train("run", "pipeline.stages=2", *settings)
    assert_equal_weights(runs.weights("run"), long_run.weights("run"))
    assert runs.steps("run") == list(range(1, 61))


def test_a_fork_says_where_it_starts_and_a_tracker_sees_every_step(runs, capfd, monkeypatch):
    made, logged = [], []
    page = SimpleNamespace(log=lambda values, step: logged.append((step, values)), finish=lambda: None)
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda **how: made.append(how) or page))
    settings = ["pipeline.schedule=emulate", 'train.trackers=["wandb"]']
    runs.train("run", *settings)
    assert [step for step, values in logged if "step/loss" in values] == list(range(1, 13))
    capfd.readouterr()
    runs.train("fork", *settings, f"run.fork_from={runs.folder / 'run'}", "train.steps=14")
    assert "A fork starts from step 12" in capfd.readouterr().out
    assert made[0]["id"] != made[1]["id"]
    open_trackers(resolve(load(None, settings)), runs.folder / "run", 12)
    assert made[2]["id"] == made[0]["id"], "a resumed run goes on in its own page"


def test_a_finished_run_says_so_and_trains_no_more(runs, capfd):
    runs.train("run", "pipeline.schedule=emulate")
    before = runs.events("run")
    capfd.readouterr()
    assert runs.train("run", "pipeline.schedule=emulate")["reason"] == "finished"
    assert "This run is finished: 12 steps" in capfd.readouterr().out
    assert runs.events("run") == before


def test_a_changed_trajectory_is_refused_with_the_difference(runs):
    runs.train("run", "pipeline.schedule=emulate", "train.steps=4")
    with pytest.raises(UserError) as caught:
        runs.train("run", "pipeline.schedule=emulate", "train.steps=8", "optim.lr=0.5", "checkpoint.keep=7")
    text = str(caught.value)
    assert "train.steps" not in text  # a run may become longer
    assert "optim.lr: the run has 0.01, asked for 0.5" in text
    assert "checkpoint.keep" not in text
    assert "run.fork_from" in text


def test_the_same_data_elsewhere_is_the_same_data(runs, tmp_path):
    runs.train("run", "pipeline.schedule=emulate")
    (tmp_path / "link").symlink_to(runs.data, target_is_directory=True)
    runs.train("run", "pipeline.schedule=emulate", f"data.path={tmp_path / 'link'}")
    assert runs.steps("run") == list(range(1, 13))


def test_a_run_may_lie_in_the_folder_of_its_data(runs, data):
    shutil.copytree(data, runs.folder / "run")
    (runs.folder / "run" / "tokenizer.json").write_text("{}")
    outcome = runs.train(
        "run", "pipeline.schedule=emulate", f"data.path={runs.folder / 'run'}", "train.sample_tokens=0"
    )
    assert outcome["reason"] == "finished"


def test_tensorboard_forgets_what_a_resumed_run_tells_again(runs, monkeypatch):
    made = []

    class Writer:
        def __init__(self, folder: str, purge_step: int) -> None:
            made.append((Path(folder).name, purge_step, []))

        def add_scalar(self, name: str, value: float, step: int) -> None:
            made[-1][2].append((name, step))

        def add_text(self, name: str, text: str, step: int) -> None:
            assert (name, text.splitlines()[0]) == ("run", "run")

        def close(self) -> None:
            pass

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=Writer))
    settings = ["pipeline.schedule=emulate", 'train.trackers=["tensorboard"]']
    runs.train("run", *settings)
    for path in (runs.folder / "run" / "checkpoints").glob("step-*12"):
        path.rename(path.with_name("gone"))
    runs.train("run", *settings)
    assert [(folder, first) for folder, first, _ in made] == [("tensorboard", 1), ("tensorboard", 9)]
    told = [[step for name, step in scalars if name == "step/loss"] for *_, scalars in made]
    assert told == [list(range(1, 13)), list(range(9, 13))]


def test_changed_data_is_refused(runs, tmp_path):
    from tests.train.conftest import make_data

    other = make_data(tmp_path / "mine")
    runs.train("run", "pipeline.schedule=emulate", f"data.path={other}")
    shard = other / "train_000.bin"
    shard.write_bytes(shard.read_bytes()[:-2] + b"\1\0")
    with pytest.raises(UserError, match="fingerprint"):
        runs.train("run", "pipeline.schedule=emulate", f"data.path={other}")


def test_a_changed_bit_to_validate_on_is_refused(runs, tmp_path):
    """Its loss would no longer be comparable with those before."""
    from tests.train.conftest import make_data

    other = make_data(tmp_path / "mine")
    runs.train("run", "pipeline.schedule=emulate", f"data.path={other}")
    shard = other / "val_000.bin"
    held = bytearray(shard.read_bytes())
    held[5000] ^= 1
    shard.write_bytes(held)
    with pytest.raises(UserError, match="the run's validation shards had the contents"):
        runs.train("run", "pipeline.schedule=emulate", f"data.path={other}", "train.steps=16")


def test_the_run_folder_is_locked(runs, monkeypatch):
    monkeypatch.setattr(folder, "LOCK_PATIENCE_SECONDS", 0.0)
    with (
        folder.lock(runs.folder / "run"),
        pytest.raises(UserError, match=f"in use by process {os.getpid()}"),
    ):
        runs.train("run", "pipeline.schedule=emulate")
    runs.train("run", "pipeline.schedule=emulate", "train.steps=1")


def test_a_damaged_checkpoint_is_passed_over(runs, reference):
    runs.train("run", "pipeline.schedule=emulate", "checkpoint.keep=3")
    root = runs.folder / "run" / "checkpoints"
    for path in checkpoint.committed(root)[:2]:  # steps 12 and 8; 4 is good
        file = path / "stage-000.safetensors"
        file.write_bytes(file.read_bytes()[:-7])
    runs.train("run", "pipeline.schedule=emulate", "checkpoint.keep=3")
    assert_equal_weights(runs.weights("run"), reference.weights("2bw"))
    assert runs.steps("run") == list(range(1, 13))
    warnings = [event["message"] for event in runs.events("run", "warning")]
    assert any("truncated" in text and "step-00000012" in text for text in warnings)
    for path in checkpoint.committed(root):
        (path / "manifest.json").write_text("{}")
    with pytest.raises(CheckpointError, match="usable"):
        runs.train("run", "pipeline.schedule=emulate", "checkpoint.keep=3")


def test_a_disk_that_fills_up_is_a_clear_error_and_loses_nothing(runs, reference, monkeypatch):
    """Not even the log can be written: the run ends in words, and goes on from its checkpoint when there is room."""
    write = Recorder.write

    def full(self, event, step, **values):
        if event == "step" and step == 7:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(self, event, step, **values)

    monkeypatch.setattr(Recorder, "write", full)
    with pytest.raises(UserError, match=r"No space left on device.*the same command goes on from the newest"):
        runs.train("run", "pipeline.schedule=emulate")
    monkeypatch.undo()
    assert runs.train("run", "pipeline.schedule=emulate")["reason"] == "finished"
    assert runs.events("run", "start")[-1]["step"] == 4
    assert_equal_weights(runs.weights("run"), reference.weights("2bw"))
    assert runs.steps("run") == list(range(1, 13))


def test_a_switch_of_schedule_is_explicit_and_logged(runs):
    runs.train("run", "pipeline.stages=2", "checkpoint.keep=3")
    for path in checkpoint.committed(runs.folder / "run" / "checkpoints")[:1]:
        (path / "manifest.json").unlink()  # back to step 8
    with pytest.raises(UserError, match=r"run\.switch=true"):
        runs.train("run", "pipeline.stages=2", "pipeline.schedule=1f1b")
    runs.train("run", "pipeline.stages=2", "pipeline.schedule=1f1b", "run.switch=true")
    warnings = [event["message"] for event in runs.events("run", "warning")]
    assert any("Switched at step 8: pipeline.schedule" in text for text in warnings)
    assert runs.steps("run") == list(range(1, 13))


def test_from_flushed_to_delayed_continues_by_the_rule(runs):
    """A flushed half and a delayed half equal one delayed run with a synchronous start of that length ..."""
    runs.train("one", "pipeline.schedule=emulate", "optim.sync_start=8", "optim.correction=none")
    runs.train("two", "pipeline.schedule=emulate", "pipeline.delay=0", "checkpoint.keep=3")
    newest = checkpoint.committed(runs.folder / "two" / "checkpoints")[0]
    (newest / "manifest.json").unlink()
    runs.train("two", "pipeline.schedule=emulate", "optim.correction=none", "run.switch=true")
    # ... because after the last flushed update g-1 both groups g and g+1 read z_g.
    assert_equal_weights(runs.weights("one"), runs.weights("two"))


@pytest.mark.parametrize(
    "other", [["model.experts=4", "model.experts_per_token=2"], ["model.tied=false"], ["model.ffn=48"]]
)
def test_a_fork_of_another_model_is_refused_by_the_key_that_makes_it_one(runs, other):
    runs.train("run", "pipeline.schedule=emulate", "train.steps=4")
    fork = f"run.fork_from={runs.folder / 'run'}"
    with pytest.raises(UserError, match=rf"weights of another model:\n  - {other[0].partition('=')[0]}: "):
        runs.train("fork", "pipeline.schedule=emulate", fork, *other)
    assert runs.steps("fork") == []


def test_a_fork_goes_on_with_other_settings(runs, reference):
    runs.train("run", "pipeline.schedule=emulate")
    before = runs.weights("run")
    longer = ["pipeline.schedule=emulate", "train.steps=16", "optim.schedule=constant", "optim.warmup=0"]
    runs.train("half", *longer, "train.steps=8")
    runs.train("whole", *longer)
    runs.train("joined", *longer, f"run.fork_from={runs.folder / 'half'}")
    assert_equal_weights(runs.weights("joined"), runs.weights("whole"))  # nothing changed: nothing changes
    fork = [f"run.fork_from={runs.folder / 'run'}", "train.steps=16", "pipeline.stages=2"]
    runs.train("fork", *fork, "optim.weight_decay=0.0")
    assert runs.steps("fork") == [13, 14, 15, 16]
    assert_equal_weights(runs.weights("run"), before)
    assert runs.train("fork", *fork, "optim.weight_decay=0.0")["reason"] == "finished"
    runs.train("adamw", *fork, "optim.name=adamw")
    assert runs.steps("adamw") == [13, 14, 15, 16]
    with pytest.raises(UserError, match="leaves nothing to do"):
        runs.train("short", f"run.fork_from={runs.folder / 'run'}", "train.steps=12")


def test_every_rank_logs_the_true_loss(runs):
    runs.train("run", "pipeline.stages=4", "train.steps=3")
    losses = [f"loss {event['loss']:.4f}" for event in runs.events("run", "step")]
    for rank in (1, 2, 3):
        lines = (runs.folder / "run" / "logs" / f"rank-{rank}.log").read_text().splitlines()
        assert [line.split("  ")[1] for line in lines] == losses


def test_the_run_folder_explains_itself(runs):
    runs.train("run", "pipeline.stages=2", "train.steps=3")
    place = runs.folder / "run"
    environment = json.loads((place / "environment.json").read_text())
    assert environment["versions"]["torch"] == torch.__version__
    assert environment["seed"] == 0
    assert len(environment["data"]["fingerprint"]) == 64
    start = runs.events("run", "start")[0]
    assert (start["stages"], start["schedule"], start["resumed"]) == (2, "2bw", False)
    step = runs.events("run", "step")[0]
    assert step["tokens"] == 4 * 2 * 16
    assert len(step["busy"]) == len(step["memory_bytes"]) == 2
    assert (place / "report.html").stat().st_size > 1000


def test_masked_documents_and_z_loss_at_every_depth(runs):
    meta = runs.folder / "docs"
    from tests.train.conftest import make_data

    make_data(meta)
    (meta / "meta.json").write_text('{"end_of_document": 3, "vocab": 64}')
    settings = [f"data.path={meta}", "data.mask_documents=true", "train.z_loss=0.001", "train.steps=4"]
    runs.train("one", "pipeline.schedule=emulate", *settings)
    runs.train("two", "pipeline.stages=2", *settings)
    assert_equal_weights(runs.weights("one"), runs.weights("two"))
    flushed = runs.train("sync", "pipeline.schedule=emulate", "pipeline.delay=0", *settings)[
        "validation_loss"
    ]
    for schedule in ("1f1b", "interleaved_1f1b") if torch_release() >= (2, 13) else ():
        found = runs.train(schedule, "pipeline.stages=2", f"pipeline.schedule={schedule}", *settings)
        assert found["validation_loss"] == pytest.approx(flushed, rel=1e-6)


def test_experts_at_every_depth(runs):
    settings = ["model.experts=4", "model.experts_per_token=2", "train.steps=4"]
    runs.train("one", "pipeline.schedule=emulate", *settings)
    within = "pipeline.boundaries=[0.5]"  # the first stage has no experts
    runs.train("two", "pipeline.stages=2", within, "train.activation_checkpointing=true", *settings)
    assert_equal_weights(runs.weights("one"), runs.weights("two"))


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["data.path=/nowhere"], "not a folder"),
        (["model.vocab=32"], "vocabulary is 32"),
        (["data.sequence=30000"], "too few for a sequence"),
        (["optim.name=muno"], "Did you mean 'muon'"),
        (["optim.correction=eror_feedback"], "Did you mean 'error_feedback'"),
        (["optim.options.nesterovv=true"], "no option"),
        (["run.fork_from=/nowhere"], "no usable checkpoint"),
        (['train.trackers=["wandb"]'], "wandb, which is not installed"),
    ],
)
def test_bad_input_is_a_clear_error(runs, monkeypatch, overrides, words):
    monkeypatch.setitem(sys.modules, "wandb", None)  # as where it is not installed
    with pytest.raises(UserError, match=words):
        runs.train("run", "pipeline.schedule=emulate", *overrides)
    assert runs.steps("run") == []


def test_a_run_keeps_the_cutover_it_was_made_with(runs):
    """Made with one stage: one of four microbatches is old, also where four stages or the emulator go on."""
    named = "pipeline.cutover="  # nothing: the run decides

    def kept():
        return tomllib.loads((runs.folder / "run" / "config.toml").read_text())["pipeline"]["cutover"]

    runs.train("one", "pipeline.schedule=emulate", "pipeline.cutover=1")
    runs.train("run", named, "pipeline.stages=1", "train.steps=12", "checkpoint.every=4", "checkpoint.keep=9")
    assert kept() == 1
    assert_equal_weights(runs.weights("run"), runs.weights("one"))
    for step, settings in ((8, ["pipeline.schedule=emulate"]), (4, ["pipeline.stages=4"])):
        forget_after(runs, step)
        runs.train("run", named, *settings, "checkpoint.keep=9")
        assert kept() == 1
        assert_equal_weights(runs.weights("run"), runs.weights("one"))
    notes = [str(event) for event in runs.events("run")]
    assert [text for text in notes if "4 stages need 4 not to wait" in text]
    with pytest.raises(UserError, match=r"pipeline\.cutover: the run has 1, asked for 3"):
        runs.train("run", "pipeline.cutover=3", "pipeline.stages=2", "train.steps=13")
