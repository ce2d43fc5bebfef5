"""Copies of checkpoints at a URL: whole or not there, fetched where a disk was lost, and the way between machines."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.train.conftest import TINY, assert_equal_weights, make_data

import warm
from slipstream.errors import CheckpointError, UserError
from slipstream.train import checkpoint
from slipstream.train.master import load_master
from slipstream.train.remote import Copy, Remote
from slipstream.train.url import check
from slipstream.train.writer import Leader, Writer

EMULATE = "pipeline.schedule=emulate"


@pytest.fixture(params=["file", "memory"])
def place(request, tmp_path) -> str:
    return f"file://{tmp_path}/copies" if request.param == "file" else f"memory://{tmp_path.name}"


def written(run: Path, remote: Remote | None, *steps: int, nonce: str = "ab12", keep: int = 9) -> None:
    """A run of one rank that saves these steps, and then logs that it did."""
    run.mkdir(exist_ok=True)
    failures: list[str] = []

    def committed(step: int, path: Path) -> None:
        with (run / "events.jsonl").open("a") as log:
            log.write(json.dumps({"event": "step", "step": step, "loss": 1.0}) + "\n")

    leader = Leader(("stage-000",), keep, lambda step, seconds: True, committed)
    writer = Writer(
        run / "checkpoints",
        nonce,
        "stage-000",
        lambda step, text: failures.append(text),
        leader,
        remote=remote,
    )
    for step in steps:
        writer.submit(step, {"master": {"w": torch.full((3,), float(step))}}, {"config": {}})
    writer.finish()
    assert not failures


def test_every_checkpoint_has_a_copy_and_as_many_are_kept(tmp_path, place):
    remote = Remote(place)
    assert list(remote.copies()) == []
    written(tmp_path / "run", remote, 4, 8, 12, keep=2)
    assert list(remote.copies()) == [Copy(12, "ab12"), Copy(8, "ab12")]
    assert [path.name for path in checkpoint.committed(tmp_path / "run/checkpoints")] == [
        "step-00000012",
        "step-00000008",
    ]


def test_a_lost_disk_gets_the_newest_copy_and_its_log(tmp_path, place):
    remote, said = Remote(place), []
    written(tmp_path / "run", remote, 4, 8)
    new = tmp_path / "new"
    new.mkdir()
    copy = remote.restore(new / "checkpoints", -1, said.append)
    assert copy == Copy(8, "ab12")
    assert [path.name for path in checkpoint.committed(new / "checkpoints")] == ["step-00000008"]
    checkpoint.verify(new / "checkpoints/step-00000008")
    assert "step 8 was fetched" in said[0]
    assert remote.restore(new / "checkpoints", 8, said.append) is None  # it is there
    remote.restore_log(copy, new)
    assert [json.loads(line)["step"] for line in (new / "events.jsonl").read_text().splitlines()] == [4, 8]


def test_a_log_that_goes_as_far_stays(tmp_path, place):
    remote = Remote(place)
    written(tmp_path / "run", remote, 4)
    new = tmp_path / "new"
    new.mkdir()
    (new / "events.jsonl").write_text('{"event": "step", "step": 4, "loss": 2.0}\n')
    remote.restore_log(Copy(4, "ab12"), new)
    assert "2.0" in (new / "events.jsonl").read_text()
    (new / "events.jsonl").write_text('{"event": "step", "step": 3, "loss": 2.0}\n')
    remote.restore_log(Copy(4, "ab12"), new)
    assert "1.0" in (new / "events.jsonl").read_text()
    assert len(list(new.glob("events-*.jsonl"))) == 1, "the one before is kept"


def test_what_is_not_whole_is_no_copy_and_a_damaged_one_is_passed_over(tmp_path, place, monkeypatch):
    monkeypatch.setattr("slipstream.train.remote.PAUSE_SECONDS", 0.0)
    remote, said = Remote(place), []
    run, new = tmp_path / "run", tmp_path / "new"
    written(run, remote, 4, 8)
    pieces = run / "checkpoints/step-00000008"
    remote.send(Copy(12, "cd34"), pieces / "stage-000.safetensors", pieces / "stage-000.json")
    assert [copy.step for copy in remote.copies()] == [8, 4]
    torn = tmp_path / "stage-000.safetensors"
    torn.write_bytes((pieces / torn.name).read_bytes()[:-1])
    remote.send(Copy(8, "ab12"), torn)
    assert remote.restore(new / "checkpoints", -1, said.append) == Copy(4, "ab12")
    assert [path.name for path in checkpoint.committed(new / "checkpoints")] == ["step-00000004"]
    assert "truncated" in said[0]
    assert "step 4 was fetched" in said[1]


def test_what_a_rollback_forgets_has_no_copy_either(tmp_path, place):
    """Also where no earlier copy is there: a start would fetch what the run went back from."""
    remote = Remote(place)
    written(tmp_path / "run", None, 4)
    written(tmp_path / "run", remote, 8, 12)
    assert checkpoint.forget_from(tmp_path / "run/checkpoints", 8)
    remote.forget_from(8)
    assert list(remote.copies()) == []


def test_a_checkpoint_without_a_copy_is_sent_later(tmp_path, place):
    remote = Remote(place)
    written(tmp_path / "run", None, 4)
    path = tmp_path / "run/checkpoints/step-00000004"
    remote.catch_up(path, "ef56")
    remote.catch_up(path, "7890")
    assert list(remote.copies()) == [Copy(4, "ef56")]


def test_another_machine_fetches_the_leaders_checkpoint_and_no_other(tmp_path, place):
    remote = Remote(place)
    written(tmp_path / "run", remote, 4)
    leaders = tmp_path / "run/checkpoints/step-00000004"
    sha256 = checkpoint.digest(leaders / "manifest.json").sha256
    other = tmp_path / "other/checkpoints/step-00000004"
    written(tmp_path / "other", None, 4, nonce="0000")  # of the same step, and not the same
    remote.bring(other, sha256)
    assert checkpoint.digest(other / "manifest.json").sha256 == sha256
    checkpoint.verify(other)
    with pytest.raises(CheckpointError, match="no copy of 'step-00000004'"):
        remote.bring(other, "0" * 64)


def test_a_place_that_cannot_be_written_is_refused_before_the_start(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"checkpoint\.remote = 'file://.*' cannot be written"):
        check(f"file://{tmp_path}/file/below")
    with pytest.raises(UserError, match=r"checkpoint\.remote = 'nowhere://x' cannot be used"):
        check("nowhere://x")


def test_a_store_that_fails_costs_the_copy_and_not_the_checkpoint(tmp_path, monkeypatch):
    monkeypatch.setattr("slipstream.train.remote.PAUSE_SECONDS", 0.0)
    remote, failures = Remote(f"file://{tmp_path}/copies"), []

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError("no more")

    monkeypatch.setattr(remote._files, "put_file", refuse)
    run = tmp_path / "run"
    run.mkdir()
    leader = Leader(("stage-000",), 2, lambda step, seconds: True, lambda step, path: None)
    writer = Writer(
        run / "checkpoints",
        "ab12",
        "stage-000",
        lambda step, text: failures.append(text),
        leader,
        remote=remote,
    )
    writer.submit(4, {"master": {"w": torch.zeros(3)}}, {"config": {}})
    writer.finish()
    assert len(failures) == 1
    assert "has no copy" in failures[0]
    assert "no more" in failures[0]
    checkpoint.verify(run / "checkpoints/step-00000004")


def test_a_run_whose_disk_is_lost_goes_on_to_the_same_bits(runs, reference):
    """Nothing is left but the copies, and of these not the last: twelve updates in all, the last four again."""
    url = f"checkpoint.remote=file://{runs.folder}/copies"
    runs.train("2bw", EMULATE, url)
    shutil.rmtree(runs.folder / "2bw")
    Remote(f"file://{runs.folder}/copies").forget_from(12)
    assert runs.train("2bw", EMULATE, url)["step"] == 12
    assert runs.steps("2bw") == list(range(1, 13))
    assert runs.events("2bw", "resume") or runs.events("2bw", "start")[-1]["resumed"]
    assert_equal_weights(runs.weights("2bw"), reference.weights("2bw"))


def test_a_checkpoint_that_is_damaged_on_disk_comes_from_its_copy(runs, reference):
    url = f"checkpoint.remote=file://{runs.folder}/copies"
    runs.train("2bw", EMULATE, url)
    Remote(f"file://{runs.folder}/copies").forget_from(12)
    root = runs.folder / "2bw/checkpoints"
    shutil.rmtree(root / "step-00000012")
    for name in ("stage-000.safetensors", "manifest.json"):
        (root / "step-00000008" / name).write_bytes(b"torn")
    assert runs.train("2bw", EMULATE, url)["step"] == 12
    assert runs.steps("2bw") == list(range(1, 13))
    assert_equal_weights(runs.weights("2bw"), reference.weights("2bw"))


def test_a_url_with_another_run_is_refused_and_nothing_of_it_stays(runs):
    url = f"checkpoint.remote=file://{runs.folder}/copies"
    runs.train("one", EMULATE, url, "train.steps=4")
    with pytest.raises(UserError, match=r"optim\.lr(.|\n)*one URL is for one run"):
        runs.train("two", EMULATE, url, "train.steps=4", "optim.lr=0.02")
    assert checkpoint.committed(runs.folder / "two/checkpoints") == []
    assert runs.steps("two") == []


def test_two_machines_without_a_shared_disk(tmp_path, reference):
    """Each rank as torchrun starts it, in a place of its own: they meet at the URL, and resume from there."""
    data = make_data(tmp_path / "data")
    common = [*TINY, f"data.path={data}", "pipeline.cutover=2", f"checkpoint.remote=file://{tmp_path}/copies"]

    def trained(stages: int, run: str, *more: str) -> list[str]:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        ranks = []
        for rank in range(stages):
            place = tmp_path / f"machine-{rank}"
            place.mkdir(exist_ok=True)
            torchruns = {
                "RANK": rank, "WORLD_SIZE": stages, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1,
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
            }  # fmt: skip
            environment = {**os.environ, **{key: str(value) for key, value in torchruns.items()}}
            words = [sys.executable, "-m", "impatient", "train", *common, f"run.dir={run}"]
            words += [f"pipeline.stages={stages}", *more]
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
            ranks.append(warm.Popen(words, env=environment, cwd=place, **pipes))
        said = [rank.communicate(timeout=240)[0] for rank in ranks]
        assert [rank.returncode for rank in ranks] == [0] * stages, said
        return said

    trained(2, "run")
    first = tmp_path / "machine-0/run"
    assert [path.name for path in checkpoint.committed(first / "checkpoints")] == [
        "step-00000012",
        "step-00000008",
    ]
    assert_equal_weights(load_master(first).weights, reference.weights("2bw"))
    remote = Remote(f"file://{tmp_path}/copies")
    assert [copy.step for copy in remote.copies()] == [12, 8]
    left = [path for path in (tmp_path / "machine-1/run").rglob("*") if path.is_file()]
    assert not [path for path in left if path.suffix == ".safetensors"], left

    # The last checkpoint is lost everywhere, and the leader's whole disk: all of it comes from the other copy.
    remote.forget_from(12)
    shutil.rmtree(first)
    trained(2, "run")
    assert_equal_weights(load_master(first).weights, reference.weights("2bw"))
