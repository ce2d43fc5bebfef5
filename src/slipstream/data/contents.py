"""Every byte of a run's shards, known again at the next start without reading them all.

A shard is read whole, and its SHA-256 kept in ~/.cache/slipstream, when a machine first uses it and again whenever
its size, inode or one of its times differs from what was kept. The time of its last change (ctime) is among them, which
no program can set back: whatever was written through the file system shows. Otherwise 64 blocks of 64 KiB of it are
read. So what can go unseen is decay of a disk, between those blocks, in a file of more than 4 MiB that nobody wrote.
Shards of 64 MiB in all are read whole at every start.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from slipstream.errors import DataError

FULL_BYTES = 64 << 20  # no more than this is read whole every time
BLOCK_BYTES = 64 << 10
BLOCKS = 64
THREADS = 8


def cache_folder() -> Path:
    return Path.home() / ".cache" / "slipstream"


def digests(paths: Sequence[Path]) -> list[str]:
    """The SHA-256 of each file: computed, or remembered where nothing speaks for a change."""
    remembers = sum(path.stat().st_size for path in paths) > FULL_BYTES
    with ThreadPoolExecutor(THREADS) as threads:  # hashing lets other threads run
        return list(threads.map(_remembered if remembers else _read, paths))


def combined(found: Sequence[str]) -> str:
    """One value for the files of a split, in their order; their names do not matter."""
    return hashlib.sha256("\n".join(found).encode()).hexdigest()


def check_as_prepared(paths: Sequence[Path], found: Sequence[str], prepared: Mapping[str, Any]) -> None:
    """Shards that `slipstream data prepare` wrote are as it left them (`prepared`: by name, from meta.json)."""
    for path, digest in zip(paths, found, strict=True):
        if path.name in prepared and prepared[path.name] != digest:
            raise DataError(
                f"{path} is not what `slipstream data prepare` wrote: its SHA-256 begins with {digest[:12]}, meta.json "
                f"has {str(prepared[path.name])[:12]}. Copy it again or prepare the data again; if it was changed on "
                "purpose, take its name out of meta.json."
            )


def _read(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _remembered(path: Path) -> str:
    note = _note_of(path)
    before = _signs(path)
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        kept = json.loads(note.read_text(encoding="utf-8"))
        if kept["signs"] == before:
            return str(kept["sha256"])
    found = _read(path)
    if _signs(path) != before:
        raise DataError(f"{path} was changed while it was read. Start again when it is complete.")
    with contextlib.suppress(OSError):  # nowhere to keep it: it is read again next time
        note.parent.mkdir(parents=True, exist_ok=True)
        draft = note.with_suffix(f".{os.getpid()}")
        draft.write_text(json.dumps({"path": str(path), "signs": before, "sha256": found}), encoding="utf-8")
        draft.rename(note)
    return found


def _note_of(path: Path) -> Path:
    name = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:32]
    return cache_folder() / "digests" / f"{name}.json"


def _signs(path: Path) -> list[Any]:
    """What shows that a file is as it was: its size, its inode, its times, and blocks of it."""
    stat = path.stat()
    sampled = hashlib.sha256(b"".join(blocks(path))).hexdigest()
    return [stat.st_size, stat.st_ino, stat.st_mtime_ns, stat.st_ctime_ns, sampled]


def blocks(path: Path) -> Iterator[bytes]:
    """Some of a file, from its beginning to its end."""
    size = path.stat().st_size
    with path.open("rb") as file:
        for block in range(BLOCKS):
            file.seek(block * max(0, size - BLOCK_BYTES) // (BLOCKS - 1))
            yield file.read(BLOCK_BYTES)
