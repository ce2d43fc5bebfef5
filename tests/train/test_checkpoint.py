"""Checkpoints on disk: exact round trip, atomic commit, damage found and named, nothing ever unpickled."""

from __future__ import annotations

import json
import os
import pickle
import resource
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from slipstream.errors import CheckpointError
from slipstream.kernels.halves import split
from slipstream.pipeline.compact import Halves
from slipstream.train import checkpoint
from slipstream.train.health import fingerprint
from slipstream.train.manifest import sealed
from slipstream.train.state import Copier, digest, flatten, unflatten
from slipstream.train.writer import Leader, Writer


def state(seed: int, names=("layers.0.weight", "head/odd~name")) -> dict:
    torch.manual_seed(seed)
    weights = {name: torch.randn(3, 5) for name in names}
    return {
        "format": 1,
        "group": seed,
        "skipped": 0,
        "master": weights,
        "banks": {str(seed): weights, str(seed + 1): {k: v.bfloat16() for k, v in weights.items()}},
        "optimizer": {name: {"step": torch.tensor(3.0), "exp_avg": weights[name].t()} for name in names},
        "hyper": {name: {"lr": 0.1 + 0.2, "betas": [0.9, 0.95], "foreach": None} for name in names},
        "correction": {},
        "buffers": {},
    }


def assert_same(a, b):
    if isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)
    elif isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_same(a[key], b[key])
    else:
        assert a == b


def writers(root: Path, pieces: int, keep: int = 2, logged=lambda step, timeout: True):
    """One writer per piece, as the ranks of a run have them; the first is the leader."""
    names = tuple(f"stage-{index:03d}" for index in range(pieces))
    events, failures = [], []
    leader = Leader(names, keep, logged, lambda step, path: events.append((step, path.name)))
    made = [
        Writer(root, "n0", name, lambda step, text: failures.append(text), leader if i == 0 else None, 100.0)
        for i, name in enumerate(names)
    ]
    return made, events, failures


def save(root: Path, *steps: int, keep: int = 5) -> None:
    (writer,), _, _ = writers(root, 1, keep)
    for step in steps:
        writer.submit(step, state(step), {"config": {"a": 1}})
    writer.finish()


def test_round_trip_is_exact(tmp_path):
    save(tmp_path, 7)
    path = checkpoint.locate(tmp_path)
    found = checkpoint.verify(path)
    assert (found.step, found.meta) == (7, {"config": {"a": 1}})
    (tree,) = checkpoint.read(path, found)
    assert_same(tree, state(7))


def test_an_older_checkpoint_is_taken_with_a_word(tmp_path, caplog):
    save(tmp_path, 7, 8)
    newest = checkpoint.locate(tmp_path)
    next(newest.glob("*.safetensors")).write_bytes(b"")
    assert checkpoint.locate(tmp_path) == checkpoint.folder_of(tmp_path, 7)
    assert "is truncated or padded: 0 bytes" in caplog.text
    assert "Looking for an older checkpoint" in caplog.text


def test_only_wanted_names_are_read(tmp_path):
    save(tmp_path, 7)
    path = checkpoint.locate(tmp_path)
    (tree,) = checkpoint.read(path, checkpoint.manifest(path), lambda name: name == "head/odd~name")
    assert list(tree["master"]) == ["head/odd~name"]
    assert list(tree["banks"]["8"]) == ["head/odd~name"]
    assert tree["optimizer"]["layers.0.weight"] == {}


def test_flatten_refuses_what_is_neither_tensor_nor_json():
    with pytest.raises(CheckpointError, match="optimizer/w/hook"):
        flatten({"optimizer": {"w": {"hook": object()}}})
    tensors, tree = flatten({"a": {"b": torch.ones(2)}, "c": None})
    assert unflatten(tree, tensors.__getitem__).keys() == {"a", "c"}


def test_snapshot_is_not_touched_by_later_updates():
    tree = state(1)
    copy = Copier(torch.device("cpu")).copy(tree).complete()
    tree["master"]["layers.0.weight"].zero_()
    assert_same(copy["master"], state(1)["master"])


