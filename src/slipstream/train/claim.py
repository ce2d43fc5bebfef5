"""Whose folder is this? A run writes into an empty folder or into its own, never among somebody's files.

Imports no torch: a wrong run.dir is refused before anything slow begins.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

from slipstream.config import Config, from_tree
from slipstream.errors import UserError
from slipstream.formats import parse_toml
from slipstream.metrics.events import EVENTS_FILE

LOCK_FILE = "lock"
SHARED_MEMORY = Path("/dev/shm")


def refuse_foreign(folder: Path) -> None:
    """A folder that holds something, and no run of ours, is not written into."""
    if not folder.exists() or is_run(folder):
        return
    if not folder.is_dir():
        raise UserError(f"run.dir '{folder}' is a file. Set run.dir to a folder that is new or empty.")
    held = sorted(path.name for path in folder.iterdir() if not path.match(".*") and not _shards(path))
    if held:
        names = ", ".join(held[:5]) + (f" and {len(held) - 5} more" if len(held) > 5 else "")
        raise UserError(
            f"run.dir '{folder}' holds files that are no run of slipstream's ({names}). Nothing was changed. Set "
            "run.dir to a folder that is new or empty, or to that of a run to go on with."
        )


def _shards(path: Path) -> bool:
    """A run may lie in the folder of its data: of these names it writes only the tokenizer, which is the same."""
    return path.suffix == ".bin" or path.name in ("meta.json", "tokenizer.json")


def is_run(folder: Path) -> bool:
    """Whether a run was started here: by the lock it leaves, its log, or its checkpoints."""
    return (
        _starts(folder / LOCK_FILE, bytes.isdigit)
        or _starts(folder / EVENTS_FILE, lambda line: line.startswith(b'{"event"'))
        or has_checkpoints(folder)
    )


def has_checkpoints(folder: Path) -> bool:
    return any((folder / "checkpoints").glob("step-*/manifest.json"))


def run_of(source: Path) -> Path:
    """The folder of the run that `source` names: itself, or that of its checkpoints or of one of them."""
    return next((folder for folder in (source, *source.parents) if has_checkpoints(folder)), source)


def newest_of(source: Path) -> Path | None:
    """The checkpoint that `source` names: itself, or the newest of a run or of its checkpoints."""
    if (source / "manifest.json").is_file():
        return source
    found = [*source.glob("checkpoints/step-*/manifest.json"), *source.glob("step-*/manifest.json")]
    return max(found).parent if found else None


def last_started(folder: Path) -> Config | None:
    """The config that was last started here; None where nothing says so."""
    try:
        return from_tree(parse_toml((folder / "config.toml").read_text(encoding="utf-8")))
    except (OSError, UserError, ValueError):
        return None


def _starts(path: Path, looks_right: Callable[[bytes], bool]) -> bool:
    """Whether its first line is one of ours; an empty file was made and not yet written."""
    try:
        with path.open("rb") as file:
            line = file.readline(4096).strip()
    except OSError:
        return False
    return not line or looks_right(line)


_ON_DISK = "Set checkpoint.memory_every=0, checkpoint.every lower and checkpoint.keep=1 or more."


def memory_of(folder: Path) -> Path:
    """Where the checkpoints of the run in `folder` are that are kept in memory (`in_memory.py`)."""
    name = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:16]
    return SHARED_MEMORY / f"slipstream-{os.getuid()}" / name


def claim_memory(folder: Path, machines: int) -> Path:
    """Before the first one is written: a place that nobody else can read or write."""
    if machines > 1:
        raise UserError(
            f"Checkpoints in memory need all ranks on one machine, and these are on {machines}: a machine that is lost "
            f"takes its part along. {_ON_DISK}"
        )
    root = memory_of(folder)
    try:
        root.parent.mkdir(mode=0o700, exist_ok=True)
        about = root.parent.lstat()
    except OSError as error:
        raise UserError(f"Checkpoints in memory need {SHARED_MEMORY}: {error}. {_ON_DISK}") from None
    if root.parent.is_symlink() or about.st_uid != os.getuid() or about.st_mode & 0o077:
        raise UserError(
            f"Checkpoints in memory need '{root.parent}', which is not this user's alone. Remove it. Or: "
            + _ON_DISK
        )
    return root
