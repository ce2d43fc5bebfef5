"""A disk that is full for a moment holds nothing up; one that stays full, or a folder that is gone, is an error."""

from __future__ import annotations

import errno
import os
import shutil
from threading import Lock
from types import SimpleNamespace

import pytest
from tests.train.conftest import assert_equal_weights

from slipstream.errors import CheckpointError, DiskError, UserError
from slipstream.metrics import append
from slipstream.metrics.append import Appending
from slipstream.metrics.record import Recorder
from slipstream.train import writer as writers
from slipstream.train.writer import Leader, Writer


def full() -> OSError:
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class Disk:
    """`os.write` on a disk that has room for some bytes more, and for nothing until there is room again."""

    def __init__(self, room: int) -> None:
        self.lock = Lock()
        self.room: int | None = room

    def write(self, file, data):
        with self.lock:  # the log's thread writes while the test makes room
            if self.room is None:
                return os.write(file, data)
            if self.room == 0:
                raise full()
            count = os.write(file, bytes(data[: self.room]))
            self.room -= count
            return count

    def clear(self) -> None:
        with self.lock:
            self.room = None


@pytest.fixture
def disk(monkeypatch):
    found = Disk(room=10)
    monkeypatch.setattr(append, "os", SimpleNamespace(**{**vars(os), "write": found.write}))
    return found


def test_lines_wait_for_room_and_stay_whole(tmp_path, disk):
    told = []
    log = Appending(tmp_path / "log", 60.0, told.append)
    log.write("first line\nsecond line\n")
    log.write("third line\n")
    assert not log.written
    assert (tmp_path / "log").read_text() == "first line"
    disk.clear()
    log.write("fourth line\n")
    assert log.written
    assert (tmp_path / "log").read_text() == "first line\nsecond line\nthird line\nfourth line\n"
    assert "No space left on device" in told[0]
    assert "can be written again" in told[1]
    log.close()


def test_a_disk_that_stays_full_is_an_error(tmp_path, disk):
    log = Appending(tmp_path / "log", 0.0)
    with pytest.raises(OSError, match="No space left"):
        log.write("a longer line than there is room for\n")


def test_events_are_counted_when_they_are_on_disk(tmp_path, disk):
    """A checkpoint is committed when its step's event is written, not when it was told."""
    recorder = Recorder(tmp_path, patience_seconds=60.0)
    recorder.write("step", 1)
    assert not recorder.wait_for(1, 0.05)
    disk.clear()
    assert recorder.wait_for(1, 60.0)


def test_a_run_goes_on_though_its_log_found_no_room(runs, reference, monkeypatch):
    disk = Disk(room=3000)
    monkeypatch.setattr(append, "os", SimpleNamespace(**{**vars(os), "write": disk.write}))
    load = writers.write_piece

    def mend(*args):  # with the checkpoint of step 8
        if args[0].name.startswith(".draft-step-00000008"):
            disk.clear()
        return load(*args)

    monkeypatch.setattr(writers, "write_piece", mend)
    assert runs.train("run", "pipeline.schedule=emulate")["reason"] == "finished"
    assert disk.room is None
    assert_equal_weights(runs.weights("run"), reference.weights("2bw"))
    assert runs.steps("run") == list(range(1, 13))


@pytest.mark.parametrize("what", ["write_piece", "commit"])
def test_a_checkpoint_waits_for_room(tmp_path, monkeypatch, what):
    monkeypatch.setattr(writers, "RETRY_SECONDS", 0.01)
    place = writers if what == "write_piece" else writers.checkpoint
    original, tries, told = getattr(place, what), [], []

    def sometimes(*args):
        tries.append(1)
        if len(tries) < 3:
            raise CheckpointError("full") from full()
        return original(*args)

    monkeypatch.setattr(place, what, sometimes)
    leader = Leader(("stage-000",), 2, lambda step, timeout: True, lambda step, path: None)
    root = tmp_path / "checkpoints"
    writer = Writer(root, "n", "stage-000", lambda step, text: told.append(text), leader, 60.0, 60.0)
    writer.submit(4, {"master": {}}, {})
    writer.finish()
    assert (root / "step-00000004" / "manifest.json").exists()
    assert len(told) == 1
    assert "waits" in told[0]