def test_commit_waits_for_every_piece_and_for_the_log(tmp_path):
    ready = threading.Event()
    (first, second), events, _ = writers(tmp_path, 2, logged=lambda step, timeout: ready.wait(timeout))
    first.submit(4, state(4, ("a",)), {})
    time.sleep(0.2)
    assert checkpoint.committed(tmp_path) == []
    second.submit(4, state(4, ("b",)), {})
    second.finish()
    time.sleep(0.2)
    assert checkpoint.committed(tmp_path) == []  # the pieces are there, the log is not
    ready.set()
    first.finish()
    assert events == [(4, "step-00000004")]
    trees = checkpoint.read(tmp_path / "step-00000004", checkpoint.verify(tmp_path / "step-00000004"))
    assert [list(tree["master"]) for tree in trees] == [["a"], ["b"]]


def test_a_leader_may_commit_the_moment_the_last_piece_is_there(tmp_path, monkeypatch):
    """The folder has its final name then, and whoever wrote the piece must need nothing more at the old one."""
    (first, second), events, failures = writers(tmp_path, 2)
    plain, piece = Path.rename, f"{second.piece}.json"

    def rename(path, target):
        found = plain(path, target)
        if Path(target).name == piece:
            first.finish()
        return found

    monkeypatch.setattr(Path, "rename", rename)
    first.submit(4, state(4, ("a",)), {})
    second.submit(4, state(4, ("b",)), {})
    second.finish()
    assert (events, failures) == ([(4, "step-00000004")], [])


def test_a_full_queue_lets_the_loop_write_the_events_a_commit_waits_for(tmp_path):
    """With checkpoints faster than events, the loop would wait for the writer and the writer for the loop."""
    logged: set[int] = set()

    def wait(step: int, timeout: float) -> bool:
        deadline = time.monotonic() + timeout
        while step not in logged and time.monotonic() < deadline:
            time.sleep(0.005)
        return step in logged

    (writer,), events, failures = writers(tmp_path, 1, keep=9, logged=wait)
    for step in range(1, 7):
        writer.submit(step, state(step), {}, lambda step=step: logged.update(range(step)))
    logged.update(range(7))
    writer.finish()
    assert [step for step, _ in events] == [1, 2, 3, 4, 5, 6]
    assert failures == []


def test_retention_keeps_the_newest(tmp_path):
    save(tmp_path, 1, 2, 10, 11, keep=2)
    assert [path.name for path in checkpoint.committed(tmp_path)] == ["step-00000011", "step-00000010"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000010", "step-00000011"]


def test_an_old_checkpoint_that_cannot_be_removed_does_not_hold_up_the_loop(tmp_path, monkeypatch):
    (writer,), events, failures = writers(tmp_path, 1, keep=1)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.shutil, "rmtree", lambda *args, **options: None)
        writer.submit(1, state(1), {})
        writer.submit(2, state(2), {})
        writer.finish()
        assert (tmp_path / ".draft-removed-step-00000001").exists()  # half removed: in the way of the next
    (tmp_path / "step-00000001").mkdir()
    (tmp_path / "step-00000001" / "manifest.json").write_text("")
    for step in (3, 4, 5):
        writer.submit(step, state(step), {})
    writer.finish()
    assert [step for step, _ in events] == [1, 2, 3, 4, 5]
    assert all("could not be removed" in text for text in failures)
    checkpoint._remove(tmp_path, [tmp_path / "step-00000009"])  # gone already: somebody was quicker


def test_an_error_that_ends_the_thread_is_raised_in_the_loop(tmp_path):
    """A log that cannot be written, say: the loop must not wait for a thread that is no more."""

    def full(step, path):
        raise OSError(28, "No space left on device")

    names = ("stage-000",)
    writer = Writer(tmp_path, "n0", names[0], lambda *_: None, Leader(names, 2, lambda *_: True, full), 5.0)

    def submit_all():
        for step in range(1, 9):
            writer.submit(step, state(step), {})

    with pytest.raises(OSError, match="No space"):
        submit_all()
    with pytest.raises(OSError, match="No space"):
        writer.finish()
    assert checkpoint.committed(tmp_path)


