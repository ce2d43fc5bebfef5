"""A copy of a run at a URL (`checkpoint.remote`): for machines without a shared disk, and for a disk that is lost.

    URL/step-00000200-1f3c9a2e/stage-000.safetensors  stage-000.json  ...  events.jsonl
                               manifest.json      put last: a folder with a manifest is a whole checkpoint

Each rank sends the piece it wrote; the leader sends the log and the manifest when all pieces are there. Whatever is
fetched is verified against the manifest like a checkpoint on disk. Any file system that fsspec knows will do.
"""

from __future__ import annotations

import contextlib
import fcntl
import re
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.config import Config
from slipstream.errors import CheckpointError
from slipstream.metrics.events import EVENTS_FILE
from slipstream.metrics.record import has_event
from slipstream.train import checkpoint
from slipstream.train.state import digest
from slipstream.train.url import opened

MANIFEST = "manifest.json"
ATTEMPTS = 3  # a network fails for a moment now and then
PAUSE_SECONDS = 1.0
POLL_SECONDS = 0.2
_NAME = re.compile(r"step-(\d+)-([0-9a-f]+)")


@dataclass(frozen=True)
class Copy:
    """One attempt at a checkpoint; the nonce keeps attempts at the same step apart."""

    step: int
    nonce: str

    @property
    def name(self) -> str:
        return f"step-{self.step:08d}-{self.nonce}"


