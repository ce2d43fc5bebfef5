"""Batches out of token shards: a pure function of the group index.

The stream of a split is cut into windows of `sequence` tokens (and one more as the last target). Sample k
of the run is window  permutation_{seed, epoch}(k mod n),  epoch = k div n,  with n windows; group g holds
samples g * batch ... g * batch + batch - 1. So any group is found in O(1), whatever P and D are, and a
resumed run sees exactly the tokens it would have seen.
"""

from __future__ import annotations

import hashlib
import queue
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar, cast

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from slipstream.data.contents import check_as_prepared, combined, digests
from slipstream.data.shards import find_shards, fingerprint, open_shard, read_meta
from slipstream.errors import DataError

if TYPE_CHECKING:
    from torch import Tensor

IGNORE = -100  # a target that does not count in the loss
_BLOCK_GROUPS = 32
T = TypeVar("T")


class TokenDataset:
    """`batch(group)` -> (inputs, targets), both int64 [batch, sequence], equal for equal arguments.

    `vocab`: ids at or above it are a DataError, at once where the folder's meta.json tells, else when met.
    `mask_document_ends`: the target after an end-of-document token is not counted (set to -100).
    `shuffle=False` gives windows in stream order (validation).
    """

    def __init__(
        self,
        path: str | Path,
        split: str,
        sequence: int,
        batch: int,
        seed: int = 0,
        *,
        vocab: int | None = None,
        shuffle: bool = True,
        mask_document_ends: bool = False,
    ) -> None:
        self.folder, self.split = Path(path), split
        self.sequence, self.batch_size, self.seed = sequence, batch, seed
        self.vocab, self.shuffle = vocab, shuffle
        self.paths = find_shards(self.folder, split)
        self.shards = [open_shard(path) for path in self.paths]
        self.starts = np.cumsum([0] + [len(shard) for shard in self.shards])
        self._views = [
            sliding_window_view(shard, sequence + 1) if len(shard) > sequence else None
            for shard in self.shards
        ]
        self.num_tokens = int(self.starts[-1])
        self.num_windows = max(0, self.num_tokens - 1) // sequence
        self._block: tuple[int, NDArray[np.int64]] = (-1, np.empty((0, 0), dtype=np.int64))
        meta = read_meta(self.folder)
        self.end_of_document: int | None = meta.get("end_of_document")
        self.mask_document_ends = mask_document_ends
        if self.num_windows == 0:
            raise DataError(
                f"{self.folder} has {self.num_tokens} {split} tokens, too few for a sequence of {sequence}. "
                "Add text, or set data.sequence lower."
            )
        if mask_document_ends and self.end_of_document is None:
            raise DataError(
                f"{self.folder} does not say which token ends a document, so documents cannot be masked. "
                'Add meta.json with {"end_of_document": ID}, or turn the document mask off.'
            )
        if vocab is not None and meta.get("vocab", 0) > vocab:
            raise DataError(
                f"{self.folder} uses a vocabulary of {meta['vocab']}, but the model has {vocab}. "
                f"Set model.vocab to at least {meta['vocab']}, or prepare the data with a smaller one."
            )

    def batch(self, group: int) -> tuple[Tensor, Tensor]:
        import torch  # a command that only looks at the shards starts without it

        rows = self._rows(self._windows_of(group))
        if self.vocab is not None and rows.max() >= self.vocab:
            raise DataError(
                f"{self.folder} holds token {rows.max()}, but the model's vocabulary is {self.vocab}. "
                f"Set model.vocab above it, or name the folder made with the model's tokenizer."
            )
        inputs, targets = torch.from_numpy(rows[:, :-1].copy()), torch.from_numpy(rows[:, 1:].copy())
        if self.mask_document_ends:
            targets[inputs == self.end_of_document] = IGNORE
        return inputs, targets

    def _windows_of(self, group: int) -> NDArray[np.int64]:
        """Found for several groups at once: of few samples the permutation costs as much as of many."""
        block, place = divmod(group, _BLOCK_GROUPS)
        if block != self._block[0]:
            size = _BLOCK_GROUPS * self.batch_size
            samples = block * size + np.arange(size, dtype=np.int64)
            self._block = (block, self.windows(samples).reshape(_BLOCK_GROUPS, self.batch_size))
        return self._block[1][place]

    def windows(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        """The window each sample reads."""
        if not self.shuffle:
            return samples % self.num_windows
        epochs = samples // self.num_windows
        result = np.empty_like(samples)
        for epoch in np.unique(epochs):
            chosen = epochs == epoch
            result[chosen] = permute(
                samples[chosen] % self.num_windows, self.num_windows, self.seed, int(epoch)
            )
        return result

    def fingerprint(self) -> str:
        """Of all bytes of few shards, of samples of many: what runs are told apart by in tables."""
        return fingerprint(self.paths)

    def contents(self) -> str:
        """Of every byte; shards that are not as they were prepared are refused."""
        found = digests(self.paths)
        check_as_prepared(self.paths, found, read_meta(self.folder).get("sha256") or {})
        return combined(found)

    def _rows(self, windows: NDArray[np.int64]) -> NDArray[np.int64]:
        """All windows of a batch, a few calls for each shard: row by row, the thread that loads ahead would take
        the interpreter from the one that trains."""
        starts = windows * self.sequence
        shards = np.searchsorted(self.starts, starts, side="right") - 1
        inside = starts + self.sequence < self.starts[shards + 1]
        rows = np.empty((len(windows), self.sequence + 1), dtype=np.int64)
        for shard in np.unique(shards[inside]):
            chosen = np.flatnonzero(inside & (shards == shard))
            view = self._views[shard]
            assert view is not None
            rows[chosen] = view[starts[chosen] - self.starts[shard]]
        for index in np.flatnonzero(~inside):
            rows[index] = self._window(int(windows[index]))
        return rows

    def _window(self, window: int) -> NDArray[np.int64]:
        """Tokens [window * T, window * T + T], across shards where need be."""
        start = window * self.sequence
        end = start + self.sequence + 1
        shard = int(np.searchsorted(self.starts, start, side="right")) - 1
        parts = []
        while start < end:
            base, stop = int(self.starts[shard]), min(end, int(self.starts[shard + 1]))
            parts.append(self.shards[shard][start - base : stop - base])
            start, shard = stop, shard + 1
        return np.concatenate(parts).astype(np.int64)


def permute(index: NDArray[np.int64], size: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """A keyed permutation of range(size), evaluated at `index` without writing it down.

    A four-round Feistel network permutes [0, 4^h) with 4^h >= size; an image outside the range is
    permuted again until it falls inside, which keeps the map one to one.
    """
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = np.uint64((1 << half) - 1)
    shift = np.uint64(half)
    digest = hashlib.sha256(f"{seed}:{epoch}".encode()).digest()
    keys = np.frombuffer(digest, dtype="<u8")
    value = index.astype(np.uint64)
    outside = np.ones(len(value), dtype=bool)
    while outside.any():
        left, right = value[outside] >> shift, value[outside] & mask
        for key in keys:
            left, right = right, left ^ (_mix(right ^ key) & mask)
        value[outside] = (left << shift) | right
        outside = value >= np.uint64(size)
    return value.astype(np.int64)


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Scramble 64 bits so that every bit of the input reaches the low bits of the output."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


class Prefetch(Generic[T]):
    """Calls `load(group)` for start, start + 1, ... on a thread, at most `depth` results ahead.

    `get(group)` must be asked for groups in order. An error in `load` is raised by the `get` it belongs to.
    """

    def __init__(self, load: Callable[[int], T], start: int = 0, depth: int = 4) -> None:
        self._load, self._next = load, start
        self._results: queue.Queue[tuple[int, T | None, BaseException | None]] = queue.Queue(maxsize=depth)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(start,), name="prefetch", daemon=True)
        self._thread.start()

    def get(self, group: int) -> T:
        assert group == self._next, f"groups come in order: {self._next} is next, not {group}"
        got, result, error = self._results.get()
        assert got == group, (got, group)
        if error is not None:
            self.close()
            raise error
        self._next += 1
        return cast(T, result)

    def close(self) -> None:
        self._closed.set()
        self._thread.join()

    def __enter__(self) -> Prefetch[T]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self, group: int) -> None:
        while not self._closed.is_set():
            try:
                item = (group, self._load(group), None)
            except BaseException as error:
                item = (group, None, error)
            while not self._closed.is_set():
                try:
                    self._results.put(item, timeout=0.1)
                    break
                except queue.Full:
                    continue
            if item[2] is not None:
                return
            group += 1
