"""Checkpoints written behind the training loop's back, by one thread per rank.

Invariant: the leader commits when every piece is there and every event up to that step is in events.jsonl, so cutting
the log back on resume never loses a step. A failed attempt (a full disk, a lost rank) removes its own draft, is
reported, and leaves every earlier checkpoint alone.
"""

from __future__ import annotations

import contextlib
import json
import queue
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from slipstream.errors import CheckpointError
from slipstream.metrics.append import MOMENTARY
from slipstream.train import checkpoint
from slipstream.train.manifest import Digest
from slipstream.train.remote import Copy, Remote
from slipstream.train.state import Snapshot, digest, write_piece

POLL_SECONDS = 0.02
RETRY_SECONDS = 0.5
CLOSING_SECONDS = 1.0
PIECE_FILES = (".safetensors", ".json")  # in the order of writing: a .json says that the piece is whole


@dataclass(frozen=True)
class Leader:
    """What only the committing rank needs."""

    pieces: tuple[str, ...]
    keep: int
    logged: Callable[[int, float], bool]  # waits until the events up to a step are written
    committed: Callable[[int, Path], None]
    protected: Callable[[], int | None] = lambda: None  # a step that is kept beside the newest


@dataclass
class Writer:
    """One rank's writer thread. `submit` hands over a snapshot; `finish` waits for all of them."""

    root: Path
    nonce: str
    piece: str
    failed: Callable[[int, str], None]
    leader: Leader | None = None
    timeout_seconds: float = 600.0
    disk_seconds: float = 0.0  # how long a full disk is tried again
    remote: Remote | None = None  # a copy of every checkpoint
    shared: bool = True  # all ranks see one `root`; else pieces come to the leader by way of the copy
    # One snapshot may wait while another is written; a third holds up the loop rather than fill the memory.
    _jobs: queue.Queue = field(default_factory=lambda: queue.Queue(maxsize=1))
    _thread: threading.Thread | None = None
    _last_failure: CheckpointError | None = None
    _broken: Exception | None = None  # what ended the thread: nothing of this kind is expected
    _closed: threading.Event = field(default_factory=threading.Event)
    _full_since: float | None = None  # when a write first found no room, until one finds some

    def submit(
        self,
        step: int,
        tree: Snapshot | dict[str, Any],
        meta: dict[str, Any],
        meanwhile: Callable[[], None] = lambda: None,
    ) -> None:
        """Hand over a snapshot. While there is no room for it `meanwhile` is called: the snapshot before it may be
        waiting for events that only the caller can write."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="checkpoint-writer", daemon=True)
            self._thread.start()
        self._hand_over((step, tree, meta), meanwhile)

    def _hand_over(self, job: Any, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Nobody takes anything from a thread that ended with an error: it is raised here."""
        while self._broken is None:
            try:
                return self._jobs.put(job, timeout=POLL_SECONDS)
            except queue.Full:
                meanwhile()
        raise self._broken

    def finish(self) -> None:
        """Wait for everything submitted. Raises if the newest attempt failed: then the last state is not
        safe.
        """
        if self._thread is not None:
            self._hand_over(None)
            self._thread.join()
            self._thread = None
        if self._broken is not None:
            raise self._broken
        if self._last_failure is not None:
            raise self._last_failure

    def close(self) -> None:
        """After a failure of the run: a moment for what is under way, then nothing more is committed."""
        if self._thread is not None:
            with contextlib.suppress(queue.Full):
                self._jobs.put(None, timeout=CLOSING_SECONDS)
            self._thread.join(CLOSING_SECONDS)
        self._closed.set()

    def _work(self) -> None:
        try:
            while (job := self._jobs.get()) is not None:
                step, tree, meta = job
                try:
                    self._save(step, tree, meta)
                    self._last_failure = None
                except CheckpointError as error:
                    self._last_failure = error
                    if self._closed.is_set():
                        return
                    text = f"Checkpoint of step {step} failed: {error} Earlier checkpoints are untouched."
                    self.failed(step, text)
        except Exception as error:
            self._broken = error

    def _save(self, step: int, given: Snapshot | dict[str, Any], meta: dict[str, Any]) -> None:
        tree: dict[str, Any] = given.complete() if isinstance(given, Snapshot) else given
        # What is handed in is written in a place of its own: the leader may be on the same machine.
        apart = f"-{self.piece}" if self.leader is None and not self.shared else ""
        draft = checkpoint.draft_of(self.root, step, self.nonce + apart)
        try:
            files = self._patiently(step, lambda: self._write(draft, tree))
            if self.leader is None:
                self._hand_in(step, draft)
                return
            files |= self._gather(step, draft, self.leader)
            if not self.leader.logged(step, self.timeout_seconds):
                raise CheckpointError(f"The log did not reach step {step} in {self.timeout_seconds:g} s.")
            nonce, pieces = self.nonce, self.leader.pieces
            path = self._patiently(
                step, lambda: checkpoint.commit(self.root, step, nonce, pieces, files, meta)
            )
        except (OSError, CheckpointError) as error:
            self._give_up(step, draft, error)
            raise error if isinstance(error, CheckpointError) else CheckpointError(f"{error}.") from error
        self.leader.committed(step, path)
        try:
            checkpoint.retain(self.root, self.leader.keep, self.leader.protected())
        except OSError as error:
            self.failed(step, f"An older checkpoint could not be removed: {error}. Remove it by hand.")
        if self.remote is not None:
            try:
                self._copy(step, path, self.remote, self.leader)
            except CheckpointError as error:
                self.failed(
                    step, f"The checkpoint of step {step} has no copy: {error} The one on disk is whole."
                )

    def _copy(self, step: int, path: Path, remote: Remote, leader: Leader) -> None:
        copy, own = Copy(step, self.nonce), [self.piece] if not self.shared else leader.pieces
        remote.send(copy, *(path / f"{piece}{kind}" for piece in own for kind in PIECE_FILES))
        remote.complete(copy, path, self.timeout_seconds, self._closed.is_set)
        remote.retain(leader.keep, leader.protected())

    def _hand_in(self, step: int, draft: Path) -> None:
        """To a leader on another machine; nothing of it is needed here then."""
        if self.remote is None or self.shared:
            return
        self.remote.send(Copy(step, self.nonce), *(draft / f"{self.piece}{kind}" for kind in PIECE_FILES))
        shutil.rmtree(draft)

    def _write(self, draft: Path, tree: dict[str, Any]) -> dict[str, Digest]:
        if not self.root.parent.is_dir():  # made again, it would hold nothing but this
            raise CheckpointError(f"run.dir '{self.root.parent}' was removed while the run wrote there.")
        self.root.mkdir(exist_ok=True)
        draft.mkdir(exist_ok=True)
        return write_piece(draft, self.piece, tree)

    def _patiently(self, step: int, write: Callable[[], Any]) -> Any:
        """`write`, again while the disk is full. A disk has its time once: one that stayed full is not waited for
        by the next checkpoint too."""
        told = False
        while True:
            began = time.monotonic()
            try:
                found = write()
                self._full_since = None
                return found
            except (OSError, CheckpointError) as error:
                if self._closed.is_set() or not is_momentary(error):
                    raise
                self._full_since = began if self._full_since is None else self._full_since
                if time.monotonic() - self._full_since >= self.disk_seconds:
                    raise
                if not told:
                    text = (
                        f"{str(error).rstrip('.')}. It is tried again for {self.disk_seconds:g} s: make room."
                    )
                    self.failed(step, f"Checkpoint of step {step} waits: {text}")
                    told = True
                self._closed.wait(RETRY_SECONDS)

    def _gather(self, step: int, draft: Path, leader: Leader) -> dict[str, Digest]:
        """Wait for the other ranks' pieces; their .json appears, whole, when the piece is on disk."""
        files: dict[str, Digest] = {}
        seconds = self.timeout_seconds + self.disk_seconds  # another rank may be waiting for room
        deadline = time.monotonic() + seconds
        for piece in leader.pieces:
            text, failure = draft / f"{piece}.json", draft / f"{piece}.failed"
            while not text.exists():
                self._fetch(step, draft, piece)
                if failure.exists():
                    raise CheckpointError(failure.read_text(encoding="utf-8"))
                if self._closed.is_set() or time.monotonic() > deadline:
                    raise CheckpointError(f"'{piece}' did not arrive within {seconds:g} s.")
                time.sleep(POLL_SECONDS)
            stored = json.loads(text.read_text(encoding="utf-8"))["files"]
            files |= {name: Digest(**value) for name, value in stored.items()}
            files[text.name] = digest(text)
        return files

    def _fetch(self, step: int, draft: Path, piece: str) -> None:
        """From a rank on another machine: its piece, or why there is none."""
        if self.remote is None or self.shared:
            return
        copy = Copy(step, self.nonce)
        if self.remote.has(copy, f"{piece}.failed"):
            self.remote.fetch_file(copy, f"{piece}.failed", draft)
        elif self.remote.has(copy, f"{piece}.json"):
            for kind in PIECE_FILES:
                self.remote.fetch_file(copy, f"{piece}{kind}", draft)

    def _give_up(self, step: int, draft: Path, error: Exception) -> None:
        if self.leader is not None:
            shutil.rmtree(draft, ignore_errors=True)
            return
        note = draft / f"{self.piece}.failed"
        with contextlib.suppress(OSError, CheckpointError):
            begun = note.with_suffix(".begun")
            begun.write_text(str(error), encoding="utf-8")
            begun.rename(note)  # whole when the leader sees it
            if self.remote is not None and not self.shared:
                self.remote.send(Copy(step, self.nonce), note)


def is_momentary(error: BaseException | None) -> bool:
    """Whether a disk gave an error that may pass: itself, or as the cause of one of ours."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in MOMENTARY:
            return True
        if isinstance(error, SafetensorError) and any(
            f"os error {number}" in str(error) for number in MOMENTARY
        ):
            return True
        error = error.__cause__
    return False
