"""A folder that appears under its name whole or not at all."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from slipstream.errors import UserError


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A draft beside `folder`, which takes its place in the end; one that holds something is refused."""
    if folder.is_symlink():  # a folder takes the place of a folder, not of a link to one
        folder = Path(os.path.realpath(folder))
        if folder.is_symlink():
            raise UserError(f"{folder} is a link that leads back to itself. Choose another folder.")
    if folder.exists() and (os.path.ismount(folder) or os.path.samefile(folder, Path.cwd())):
        what = "a mount" if os.path.ismount(folder) else "where you stand"
        raise UserError(f"{folder} is {what}, which no folder can take the place of. Name one inside.")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} already exists. Choose another folder, or delete it first.")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    except OSError as error:
        raise UserError(f"{folder} cannot be written: {error}. Choose another folder.") from error
    try:
        yield draft
        draft.chmod(0o755)
        os.replace(draft, folder)  # atomic; onto an existing folder only if that is empty
    except OSError as error:
        raise UserError(f"{folder} could not be written: {error}. Nothing was left behind.") from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)
