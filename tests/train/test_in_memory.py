"""Checkpoints in memory: what a lost process takes back goes on from them, to the bits of a quiet run."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

import pytest
from tests.train.conftest import assert_equal_weights

from slipstream.errors import UserError
from slipstream.train import checkpoint, claim, in_memory, trainer, writer
from slipstream.train.elastic import newest_step

EMULATE = "pipeline.schedule=emulate"
OFTEN = "checkpoint.memory_every=2"
SELDOM = "checkpoint.every=8"


class Lost(Exception):
    pass


@pytest.fixture
def shm(tmp_path, monkeypatch) -> Path:
    """A memory of its own for each test, but for the ranks of a pool, which are other processes."""
    place = tmp_path / "shm"
    place.mkdir()
    monkeypatch.setattr(claim, "SHARED_MEMORY", place)
    return place


@pytest.fixture
def lose(monkeypatch):
    """Have the process die before it hands in group `step`."""

    def at(step: int | None) -> None:
        submit = trainer.submit.__wrapped__ if hasattr(trainer.submit, "__wrapped__") else trainer.submit

        def once(parts, number, batch):
            if number == step:
                parts.writer.finish()
                if parts.memory is not None:
                    parts.memory.finish()
                raise Lost
            submit(parts, number, batch)

        once.__wrapped__ = submit
        monkeypatch.setattr(trainer, "submit", once)

    return at


def started(runs, name):
    return [event["step"] for event in runs.events(name, "start")]


def test_a_lost_run_goes_on_from_memory_to_the_same_bits(runs, reference, shm, lose):
    for step in (7, 11):
        lose(step)
        with pytest.raises(Lost):
            runs.train("2bw", EMULATE, OFTEN, SELDOM)
        assert len(list(shm.glob("*/*/step-*"))) == 1, "the newest only"
        assert newest_step(runs.config("2bw", EMULATE)) == step - 1
    lose(None)
    assert runs.train("2bw", EMULATE, OFTEN, SELDOM)["step"] == 12
    assert started(runs, "2bw") == [0, 6, 10]
    assert runs.steps("2bw") == list(range(1, 13))
    assert_equal_weights(runs.weights("2bw"), reference.weights("2bw"))
    assert not list(shm.glob("*/*")), "given back: the disk has a newer one"
    kept = checkpoint.committed(runs.folder / "2bw/checkpoints")
    assert [path.name for path in kept] == ["step-00000012", "step-00000008"]


def test_the_memory_of_a_moved_run_comes_along_and_that_of_a_copied_one_stays(runs, reference, shm, lose):
    lose(7)
    with pytest.raises(Lost):
        runs.train("2bw", EMULATE, OFTEN, "checkpoint.every=0")
    lose(None)
    shutil.copytree(runs.folder / "2bw", runs.folder / "copied")
    runs.train("copied", EMULATE, OFTEN, "checkpoint.every=0")
    (runs.folder / "2bw").rename(runs.folder / "moved")
    runs.train("moved", EMULATE, OFTEN, "checkpoint.every=0")
    assert started(runs, "copied") == [0], "begun anew"
    assert started(runs, "moved") == [0, 6]
    assert_equal_weights(runs.weights("moved"), reference.weights("2bw"))
    assert not list(shm.glob("*/*")), "nothing of its old place is left"


def test_another_run_that_once_had_the_same_place_takes_no_memory(runs, reference, shm, lose):
    """As where two folders of runs are visited in turn, and `run.dir` is read from where one stands."""
    lose(7)
    for name in ("other", "2bw"):
        with pytest.raises(Lost):
            runs.train(name, EMULATE, OFTEN, "checkpoint.every=0")
    lose(None)
    shutil.rmtree(claim.memory_of(runs.folder / "other"))
    (runs.folder / "2bw").rename(runs.folder / "moved")
    config = runs.folder / "other/config.toml"
    config.write_text(config.read_text().replace(str(runs.folder / "other"), str(runs.folder / "2bw")))
    in_memory.follow(runs.folder / "other")
    assert not claim.memory_of(runs.folder / "other").exists()
    mine = claim.memory_of(runs.folder / "moved")
    mine.mkdir()  # what is here already stays
    in_memory.follow(runs.folder / "moved")
    assert not list(mine.iterdir())
    mine.rmdir()
    runs.train("moved", EMULATE, OFTEN, "checkpoint.every=0")
    assert started(runs, "moved") == [0, 6]
    assert_equal_weights(runs.weights("moved"), reference.weights("2bw"))


def test_an_end_at_a_step_that_is_in_memory_is_saved_on_disk(runs, shm):
    runs.train("2bw", EMULATE, OFTEN, "checkpoint.every=0", "train.steps=6")
    assert [path.name for path in checkpoint.committed(runs.folder / "2bw/checkpoints")] == ["step-00000006"]


def test_one_that_the_log_does_not_name_is_of_another_run(runs, reference, shm, lose):
    lose(7)
    with pytest.raises(Lost):
        runs.train("2bw", EMULATE, OFTEN, SELDOM)
    (left,) = shm.glob("*/*")
    shutil.copytree(left, runs.folder / "aside")
    shutil.rmtree(runs.folder / "2bw")
    with pytest.raises(Lost):  # begun anew, and as far as that
        runs.train("2bw", EMULATE, SELDOM)
    assert not left.exists()
    shutil.copytree(runs.folder / "aside", left)
    lose(None)
    runs.train("2bw", EMULATE, OFTEN, SELDOM)
    assert started(runs, "2bw") == [0], "begun anew"
    assert_equal_weights(runs.weights("2bw"), reference.weights("2bw"))


@pytest.mark.parametrize("harm", ["manifest.json", "stage-000.safetensors"])
def test_a_damaged_one_leaves_that_on_disk(runs, reference, shm, lose, harm):
    lose(11)
    with pytest.raises(Lost):
        runs.train("2bw", EMULATE, OFTEN, SELDOM)
    (damaged,) = shm.glob(f"*/*/step-*/{harm}")
    damaged.write_bytes(b"torn")
    lose(None)
    runs.train("2bw", EMULATE, OFTEN, SELDOM)
    assert started(runs, "2bw") == [0, 8]
    assert_equal_weights(runs.weights("2bw"), reference.weights("2bw"))


def test_a_memory_that_is_full_costs_a_word(runs, reference, shm, monkeypatch, capsys):
    commit = checkpoint.commit

    def full(root, *rest):
        if root.is_relative_to(shm):
            raise OSError(errno.ENOSPC, "No space left on device")
        return commit(root, *rest)

    monkeypatch.setattr(writer.checkpoint, "commit", full)
    assert runs.train("2bw", EMULATE, OFTEN, SELDOM, "train.disk_seconds=600")["step"] == 12
    assert_equal_weights(runs.weights("2bw"), reference.weights("2bw"))
    warned = [event["message"] for event in runs.events("2bw", "warning")]
    assert any("No space left" in text and "step 2" in text for text in warned), warned


def test_a_place_of_somebody_else_and_several_machines_are_refused(runs, shm):
    with pytest.raises(UserError, match="one machine, and these are on 2"):
        claim.claim_memory(runs.folder, 2)
    claim.claim_memory(runs.folder, 1)
    claim.memory_of(runs.folder).parent.chmod(0o755)
    with pytest.raises(UserError, match="not this user's alone"):
        claim.claim_memory(runs.folder, 1)
    shutil.rmtree(shm)
    with pytest.raises(UserError, match=r"need .*shm.* checkpoint.keep=1"):
        claim.claim_memory(runs.folder, 1)
