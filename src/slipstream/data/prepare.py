"""Documents in, a folder of token shards out: the one path for prepared data and for the embedded corpus.

Two passes. The first reads every document once: it counts them, draws the sample for the tokenizer and
decides what is for validation (`split.py`). The second encodes on all cores and writes.

The folder appears under its name only when it is complete.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from slipstream.data.contents import digests
from slipstream.data.draft import new_folder
from slipstream.data.sample import Sample
from slipstream.data.shards import fingerprint, header, token_dtype
from slipstream.data.split import Chooser, Split, place_of
from slipstream.data.streams import Documents
from slipstream.data.tokenizer import Tokenizer, check_vocab
from slipstream.errors import DataError

Progress = Callable[[str, int, int | None], None]  # what is being done, bytes so far, bytes in all

_PIECE_CHARACTERS = 1 << 16  # longer documents are encoded in pieces, so that all cores have work
_BATCH_CHARACTERS = 8 << 20


@dataclass(frozen=True)
class Recipe:
    """How documents become shards."""

    vocab: int | None = None  # of the tokenizer that is trained; None: what suits the size of the text
    tokenizer: Path | None = None  # a tokenizer.json to use instead of training one
    valid_fraction: float | None = None  # of the documents; None: enough to tell something
    sample_bytes: int = 64 << 20  # text the tokenizer is trained on
    shard_tokens: int = 100_000_000


@dataclass(frozen=True)
class _Scan:
    documents: int
    bytes: int
    split: Split | None  # None: the validation files were named
    named: frozenset[float]  # hashes of the documents of the validation files
    sample: list[str]


class _Encoded(NamedTuple):
    """A piece of a document, as it is written."""

    split: str
    ids: list[int]
    bytes: int
    last: bool  # of its document, whose end mark is among the ids


def prepare(
    documents: Documents,
    out: Path,
    recipe: Recipe,
    valid: Documents | None = None,
    progress: Progress = lambda *_: None,
) -> dict[str, Any]:
    """Write `out` (train and valid shards, tokenizer.json, meta.json); returns what meta.json holds."""
    if recipe.valid_fraction is not None and not 0 <= recipe.valid_fraction < 1:
        raise DataError(f"--valid-fraction is {recipe.valid_fraction:g}. Set it from 0 to below 1.")
    # A tokenizer or a place that cannot be used is said now, not after minutes of reading.
    tokenizer = None if recipe.tokenizer is None else Tokenizer.load(recipe.tokenizer)
    if tokenizer is None and recipe.vocab is not None:
        check_vocab(recipe.vocab)
    with new_folder(out) as folder:
        scan = _scan(documents, valid, recipe, progress)
        if tokenizer is None:
            progress("training the tokenizer", 0, None)
            vocab = recipe.vocab or suitable_vocab(scan.bytes)
            tokenizer = _heeding_signals(lambda: Tokenizer.train(scan.sample, vocab))
        meta = _write(documents, valid, scan, tokenizer, folder, recipe, progress)
    return meta


def _heeding_signals(work: Callable[[], Tokenizer]) -> Tokenizer:
    """What takes minutes in one call that is not Python's, beside a main thread that can be interrupted meanwhile."""
    done: Future[Tokenizer] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, name="slipstream-tokenizer", daemon=True).start()
    while not done.done():
        wait([done], timeout=0.2)
    return done.result()


def _scan(documents: Documents, valid: Documents | None, recipe: Recipe, progress: Progress) -> _Scan:
    named = frozenset(map(place_of, valid() if valid is not None else ()))
    chooser = Chooser(recipe.valid_fraction)
    wanted = recipe.sample_bytes if recipe.tokenizer is None else 0
    sample = Sample(wanted, recipe.valid_fraction, all_train=valid is not None)
    for text in documents():
        place, size = place_of(text), len(text.encode())
        if place not in named:
            sample.see(chooser.count, text, place, size)
        chooser.see(place, size)
        progress("reading", chooser.total, None)
    if chooser.count == 0:
        raise DataError("The input holds no text. Name files with at least one non-empty document.")
    split = chooser.split() if valid is None else None
    return _Scan(chooser.count, chooser.total, split, named, sample.texts(split))


def suitable_vocab(text_bytes: int) -> int:
    """A token for every 256 bytes of text, up to 16,384: of a small text most longer tokens would be seen once."""
    return min(16384, max(512, text_bytes // 256 // 64 * 64))


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
            if (place := place_of(text)) in scan.named:  # what is validated on is not trained on as well
                continue
            yield from scan.split.parts(text, place) if scan.split is not None else [("train", text)]
        for text in valid() if valid is not None else ():
            yield "valid", text

    done = 0
    for piece in _encode(marked(), tokenizer):
        writers[piece.split].add(piece.ids)
        counts[piece.split] += piece.last
        done += piece.bytes
        progress("encoding", done, max(done, scan.bytes))
    for split, writer in writers.items():
        writer.close()
        if counts[split] == 0:
            raise DataError(f"No document is left for {split}. Change --valid-fraction, or the files named.")
    tokenizer.save(folder / "tokenizer.json")
    shards = sorted(folder.glob("*.bin"))
    meta = {
        "format": 1,
        "vocab": tokenizer.vocab_size,
        "end_of_document": tokenizer.end_of_document,
        "documents": counts,
        "tokens": {split: writer.tokens for split, writer in writers.items()},
        "bytes": done,
        "fingerprint": fingerprint(shards),
        "sha256": dict(zip([path.name for path in shards], digests(shards), strict=True)),
    }
    (folder / "meta.json").write_text(json.dumps(meta, indent=1) + "\n")
    return meta


def _encode(documents: Iterable[tuple[str, str]], tokenizer: Tokenizer) -> Iterator[_Encoded]:
    """The pieces of all documents in order, batch by batch on all cores: a long document is in many batches."""
    batch: list[tuple[str, str, bool]] = []
    size = 0
    for split, text in documents:
        for piece, last in _pieces(text):
            batch.append((split, piece, last))
            size += len(piece)
            if size >= _BATCH_CHARACTERS:
                yield from _encode_batch(batch, tokenizer)
                batch, size = [], 0
    yield from _encode_batch(batch, tokenizer)


def _encode_batch(batch: list[tuple[str, str, bool]], tokenizer: Tokenizer) -> Iterator[_Encoded]:
    encoded = tokenizer.encode_batch([piece for _, piece, _ in batch])
    for (split, piece, last), ids in zip(batch, encoded, strict=True):
        yield _Encoded(split, [*ids, tokenizer.end_of_document] if last else ids, len(piece.encode()), last)


def _pieces(text: str) -> Iterator[tuple[str, bool]]:
    """Cut after a line end where there is one, so that few tokens differ from encoding in one go. With whether it is
    the last one."""
    start = 0
    while len(text) - start > _PIECE_CHARACTERS:
        cut = text.rfind("\n", start, start + _PIECE_CHARACTERS) + 1
        cut = cut if cut > start else start + _PIECE_CHARACTERS
        yield text[start:cut], False
        start = cut
    yield text[start:], True


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