def _truncate(path: Path):
    file = path / "stage-000.safetensors"
    file.write_bytes(file.read_bytes()[:-9])


def _flip(path: Path):
    file = path / "stage-000.safetensors"
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)


def _lose(path: Path):
    (path / "stage-000.json").unlink()


def _edit_manifest(path: Path):
    file = path / "manifest.json"
    file.write_text(file.read_text().replace('"step": 9', '"step": 8'))


def _garble_manifest(path: Path):
    (path / "manifest.json").write_text("{")


def _foreign(path: Path):
    (path / "manifest.json").write_text('{"format": "other"}')


def _no_manifest(path: Path):
    (path / "manifest.json").unlink()


DAMAGE = {
    _truncate: "truncated",
    _flip: "corrupted",
    _lose: "missing",
    _edit_manifest: "seal",
    _garble_manifest: "damaged",
    _foreign: "not written by slipstream",
    _no_manifest: "no manifest",
}


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda f: f.__name__)
def test_damage_is_named_and_the_newest_good_one_is_used(tmp_path, damage):
    save(tmp_path, 3, 9)
    damage(tmp_path / "step-00000009")
    reports: list[str] = []
    found = checkpoint.newest_good(tmp_path, reports.append)
    assert found is not None
    assert found[1].step == 3
    assert len(reports) == 1
    assert DAMAGE[damage] in reports[0]
    assert "step-00000009" in reports[0]
    save(tmp_path, 9)  # the replayed run reaches step 9 again
    again = checkpoint.newest_good(tmp_path, reports.append)
    assert again is not None
    assert again[1].step == 9


def test_no_good_checkpoint_is_an_error_and_no_checkpoint_is_not(tmp_path):
    assert checkpoint.newest_good(tmp_path, pytest.fail) is None
    save(tmp_path, 3)
    _flip(tmp_path / "step-00000003")
    for _ in range(2):  # the second start would begin the run again, over its log
        with pytest.raises(CheckpointError, match=r"No checkpoint in .* is usable"):
            checkpoint.newest_good(tmp_path, lambda text: None)
    (aside,) = tmp_path.iterdir()
    aside.rename(tmp_path / "elsewhere")
    assert checkpoint.newest_good(tmp_path, pytest.fail) is None


def test_interrupted_drafts_are_never_taken_for_checkpoints(tmp_path):
    save(tmp_path, 3)
    (first, _), _, _ = writers(tmp_path, 2)
    first.timeout_seconds = 0.1
    first.submit(5, state(5), {})
    with pytest.raises(CheckpointError, match="did not arrive"):
        first.finish()
    (tmp_path / ".draft-step-00000006-old").mkdir()
    found = checkpoint.newest_good(tmp_path, pytest.fail)
    assert found is not None
    assert found[1].step == 3
    checkpoint.sweep(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000003"]


def test_a_full_disk_loses_no_earlier_checkpoint(tmp_path):
    save(tmp_path, 3)
    (writer,), events, failures = writers(tmp_path, 1)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limit[1]))  # writing beyond 100 bytes of a file fails
    try:
        writer.submit(4, state(4), {})
        with pytest.raises(CheckpointError, match="could not be written"):
            writer.finish()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert events == []
    assert "Earlier checkpoints are untouched" in failures[0]
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000003"]
    checkpoint.verify(tmp_path / "step-00000003")
    writer.submit(5, state(5), {})  # space again: the same writer goes on
    writer.finish()
    assert events == [(5, "step-00000005")]


def test_a_failing_rank_tells_the_leader(tmp_path):
    (first, second), events, failures = writers(tmp_path, 2)
    first.submit(4, state(4, ("a",)), {})
    second.submit(4, {"optimizer": {"w": {"hook": object()}}}, {})
    with pytest.raises(CheckpointError, match="neither a tensor nor JSON"):
        first.finish()
    assert events == []
    assert len(failures) == 2


def test_why_a_rank_failed_is_read_when_it_is_whole(tmp_path, monkeypatch):
    """The leader looks for it all the time, and found an empty file."""
    plain = Path.write_text

    def slowly(path, text, **options):
        if "neither a tensor" in text:
            path.touch()
            time.sleep(0.5)
        return plain(path, text, **options)

    monkeypatch.setattr(Path, "write_text", slowly)
    test_a_failing_rank_tells_the_leader(tmp_path)


