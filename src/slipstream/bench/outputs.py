"""Whether a result can be written, asked before anything is measured."""

from __future__ import annotations

from pathlib import Path

from slipstream.errors import UserError


def make_room(path: Path | None) -> None:
    """Make the folder of a file that will be written; refuse what cannot be one."""
    if path is None:
        return
    if path.is_dir():
        raise UserError(f"{path} is a folder. Name a file, say {path / 'bench.json'}.")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}. Name another place.") from None
