"""The embedded corpus: the Python sources of the running interpreter's standard library.

Every user has it, so the default run needs no download. It is tokenised once into a cache folder whose
name is the hash of the sources and of the recipe: another interpreter, or another vocabulary, gives
another folder, and a folder never changes once it is there.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from slipstream.data.contents import cache_folder
from slipstream.data.prepare import Progress, Recipe, prepare
from slipstream.errors import DataError

# What is not the library, its tests, and `encodings`: 1.4 MB that are nearly all character tables.
_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings"}
_REVISION = 1  # raised when the way from sources to shards changes


def sources() -> list[Path]:
    """The library's modules in a fixed order."""
    root = Path(sysconfig.get_paths()["stdlib"])
    found = []
    for folder, inside, names in os.walk(root):
        inside[:] = set(inside) - _SKIPPED
        found += [Path(folder, name) for name in names if name.endswith(".py")]
    if not found:
        raise DataError(
            f"This Python has no library sources under {root}, so there is no embedded corpus. "
            "Set data.path to a folder made by `slipstream data prepare`."
        )
    return sorted(found, key=lambda path: path.relative_to(root).as_posix())


def documents() -> Iterator[str]:
    for path in sources():
        if text := path.read_text(encoding="utf-8", errors="replace"):
            yield text


def embedded(vocab: int, cache: Path | None = None, progress: Progress = lambda *_: None) -> Path:
    """The folder of shards, made on the first call; processes that ask at once wait for the first."""
    cache = cache or cache_folder()
    recipe = Recipe(vocab=vocab, valid_fraction=0.02)
    digest = hashlib.sha256(f"{_REVISION}:{recipe.vocab}:{recipe.valid_fraction}".encode())
    for text in documents():
        digest.update(len(text).to_bytes(8, "little") + text.encode())
    folder = cache / f"stdlib-{digest.hexdigest()[:16]}"
    if folder.exists():
        return folder
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with (cache / f"{folder.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not folder.exists():
                prepare(documents, folder, recipe, progress=progress)
    except OSError as error:
        raise DataError(
            f"The embedded corpus cannot be cached in {cache}: {error}. "
            "Make that folder writable, or set data.path to a folder made by `slipstream data prepare`."
        ) from error
    return folder