class Remote:
    def __init__(self, url: str) -> None:
        self.url = url
        self._files, self._root = opened(url)

    def send(self, copy: Copy, *files: Path) -> None:
        """Upload `files`, in this order."""
        with self._errors(f"could not be written ({copy.name})"):
            self._files.makedirs(self._path(copy), exist_ok=True)
        for file in files:
            self._again(lambda file=file: self._put(file, f"{self._path(copy)}/{file.name}"))

    def has(self, copy: Copy, name: str) -> bool:
        with self._errors("could not be read"):
            self._files.invalidate_cache()
            return bool(self._files.exists(f"{self._path(copy)}/{name}"))

    def fetch_file(self, copy: Copy, name: str, folder: Path) -> None:
        """Under its own name, once it is whole."""
        part = folder / f".part-{name}"
        self._again(lambda: self._files.get_file(f"{self._path(copy)}/{name}", str(part)))
        part.rename(folder / name)

    def complete(self, copy: Copy, path: Path, seconds: float, stop: Callable[[], bool]) -> None:
        """Make the committed checkpoint at `path` one here as well, once all ranks have sent their pieces."""
        found = checkpoint.manifest(path)
        waited = time.monotonic()
        for piece in found.pieces:
            while not self.has(copy, f"{piece}.json"):  # sent after the tensors
                if stop() or time.monotonic() - waited > seconds:
                    raise CheckpointError(f"'{piece}' did not come to {self.url} within {seconds:g} s.")
                time.sleep(POLL_SECONDS)
            waited = time.monotonic()
        log = path.parent.parent / EVENTS_FILE
        self.send(copy, *([log] if log.is_file() else []), path / MANIFEST)

    def catch_up(self, path: Path, nonce: str) -> None:
        """Send a checkpoint that is on this disk only: the run ended before its copy was whole."""
        found = checkpoint.manifest(path)
        if any(copy.step == found.step and self._is(copy, path) for copy in self.copies()):
            return
        copy = Copy(found.step, nonce)
        self.send(copy, *(path / name for name in found.files))
        self.complete(copy, path, 0.0, lambda: False)

    def copies(self) -> Iterator[Copy]:
        """Whole checkpoints, newest first."""
        return (copy for copy in self._attempts() if self.has(copy, MANIFEST))

    def restore(self, root: Path, newest: int, say: Callable[[str], None]) -> Copy | None:
        """Bring the newest good checkpoint that is newer than the step `newest` of this disk."""
        for copy in self.copies():
            if copy.step <= newest:
                break
            try:
                self._fetch(copy, root)
            except CheckpointError as error:
                say(f"{error} Looking for an older copy.")
                continue
            say(f"The checkpoint of step {copy.step} was fetched from {self.url}.")
            return copy
        return None

    def restore_log(self, copy: Copy, folder: Path) -> None:
        """The log that belongs to a checkpoint, unless this disk has one that goes as far."""
        log = folder / EVENTS_FILE
        if has_event(folder, "step", copy.step) or not self.has(copy, EVENTS_FILE):
            return
        if log.exists():
            log.rename(log.with_name(f"{log.stem}-{time.time_ns()}{log.suffix}"))
        self.fetch_file(copy, EVENTS_FILE, folder)

    def bring(self, path: Path, sha256: str) -> None:
        """The leader's checkpoint onto this machine's disk, unless it is there. Ranks of one machine take turns."""
        if _is_here(path, sha256):
            return
        root = path.parent
        root.mkdir(parents=True, exist_ok=True)
        with (root / ".fetching").open("w") as turn:
            fcntl.flock(turn, fcntl.LOCK_EX)
            if _is_here(path, sha256):
                return
            for copy in self.copies():
                if checkpoint.folder_of(root, copy.step) == path and self._sha256(copy, root) == sha256:
                    self._fetch(copy, root)
                    checkpoint.retain(root, 0, copy.step)  # on this machine it serves the start alone
                    return
        raise CheckpointError(f"{self.url} has no copy of '{path.name}', which rank 0 starts from.")

    def retain(self, keep: int, protected: int | None = None) -> None:
        """Remove all but the newest `keep`, the one of the step `protected`, and what interrupted attempts left."""
        whole = list(self.copies())
        kept = [*whole[:keep], *(copy for copy in whole if copy.step == protected)]
        newest = whole[0].step if whole else -1
        self._remove([copy for copy in self._attempts() if copy not in kept and copy.step <= newest])

    def forget_from(self, step: int) -> None:
        """Remove the copies of `step` and later."""
        self._remove([copy for copy in self._attempts() if copy.step >= step])

    def _fetch(self, copy: Copy, root: Path) -> None:
        draft = root / f".draft-fetched-{copy.name}"
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        try:
            self.fetch_file(copy, MANIFEST, draft)
            for name in checkpoint.manifest(draft).files:
                self.fetch_file(copy, name, draft)
            checkpoint.verify(draft)
        except CheckpointError:
            shutil.rmtree(draft, ignore_errors=True)
            raise
        final = checkpoint.folder_of(root, copy.step)
        shutil.rmtree(final, ignore_errors=True)
        draft.rename(final)

    def _attempts(self) -> list[Copy]:
        with self._errors("could not be read"):
            self._files.invalidate_cache()
            try:
                names = self._files.ls(self._root, detail=False)
            except FileNotFoundError:
                return []
        found = [_NAME.fullmatch(name.rstrip("/").rpartition("/")[2]) for name in names]
        return sorted(
            (Copy(int(name[1]), name[2]) for name in found if name), key=lambda copy: copy.step, reverse=True
        )

    def _remove(self, copies: Sequence[Copy]) -> None:
        """The manifest goes first, so that half of one is never taken for a whole."""
        with self._errors("could not be removed"):
            for copy in copies:
                if self._files.exists(f"{self._path(copy)}/{MANIFEST}"):
                    self._files.rm_file(f"{self._path(copy)}/{MANIFEST}")
                self._files.rm(self._path(copy), recursive=True)

    def _put(self, file: Path, target: str) -> None:
        if file.suffix == ".safetensors":  # nobody looks at it before its .json is there
            self._files.put_file(str(file), target)
            return
        part = f"{target}.part"
        self._files.put_file(str(file), part)
        self._files.mv(part, target)

    def _is(self, copy: Copy, path: Path) -> bool:
        return self._sha256(copy, path.parent) == digest(path / MANIFEST).sha256

    def _sha256(self, copy: Copy, root: Path) -> str:
        draft = root / f".draft-looked-at-{copy.name}"
        draft.mkdir(exist_ok=True)
        try:
            self.fetch_file(copy, MANIFEST, draft)
            return digest(draft / MANIFEST).sha256
        finally:
            shutil.rmtree(draft, ignore_errors=True)

    def _again(self, act: Callable[[], Any]) -> None:
        """`act`, tried more than once: which errors of a store pass by themselves, only the store knows."""
        for attempt in range(1, ATTEMPTS):
            with contextlib.suppress(Exception):
                act()
                return
            time.sleep(PAUSE_SECONDS * attempt)
        with self._errors("does not take or give a file"):
            act()

    def _path(self, copy: Copy) -> str:
        return f"{self._root}/{copy.name}"

    @contextlib.contextmanager
    def _errors(self, what: str) -> Iterator[None]:
        """What a store raises is its own: any error is the copy's, never the run's."""
        try:
            yield
        except Exception as error:
            raise CheckpointError(f"{self.url} {what}: {type(error).__name__} {error}.") from error


def remote_of(config: Config) -> Remote | None:
    where = config.checkpoint.remote
    return Remote(where) if where is not None and config.checkpoint.keep else None


def _is_here(path: Path, sha256: str) -> bool:
    return (path / MANIFEST).is_file() and digest(path / MANIFEST).sha256 == sha256
