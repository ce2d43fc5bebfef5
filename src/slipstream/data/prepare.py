"""Documents in, a folder of token shards out: the one path for prepared data and for the embedded corpus.

Two passes. The first reads every document once: it counts them, draws the sample for the tokenizer and
finds the least hash. The second encodes on all cores and writes. A document goes to validation when the
hash of its text falls below the wanted fraction, so the split depends on the texts alone, not on their
order or files; the document with the least hash always does, so validation is never empty.

The folder appears under its name only when it is complete.
"""

from __future__ import annotations

import hashlib
import heapq
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from slipstream.data.shards import fingerprint, header, token_dtype
from slipstream.data.tokenizer import Tokenizer, check_vocab
from slipstream.errors import DataError

Documents = Callable[[], Iterable[str]]  # each call reads them from the start
Progress = Callable[[str, int, int | None], None]  # what is being done, bytes so far, bytes in all

_PIECE_CHARACTERS = 1 << 16  # longer documents are encoded in pieces, so that all cores have work
_BATCH_CHARACTERS = 8 << 20


@dataclass(frozen=True)
class Recipe:
    """How documents become shards."""

    vocab: int = 16384
    tokenizer: Path | None = None  # a tokenizer.json to use instead of training one
    valid_fraction: float = 0.01
    sample_bytes: int = 64 << 20  # text the tokenizer is trained on
    shard_tokens: int = 100_000_000


@dataclass(frozen=True)
class _Scan:
    documents: int
    bytes: int
    threshold: float  # documents with a hash up to this are for validation
    named: frozenset[float]  # hashes of the documents of the validation files
    sample: list[str]


def prepare(
    documents: Documents,
    out: Path,
    recipe: Recipe,
    valid: Documents | None = None,
    progress: Progress = lambda *_: None,
) -> dict[str, Any]:
    """Write `out` (train and valid shards, tokenizer.json, meta.json); returns what meta.json holds."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise DataError(f"{out} already exists. Choose another --out, or delete it first.")
    if not 0 <= recipe.valid_fraction < 1:
        raise DataError(f"--valid-fraction is {recipe.valid_fraction:g}. Set it from 0 to below 1.")
    # A tokenizer or a place that cannot be used is said now, not after minutes of reading.
    tokenizer = None if recipe.tokenizer is None else Tokenizer.load(recipe.tokenizer)
    if tokenizer is None:
        check_vocab(recipe.vocab)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    except OSError as error:
        raise DataError(f"{out} cannot be written: {error}. Choose another folder.") from error
    try:
        scan = _scan(documents, valid, recipe, progress)
        if tokenizer is None:
            progress("training the tokenizer", 0, None)
            tokenizer = Tokenizer.train(scan.sample, recipe.vocab)
        meta = _write(documents, valid, scan, tokenizer, folder, recipe, progress)
        folder.chmod(0o755)
        os.replace(folder, out)  # atomic; onto an existing folder only if that is empty
    except OSError as error:
        raise DataError(f"{out} could not be written: {error}. Nothing was left behind.") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return meta


def _scan(documents: Documents, valid: Documents | None, recipe: Recipe, progress: Progress) -> _Scan:
    """Count, and keep the documents with the least hashes (above the validation fraction) as the sample."""
    split, named = valid is None, frozenset(map(_place, valid() if valid is not None else ()))
    count = total = sampled = 0
    least = 1.0
    heap: list[tuple[float, int, str]] = []  # the largest hash on top
    wanted = recipe.sample_bytes if recipe.tokenizer is None else 0
    for text in documents():
        place, size = _place(text), len(text.encode())
        least = min(least, place)
        if wanted and not (split and place <= recipe.valid_fraction) and place not in named:
            heapq.heappush(heap, (-place, count, text))
            sampled += len(text)
            while sampled > wanted and len(heap) > 1:
                sampled -= len(heapq.heappop(heap)[2])
        count, total = count + 1, total + size
        progress("reading", total, None)
    if count == 0:
        raise DataError("The input holds no text. Name files with at least one non-empty document.")
    if split and count == 1:
        raise DataError(
            "The input is a single document, so no validation text can be set aside by document. "
            "Cut it with --separator blank-line or line, or name validation files with --valid."
        )
    sample = [text for _, _, text in sorted(heap, reverse=True)]
    return _Scan(count, total, max(least, recipe.valid_fraction) if split else -1.0, named, sample)


def _place(text: str) -> float:
    """A document's hash as a number in [0, 1)."""
    digest = hashlib.sha256(text.encode()).digest()
    return int.from_bytes(digest[:6], "little") / 2**48


