"""A log that outlives a full disk: lines that find no room are kept, in order, and written when there is room again.

Two things end a run, in words: a disk that stays full for longer than it was given, and a file that is no longer the
one at its place, because somebody removed or replaced its folder.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from pathlib import Path

from slipstream.errors import DiskError

# What passes: a full disk, a full quota, a network disk that was away for a moment.
MOMENTARY = {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE, errno.ETIMEDOUT}
LOOK_SECONDS = 1.0  # between two looks whether the file is still at its place


class Appending:
    """One file that is appended to, whole lines at a time."""

    def __init__(
        self, path: Path, patience_seconds: float = 0.0, warn: Callable[[str], None] = lambda text: None
    ) -> None:
        self.path = path
        self.warn = warn
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        self._patience_seconds = patience_seconds
        self._unwritten = bytearray()
        self._full_since: float | None = None
        self._looked = time.monotonic()

    @property
    def written(self) -> bool:
        """Whether everything is in the file."""
        return not self._unwritten

    def write(self, text: str) -> None:
        self._unwritten += text.encode()
        self.flush()

    def flush(self) -> None:
        """Write what there is room for. A disk that has been full for too long is raised as the error it gives."""
        self._look()
        try:
            while self._unwritten:
                count = os.write(self._file, self._unwritten)
                del self._unwritten[:count]
        except OSError as error:
            now = time.monotonic()
            if error.errno not in MOMENTARY:
                raise
            if self._full_since is None:
                self._full_since = now
                if self._patience_seconds:
                    self.warn(
                        f"{self.path} cannot be written: {error.strerror}. The run goes on and tries again for "
                        f"{self._patience_seconds:g} s: make room."
                    )
            if now - self._full_since >= self._patience_seconds:
                raise
            return
        if self._full_since is not None:
            seconds, self._full_since = time.monotonic() - self._full_since, None
            self.warn(f"{self.path} can be written again, after {seconds:.0f} s. Nothing was lost.")

    def _look(self) -> None:
        if time.monotonic() - self._looked < LOOK_SECONDS:
            return
        self._looked = time.monotonic()
        try:
            there = os.stat(self.path)
            same = os.path.samestat(there, os.fstat(self._file))
        except FileNotFoundError:
            same = False
        if not same:
            raise DiskError(
                f"'{self.path}' was removed or replaced while the run wrote it, and with it what the run had written. "
                "The run ends: nothing it could still do would be found. Start it again, from a copy of the folder if "
                "there is one."
            )

    def close(self) -> None:
        """After a last try; what finds no room now is lost."""
        deadline = time.monotonic() + (self._patience_seconds if self._full_since is not None else 0.0)
        try:
            self.flush()
            while self._unwritten and time.monotonic() < deadline:
                time.sleep(min(0.2, LOOK_SECONDS))
                self.flush()
        finally:
            os.close(self._file)
