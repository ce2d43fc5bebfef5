"""A URL that checkpoints are copied to, opened and tried. Imports no torch: a wrong one is refused at once."""

from __future__ import annotations

import time

import fsspec

from slipstream.errors import UserError


def opened(url: str) -> tuple[fsspec.AbstractFileSystem, str]:
    """The file system behind it, and the path there."""
    try:
        files, root = fsspec.core.url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise UserError(f"checkpoint.remote = '{url}' cannot be used: {error}.") from None
    return files, root.rstrip("/")


def check(url: str) -> None:
    """Whether it can be written."""
    files, root = opened(url)
    mark = f"{root}/.can-be-written-{time.time_ns()}"
    try:
        files.makedirs(root, exist_ok=True)
        files.pipe_file(mark, b"")
        files.rm_file(mark)
    except Exception as error:  # what a store raises is its own
        raise UserError(
            f"checkpoint.remote = '{url}' cannot be written: {type(error).__name__} {error}."
        ) from None
