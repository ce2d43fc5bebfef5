"""Checkpoints in this machine's memory, between those on disk: a lost rank takes back less work, no disk is read.

They are checkpoints like the others, in a folder of the memory file system that belongs to one `run.dir`. A process
that dies leaves them; a machine that does takes them with it, and then those on disk are there. Only the newest is
kept. Invariant: one is resumed from only if the log of the run names its manifest, so that no other run, and no
trajectory that was rolled back, is taken for this one.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from slipstream.errors import CheckpointError
from slipstream.metrics.record import events_of
from slipstream.train import checkpoint
from slipstream.train.claim import last_started, memory_of
from slipstream.train.state import digest


def newest(folder: Path, say: Callable[[str], None]) -> tuple[Path, checkpoint.Manifest] | None:
    """The newest good one of this run."""
    for path in checkpoint.committed(memory_of(folder)):
        try:
            found = checkpoint.verify(path)
        except CheckpointError as error:
            say(f"{error} It was in memory; looking for another one.")
            continue
        if _named_by(folder, path):
            return path, found
    return None


def _named_by(folder: Path, path: Path) -> bool:
    """Whether the log of the run tells that it wrote the checkpoint."""
    sealed = digest(path / "manifest.json").sha256
    events = events_of(folder, "checkpoint")
    return any(
        event.get("step") == checkpoint.step_of(path) and event.get("memory") == sealed for event in events
    )


def follow(folder: Path) -> None:
    """Where this run was moved since it was started last, what it has in memory comes along."""
    last = last_started(folder)
    if last is None or Path(last.run.dir).exists():
        return
    before, now = memory_of(Path(last.run.dir)), memory_of(folder)
    if not now.exists() and any(_named_by(folder, path) for path in checkpoint.committed(before)):
        with suppress(OSError):
            before.rename(now)


def forget(folder: Path, but: Path | None = None) -> None:
    """Give the memory back, except for the checkpoint `but`."""
    root = memory_of(folder)
    if but is None:
        shutil.rmtree(root, ignore_errors=True)
        return
    checkpoint.sweep(root)
    for path in checkpoint.committed(root):
        if path != but:
            shutil.rmtree(path, ignore_errors=True)
