"""Whose folder is this? A run writes into an empty folder or into its own, never among somebody's files.

Imports no torch: a wrong run.dir is refused before anything slow begins.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from slipstream.errors import UserError
from slipstream.metrics.events import EVENTS_FILE

LOCK_FILE = "lock"


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
        or any((folder / "checkpoints").glob("step-*/manifest.json"))
    )


def _starts(path: Path, looks_right: Callable[[bytes], bool]) -> bool:
    """Whether its first line is one of ours; an empty file was made and not yet written."""
    try:
        with path.open("rb") as file:
            line = file.readline(4096).strip()
    except OSError:
        return False
    return not line or looks_right(line)
