"""Token shards on disk: the `.bin` format of llm.c and modded-nanogpt, written and memory-mapped.

A shard is 256 little-endian int32 (magic, version, number of tokens, zeros), then the tokens:

    magic 20240520, version 1    uint16 tokens
    magic 20240801, version 7    uint32 tokens, for vocabularies above 65,536

A folder holds `*train*.bin` and `*val*.bin`, read in name order as one stream; `meta.json` and
`tokenizer.json` beside them when `slipstream data prepare` wrote it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipstream.data.contents import blocks
from slipstream.errors import DataError
from slipstream.formats import parse_json

HEADER_BYTES = 256 * 4
_FORMATS = {(20240520, 1): np.dtype("<u2"), (20240801, 7): np.dtype("<u4")}
_FULL_HASH_BYTES = 64 << 20
_SPLIT_PATTERNS = {"train": "*train*.bin", "valid": "*val*.bin"}

Tokens = NDArray[np.uint16] | NDArray[np.uint32]


def token_dtype(vocab: int) -> np.dtype:
    return np.dtype("<u2") if vocab <= 1 << 16 else np.dtype("<u4")


def header(count: int, dtype: np.dtype) -> bytes:
    magic, version = next(key for key, value in _FORMATS.items() if value == dtype)
    values = np.zeros(256, dtype="<i4")
    values[:3] = magic, version, count
    return values.tobytes()


def write_shard(path: Path, tokens: Tokens) -> None:
    path.write_bytes(header(len(tokens), tokens.dtype) + tokens.tobytes())


def open_shard(path: Path) -> Tokens:
    """The tokens of one shard, memory-mapped; a file of another kind or a cut one is a DataError."""
    try:
        size = path.stat().st_size
        values = np.fromfile(path, dtype="<i4", count=256)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}. Copy it again, or remove it.") from error
    key = (int(values[0]), int(values[1])) if len(values) == 256 else None
    if key not in _FORMATS:
        seen = f"magic and version {key}" if key else f"{size} bytes"
        raise DataError(
            f"{path} is not a token shard: {seen}, expected one of {sorted(_FORMATS)} in a header of "
            f"{HEADER_BYTES} bytes. Make shards with `slipstream data prepare`."
        )
    dtype: np.dtype[Any] = _FORMATS[key]
    count = int(values[2])
    expected = HEADER_BYTES + count * dtype.itemsize
    if count < 0 or size != expected:
        raise DataError(
            f"{path} is damaged: its header says {count} tokens ({expected} bytes), but it has {size} bytes. "
            "Copy it again, or make it again with `slipstream data prepare`."
        )
    if count == 0:
        return np.empty(0, dtype)
    return np.memmap(path, dtype=dtype, mode="r", offset=HEADER_BYTES, shape=(count,))


def find_shards(folder: Path, split: str) -> list[Path]:
    """The shards of `split` ("train" or "valid") in name order."""
    if not folder.is_dir():
        here = "" if folder.is_absolute() else " here"
        raise DataError(
            f"data.path {folder} is not a folder{here}. Make one with `slipstream data prepare`, or name where it is: "
            "data.path=FOLDER."
        )
    shards = sorted(folder.glob(_SPLIT_PATTERNS[split]))
    for path in shards:
        if all(path.match(pattern) for pattern in _SPLIT_PATTERNS.values()):
            raise DataError(
                f"{path} is named like a shard for training and like one for validation. Rename it: *train*.bin is for "
                "training, *val*.bin for validation."
            )
    if not shards:
        found = sorted(path.name for path in folder.iterdir())[:8]
        raise DataError(
            f"{folder} has no {_SPLIT_PATTERNS[split]} (it holds: {', '.join(found) or 'nothing'}). "
            "Make shards with `slipstream data prepare INPUT... --out DIR`."
        )
    return shards


def read_meta(folder: Path) -> dict[str, Any]:
    """What `slipstream data prepare` noted about the folder; empty for shards from elsewhere."""
    path = folder / "meta.json"
    if not path.exists():
        return {}
    try:
        meta = parse_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}. Mend it, or delete it.") from error
    except ValueError as error:
        raise DataError(f"{path} is not JSON ({error}). Delete it or prepare the data again.") from error
    numbers = {"vocab", "end_of_document"}
    if not isinstance(meta, dict) or not all(_is_id(meta[key]) for key in numbers & set(meta)):
        raise DataError(
            f"{path} is no table with whole numbers for 'vocab' and 'end_of_document'. Mend it, or delete it."
        )
    if not isinstance(meta.get("sha256", {}), dict):
        raise DataError(f"{path}: 'sha256' is no table of shards. Mend it, or take it out.")
    return meta


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 32


def fingerprint(paths: Sequence[Path]) -> str:
    """sha256 of sizes and contents; above 64 MiB in all, of 64 blocks of 64 KiB of each shard."""
    digest = hashlib.sha256()
    everything = sum(path.stat().st_size for path in paths) <= _FULL_HASH_BYTES
    for path in paths:
        digest.update(path.stat().st_size.to_bytes(8, "little"))
        for block in [path.read_bytes()] if everything else blocks(path):
            digest.update(block)
    return digest.hexdigest()
