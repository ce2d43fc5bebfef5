"""The text that a tokenizer is trained on: pieces of training documents, chosen by their hashes.

Invariant: no more text is held than was asked for and a piece, however long a document is, and what is held
does not depend on the order of documents.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter

from slipstream.data.split import FRACTION, Split, place_of

_PIECE, _LEAST_PIECE = 1 << 20, 1 << 16  # characters; nearly every document is one piece


@dataclass(frozen=True, slots=True)
class _Piece:
    number: int  # of its document
    place: float  # so is this
    length: int  # and these: characters, bytes
    size: int
    start: int
    text: str

    @property
    def end(self) -> int:
        return self.start + len(self.text)


class Sample:
    """Sees every document once. Documents with the least hashes are for validation, so the greatest are kept; where
    validation text was named, `all_train`, the least."""

    def __init__(self, wanted: int, fraction: float | None, all_train: bool) -> None:
        self._wanted, self._sign = wanted, -1 if all_train else 1
        self._doubtful = -1.0 if all_train else FRACTION if fraction is None else fraction
        self._length = max(_LEAST_PIECE, min(_PIECE, wanted // 16))
        self._heap: list[tuple[float, int, _Piece]] = []  # on top what is given up first
        self._pieces = self._held = 0

    def see(self, number: int, text: str, place: float, size: int) -> None:
        for start in range(0, len(text) if self._wanted else 0, self._length):
            whole = len(text) <= self._length
            part = text if whole else text[start : start + self._length]
            key = self._sign * (place if whole else place_of(part)) + (place > self._doubtful)
            self._pieces += 1
            heapq.heappush(
                self._heap, (key, self._pieces, _Piece(number, place, len(text), size, start, part))
            )
            self._held += len(part)
            while self._held > self._wanted and len(self._heap) > 1:
                self._held -= len(heapq.heappop(self._heap)[2].text)

    def texts(self, split: Split | None) -> list[str]:
        """What of it is for training. Where nothing is, a tokenizer that has seen the rest is better than none."""
        pieces = [piece for _, _, piece in self._heap]
        pieces.sort(key=attrgetter("place", "number", "start"))
        everything = [run for _, found in groupby(pieces, attrgetter("number")) for run in _runs(list(found))]
        if split is None:
            return [text for _, text in everything]
        return [text for run in everything for text in _for_training(*run, split)] or [
            t for _, t in everything
        ]


def _runs(pieces: list[_Piece]) -> Iterator[tuple[_Piece, str]]:
    """Neighbours as one text again, by its first piece: at a cut words are not what they were."""
    first = 0
    for last, piece in enumerate(pieces):
        if last + 1 == len(pieces) or pieces[last + 1].start != piece.end:
            yield pieces[first], "".join(each.text for each in pieces[first : last + 1])
            first = last + 1


def _for_training(first: _Piece, text: str, split: Split) -> Iterator[str]:
    if len(text) == first.length:
        yield from (part for name, part in split.parts(text, first.place) if name == "train")
    elif part := text[: max(0, split.training_length(first.place, first.length, first.size) - first.start)]:
        yield part