class Bomb:
    def __init__(self, target: Path):
        self.target = target

    def __reduce__(self):
        return os.mkdir, (str(self.target),)


def test_a_malicious_checkpoint_runs_nothing(tmp_path):
    target = tmp_path / "it-ran"
    payload = pickle.dumps(Bomb(target))
    root = tmp_path / "checkpoints"
    save(root, 3)
    path = root / "step-00000003"
    (path / ".metadata").write_bytes(payload)
    manifest = (path / "manifest.json").read_text()
    for name in ("stage-000.safetensors", "stage-000.json"):
        good = (path / name).read_bytes()
        (path / name).write_bytes(payload)
        body = json.loads(manifest)
        body.pop("seal")
        body["files"][name] = {"bytes": len(payload), "sha256": digest(path / name).sha256}
        (path / "manifest.json").write_text(json.dumps(sealed(body)))
        found = checkpoint.verify(path)  # the attacker's checksums are right
        with pytest.raises(CheckpointError, match="damaged"):
            checkpoint.read(path, found)
        (path / name).write_bytes(good)
    assert not target.exists()


def test_a_manifest_cannot_point_outside_its_folder(tmp_path):
    save(tmp_path, 3)
    file = tmp_path / "step-00000003" / "manifest.json"
    body = json.loads(file.read_text())
    body.pop("seal")
    body["pieces"] = ["../../secret"]
    file.write_text(json.dumps(sealed(body)))
    with pytest.raises(CheckpointError, match="outside its folder"):
        checkpoint.manifest(tmp_path / "step-00000003")


@pytest.mark.parametrize("change", ["files", "pieces", "meta", "step", "unlisted"])
def test_a_sealed_manifest_that_is_not_ours_is_named_and_an_older_checkpoint_used(tmp_path, change):
    save(tmp_path, 3)
    save(tmp_path, 5)
    file = tmp_path / "step-00000005" / "manifest.json"
    body = json.loads(file.read_text())
    body.pop("seal")
    if change == "unlisted":
        body["files"].pop("stage-000.json")
    else:
        body.pop(change)
    file.write_text(json.dumps(sealed(body)))
    told: list[str] = []
    found = checkpoint.newest_good(tmp_path, told.append)
    assert found is not None
    assert found[0].name == "step-00000003"
    assert "manifest.json" in told[0]


def test_no_unpickling_in_the_package():
    """The laws above hold for these files; this one keeps the whole load path that way."""
    source = Path(checkpoint.__file__).parents[1]
    for folder in ("train", "data", "models", "config"):
        for file in (source / folder).rglob("*.py"):
            text = file.read_text()
            for word in ("import pickle", "torch.load(", "weights_only=False", "trust_remote_code=True"):
                assert word not in text, f"{file} uses {word}"


def test_a_master_in_halves_is_copied_as_it_is_and_saved_whole():
    """A capture of a compact master: the halves travel, and both a checkpoint and a checksum are of the whole."""
    plain = state(3)
    compact = plain | {"master": {}}
    for name, weight in plain["master"].items():
        found = Halves(torch.empty(3, 5, dtype=torch.bfloat16), torch.empty(3, 5, dtype=torch.int16))
        split([weight], [found.high], [found.low])
        compact["master"][name] = found
    assert_same(Copier(torch.device("cpu")).copy(compact).complete()["master"], plain["master"])
    assert fingerprint(compact, ["head/odd~name"]) == fingerprint(plain, ["head/odd~name"])


def test_two_threads_may_point_at_the_best_at_one_time(tmp_path):
    paths = [tmp_path / "step-00000004", tmp_path / "step-00000008"]
    for path in paths:
        path.mkdir()
    with ThreadPoolExecutor(2) as threads:
        for _ in range(500):
            list(threads.map(checkpoint.point_at, paths))
    assert (tmp_path / "best").readlink().name in {path.name for path in paths}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best", *sorted(path.name for path in paths)]