def test_a_disk_that_stayed_full_is_waited_for_once(tmp_path, monkeypatch):
    """Each checkpoint would wait as long again, and a run at its end for all of them. With room it counts anew."""
    clock = SimpleNamespace(now=0.0, left=True)
    monkeypatch.setattr(
        writers, "time", SimpleNamespace(monotonic=lambda: clock.now, sleep=lambda seconds: None)
    )
    original, tries = writers.write_piece, {}

    def never(draft, *args):
        tries[draft.name[:20]] = tries.get(draft.name[:20], 0) + 1
        if clock.left:
            clock.now += 1.0
            raise CheckpointError("full") from full()
        return original(draft, *args)

    monkeypatch.setattr(writers, "write_piece", never)
    monkeypatch.setattr(writers, "RETRY_SECONDS", 0.0)
    leader = Leader(("stage-000",), 9, lambda step, timeout: True, lambda step, path: None)
    root = tmp_path / "checkpoints"
    writer = Writer(root, "n", "stage-000", lambda step, text: None, leader, 60.0, disk_seconds=10.0)
    for step in (4, 8):
        writer.submit(step, {"master": {}}, {})
        with pytest.raises(CheckpointError, match="full"):
            writer.finish()
    assert tries == {".draft-step-00000004": 10, ".draft-step-00000008": 1}
    clock.left = False
    writer.submit(12, {"master": {}}, {})
    writer.finish()
    clock.left = True
    writer.submit(16, {"master": {}}, {})
    with pytest.raises(CheckpointError, match="full"):
        writer.finish()
    assert tries[".draft-step-00000016"] == 10


def test_the_leader_waits_as_long_as_the_others_try(tmp_path, monkeypatch):
    """With train.timeout_seconds below train.disk_seconds it gave up on a rank that was still waiting for room."""
    clock = SimpleNamespace(now=0.0)

    def sleep(seconds):
        clock.now += 1.0
        if clock.now > 30.0:
            draft = tmp_path / "checkpoints" / ".draft-step-00000004-n"
            (draft / "stage-001.json").write_text('{"files": {}}')

    monkeypatch.setattr(writers, "time", SimpleNamespace(monotonic=lambda: clock.now, sleep=sleep))
    leader = Leader(("stage-000", "stage-001"), 2, lambda step, timeout: True, lambda step, path: None)
    writer = Writer(tmp_path / "checkpoints", "n", "stage-000", lambda step, text: None, leader, 10.0, 60.0)
    writer.submit(4, {"master": {}}, {})
    writer.finish()
    assert clock.now > 30.0


def test_a_run_whose_folder_was_removed_ends_soon_and_says_so(runs, monkeypatch):
    """It was noticed at the end only, and the checkpoints made the folder again."""
    monkeypatch.setattr(append, "LOOK_SECONDS", 0.0)
    folder = runs.folder / "run"
    write = Recorder.write

    def remove(self, event, step, **values):
        if (event, step) == ("step", 6):
            shutil.rmtree(folder)
        return write(self, event, step, **values)

    monkeypatch.setattr(Recorder, "write", remove)
    with pytest.raises(DiskError, match=r"events\.jsonl' was removed or replaced while the run wrote it"):
        runs.train("run", "pipeline.schedule=emulate", "train.steps=100000")
    assert not folder.exists()


def test_a_disk_that_fills_up_for_good_is_still_a_clear_error(runs, monkeypatch):
    disk = Disk(room=3000)
    monkeypatch.setattr(append, "os", SimpleNamespace(**{**vars(os), "write": disk.write}))
    with pytest.raises(UserError, match=r"No space left on device.*the same command goes on from the newest"):
        runs.train("run", "pipeline.schedule=emulate", "train.disk_seconds=0.2", "train.steps=100000")
