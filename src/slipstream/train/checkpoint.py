"""Checkpoints of a run: found, verified, committed, kept. Invariant: a folder named step-N is complete.

Ranks write their pieces into a hidden folder; when all are there, one rank adds the manifest (sizes and SHA-256 of
every file) and renames the folder, which is atomic. What a kill leaves behind is swept at the next start.

    checkpoints/step-00000200/manifest.json
                              stage-000.safetensors  stage-000.json      one pair per stage (and data shard)
"""

from __future__ import annotations

import contextlib
import json
import logging
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from slipstream.errors import CheckpointError
from slipstream.train.manifest import FORMAT, NAME, VERSION, Digest, Manifest, manifest, sealed
from slipstream.train.state import digest, read_piece, sync

logger = logging.getLogger("slipstream")
HASHING_THREADS = 8
BEST = "best"  # a link to the checkpoint with the lowest validation loss, where a run keeps it


def folder_of(root: Path, step: int) -> Path:
    return root / f"step-{step:08d}"


def draft_of(root: Path, step: int, nonce: str) -> Path:
    """Where the pieces of one attempt gather; the nonce keeps attempts of different processes apart."""
    return root / f".draft-step-{step:08d}-{nonce}"


def committed(root: Path) -> list[Path]:
    """Committed checkpoints, newest first."""
    if not root.is_dir():
        return []
    return sorted((path for path in root.iterdir() if NAME.fullmatch(path.name)), key=step_of, reverse=True)


def commit(
    root: Path, step: int, nonce: str, pieces: Sequence[str], files: dict[str, Digest], meta: dict[str, Any]
) -> Path:
    """Turn a draft that holds all its pieces into step-N."""
    draft, final = draft_of(root, step, nonce), folder_of(root, step)
    body = {
        "format": FORMAT,
        "version": VERSION,
        "step": step,
        "created": time.time(),
        "pieces": list(pieces),
        "files": {name: {"bytes": value.bytes, "sha256": value.sha256} for name, value in files.items()},
        "meta": meta,
    }
    try:
        (draft / "manifest.json").write_text(json.dumps(sealed(body), indent=1), encoding="utf-8")
        sync(draft / "manifest.json")
        sync(draft)
        draft.rename(final)
        sync(root)
    except OSError as error:
        raise CheckpointError(f"'{final}' could not be written: {error}.") from error
    return final


def sweep(root: Path) -> None:
    """Remove what interrupted attempts left behind. Call only with the run locked."""
    for path in root.glob(".draft-*"):
        path.unlink() if path.is_symlink() else shutil.rmtree(path, ignore_errors=True)


def retain(root: Path, keep: int, protected: int | None = None) -> None:
    """Remove all but the newest `keep`, and the one of the step `protected`."""
    _remove(root, [path for path in committed(root)[keep:] if step_of(path) != protected])


def point_at(path: Path) -> None:
    """Make `checkpoints/best` lead to a committed checkpoint. The loop and the writer's thread may do so at once."""
    draft = path.parent / f".draft-{BEST}-{threading.get_ident()}"
    draft.unlink(missing_ok=True)
    draft.symlink_to(path.name)
    draft.rename(path.parent / BEST)


def _remove(root: Path, paths: Sequence[Path]) -> None:
    """A folder is renamed first, so half of one is never taken for a whole."""
    for path in paths:
        doomed = root / f".draft-removed-{path.name}"
        with contextlib.suppress(FileNotFoundError):  # somebody else removed it in this moment
            path.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)


def forget_from(root: Path, step: int) -> bool:
    """Remove the checkpoints of `step` and later, if there are earlier ones to go back to; whether there are."""
    found = committed(root)
    later = [path for path in found if step_of(path) >= step]
    earlier = len(later) < len(found)
    if earlier:
        _remove(root, later)
    if not (root / BEST).exists():  # it led to one of these
        (root / BEST).unlink(missing_ok=True)
    return earlier


def verify(path: Path) -> Manifest:
    """Check every file of a checkpoint against its manifest; a CheckpointError names the first bad one."""
    found = manifest(path)
    for name, expected in found.files.items():
        file = path / name
        if file.is_symlink():
            raise CheckpointError(f"'{file}' is a link: what it leads to is not kept with the checkpoint.")
        if not file.is_file():
            raise CheckpointError(f"'{file}' is missing.")
        size = file.stat().st_size
        if size != expected.bytes:
            raise CheckpointError(
                f"'{file}' is truncated or padded: {size} bytes instead of {expected.bytes}."
            )
    with ThreadPoolExecutor(HASHING_THREADS) as threads:  # hashing lets other threads run
        digests = threads.map(digest, [path / name for name in found.files])
        for (name, expected), seen in zip(found.files.items(), digests, strict=True):
            if seen != expected:
                raise CheckpointError(
                    f"'{path / name}' is corrupted: its SHA-256 differs from the manifest's."
                )
    return found


def newest_good(root: Path, report: Callable[[str], None]) -> tuple[Path, Manifest] | None:
    """The newest checkpoint that verifies. Bad ones are reported and set aside; none at all gives None.

    Where all were bad it is an error, at the next start too: the run would begin again, over its own log.
    """
    for path in committed(root):
        try:
            return path, verify(path)
        except CheckpointError as error:
            aside = path.rename(path.with_name(f"damaged-{path.name}-{time.time_ns()}"))
            report(f"{error} It was set aside as '{aside.name}'; looking for an older checkpoint.")
    damaged = sorted(path.name for path in root.glob("damaged-step-*"))
    if damaged:
        raise CheckpointError(
            f"No checkpoint in '{root}' is usable (set aside: {', '.join(damaged)}). Start in another run.dir, put a "
            "good copy back, or delete what was set aside to begin again."
        )
    return None


def read(
    path: Path,
    found: Manifest,
    names: Callable[[str], bool] = lambda name: True,
    sections: Sequence[str] | None = None,
) -> list[dict[str, Any]]:
    """The state trees of all pieces; only tensors of the wanted parameters (and sections) are read."""

    def wanted(key: str) -> bool:
        parts = [part.replace("~1", "/").replace("~0", "~") for part in key.split("/")]
        if len(parts) < (3 if parts[0] == "banks" else 2):
            raise CheckpointError(f"'{path}' holds a tensor of no known place: '{key}'.")
        owner = parts[2] if parts[0] == "banks" else parts[1]  # banks/<reader>/<name>, section/<name>[/<key>]
        return names(owner) and (sections is None or parts[0] in sections)

    return [read_piece(path, piece, wanted) for piece in found.pieces]


def locate(source: str | Path) -> Path:
    """A checkpoint folder from what a person names: the folder itself, a run folder, or its checkpoints."""
    path = Path(source)
    if (path / "manifest.json").is_file():
        return path
    for root in (path / "checkpoints", path):
        for candidate in committed(root):
            try:
                verify(candidate)
            except CheckpointError as error:
                logger.warning("%s Looking for an older checkpoint.", error)
                continue
            return candidate
    raise CheckpointError(
        f"There is no usable checkpoint in '{source}'. Name a run folder or a step-N folder."
    )


def step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))
