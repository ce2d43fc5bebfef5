"""Which text is for validation: by the hash of a document, so that neither order nor files matter.

Unless a share is asked for, one document in a hundred is, and as many more as make the validation text long enough to
tell something: a tenth of all, or what fills eight default updates. Where documents are so long that a whole one would
be too much (a book in one file), only the end of it is.
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field

from slipstream.errors import DataError

FRACTION = 0.01
ENOUGH_BYTES = 1 << 17
LEAST_SHARE = 0.1


def place_of(text: str) -> float:
    """A document's hash as a number in [0, 1)."""
    digest = hashlib.sha256(text.encode()).digest()
    return int.from_bytes(digest[:6], "little") / 2**48


@dataclass(frozen=True)
class Split:
    """Documents up to `threshold` are for validation; of the one at `cut` the last `tail_bytes` are."""

    threshold: float
    cut: float | None = None
    tail_bytes: int = 0

    def parts(self, text: str, place: float) -> Iterator[tuple[str, str]]:
        """(split, text): the whole document, or its beginning for training and its end for validation."""
        if place != self.cut:
            yield ("valid" if place <= self.threshold else "train"), text
            return
        head, tail = cut_end(text, self.tail_bytes)
        yield "train", head
        yield "valid", tail

    def training_length(self, place: float, length: int, size: int) -> int:
        """How much of the beginning of a document of so many characters and bytes is for training at the least."""
        if place != self.cut:
            return length if place > self.threshold else 0
        return least_head(length, size, self.tail_bytes)


@dataclass
class Chooser:
    """Sees every document once; keeps of the least hashes what may be needed."""

    fraction: float | None  # None: enough
    count: int = 0
    total: int = 0
    _kept: list[tuple[float, int]] = field(default_factory=list)  # (-hash, bytes), the largest hash on top
    _kept_bytes: int = 0

    def see(self, place: float, size: int) -> None:
        self.count, self.total = self.count + 1, self.total + size
        heapq.heappush(self._kept, (-place, size))
        self._kept_bytes += size
        while len(self._kept) > 1 and self._kept_bytes - self._kept[0][1] >= ENOUGH_BYTES:
            self._kept_bytes -= heapq.heappop(self._kept)[1]

    def split(self) -> Split:
        least = sorted((-negative, size) for negative, size in self._kept)
        if self.count == 1:
            if self.fraction == 0:
                raise DataError(
                    "The input is a single document and --valid-fraction 0 leaves nothing to validate on. Set it above "
                    "0, or name validation files with --valid."
                )
            return Split(-1.0, least[0][0], tail_of_one(self.fraction, self.total))
        if self.fraction is not None:
            return Split(max(least[0][0], self.fraction))
        needed, held, before = min(ENOUGH_BYTES, LEAST_SHARE * self.total), 0, -1.0
        for place, size in least:
            if held + size > 2 * needed and place > FRACTION and size > needed:
                return Split(max(before, FRACTION), place, max(1, round(needed - held)))
            held, before = held + size, place
            if held >= needed:
                break
        return Split(max(before, FRACTION))


def cut_end(text: str, tail_bytes: int) -> tuple[str, str]:
    """The text without its end, and its end: cut after a line, else after a word, else anywhere. An end twice as long
    as was wanted is too long."""
    size = len(text.encode())
    wanted, earliest = _head(len(text), size, tail_bytes), least_head(len(text), size, tail_bytes)
    for mark in ("\n", " "):
        at = text.rfind(mark, 0, wanted) + 1
        if at > earliest:
            wanted = at
            break
    head, tail = text[:wanted], text[wanted:]
    if not head.strip() or not tail.strip():
        raise DataError(
            "The text is too short to set some of it aside for validation. Name more text, or validation files with "
            "--valid."
        )
    return head, tail


def tail_of_one(fraction: float | None, size: int) -> int:
    """How many bytes at the end of a text of one document are for validation."""
    enough = max(FRACTION * size, min(ENOUGH_BYTES, LEAST_SHARE * size))
    return max(1, round(enough if fraction is None else fraction * size))


def least_head(length: int, size: int, tail_bytes: int) -> int:
    """After how many characters a text of so many characters and bytes is cut at the earliest."""
    wanted = _head(length, size, tail_bytes)
    return max(wanted // 2, 2 * wanted - length)


def _head(length: int, size: int, tail_bytes: int) -> int:
    return max(1, length - max(1, round(length * tail_bytes / max(1, size))))