def _write(
    documents: Documents,
    valid: Documents | None,
    scan: _Scan,
    tokenizer: Tokenizer,
    folder: Path,
    recipe: Recipe,
    progress: Progress,
) -> dict[str, Any]:
    dtype = token_dtype(tokenizer.vocab_size)
    writers = {split: _ShardWriter(folder, split, dtype, recipe.shard_tokens) for split in ("train", "valid")}
    counts = {"train": 0, "valid": 0}

    def marked() -> Iterator[tuple[str, str]]:
        for text in documents():
            if (place := _place(text)) not in scan.named:  # what is validated on is not trained on as well
                yield ("valid" if place <= scan.threshold else "train"), text
        for text in valid() if valid is not None else ():
            yield "valid", text

    done = 0
    for split, text, ids in _encode(marked(), tokenizer):
        writers[split].add(ids)
        counts[split] += 1
        done += len(text.encode())
        progress("encoding", done, max(done, scan.bytes))
    for split, writer in writers.items():
        writer.close()
        if counts[split] == 0:
            raise DataError(f"No document is left for {split}. Change --valid-fraction, or the files named.")
    tokenizer.save(folder / "tokenizer.json")
    meta = {
        "format": 1,
        "vocab": tokenizer.vocab_size,
        "end_of_document": tokenizer.end_of_document,
        "documents": counts,
        "tokens": {split: writer.tokens for split, writer in writers.items()},
        "bytes": done,
        "fingerprint": fingerprint(sorted(folder.glob("*.bin"))),
    }
    (folder / "meta.json").write_text(json.dumps(meta, indent=1) + "\n")
    return meta


def _encode(
    documents: Iterable[tuple[str, str]], tokenizer: Tokenizer
) -> Iterator[tuple[str, str, list[int]]]:
    """(split, text) -> (split, text, ids with the end mark), in order, batch by batch on all cores."""
    batch: list[tuple[str, str]] = []
    size = 0
    for item in documents:
        batch.append(item)
        size += len(item[1])
        if size >= _BATCH_CHARACTERS:
            yield from _encode_batch(batch, tokenizer)
            batch, size = [], 0
    yield from _encode_batch(batch, tokenizer)


def _encode_batch(batch: list[tuple[str, str]], tokenizer: Tokenizer) -> Iterator[tuple[str, str, list[int]]]:
    pieces = [list(_pieces(text)) for _, text in batch]
    encoded = iter(tokenizer.encode_batch([piece for parts in pieces for piece in parts]))
    for (split, text), parts in zip(batch, pieces, strict=True):
        ids = [token for _ in parts for token in next(encoded)]
        yield split, text, [*ids, tokenizer.end_of_document]


def _pieces(text: str) -> Iterator[str]:
    """Cut after a line end where there is one, so that few tokens differ from encoding in one go."""
    start = 0
    while len(text) - start > _PIECE_CHARACTERS:
        cut = text.rfind("\n", start, start + _PIECE_CHARACTERS) + 1
        cut = cut if cut > start else start + _PIECE_CHARACTERS
        yield text[start:cut]
        start = cut
    yield text[start:]


class _ShardWriter:
    """Appends tokens to `{split}_{number}.bin`, a new file every `shard_tokens`."""

    def __init__(self, folder: Path, split: str, dtype: np.dtype, shard_tokens: int) -> None:
        self.folder, self.split, self.dtype, self.limit = folder, split, dtype, shard_tokens
        self.tokens = 0
        self._shards = self._count = 0
        self._file: Any = None

    def add(self, ids: list[int]) -> None:
        tokens = np.asarray(ids, dtype=self.dtype)
        while len(tokens):
            if self._file is None:
                self._file = (self.folder / f"{self.split}_{self._shards:06d}.bin").open("wb")
                self._file.write(header(0, self.dtype))
            part, tokens = np.split(tokens, [self.limit - self._count])
            self._file.write(part.tobytes())
            self._count += len(part)
            self.tokens += len(part)
            if self._count == self.limit:
                self.close()

    def close(self) -> None:
        if self._file is not None:
            self._file.seek(0)
            self._file.write(header(self._count, self.dtype))
            self._file.close()
            self._file, self._count, self._shards = None, 0, self._shards + 1
