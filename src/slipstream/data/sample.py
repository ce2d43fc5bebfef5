"""The text that a tokenizer is trained on: pieces of training documents, chosen by their hashes.

Invariant: no more text is held than twice what was asked for, however long a document is.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from itertools import count
from math import inf
from typing import NamedTuple

from slipstream.data.split import FRACTION, Split, least_head, place_of, tail_of_one

_PIECE, _LEAST_PIECE = 1 << 20, 1 << 16  # characters; nearly every document is one piece


class _Piece(NamedTuple):
    place: float  # of its document, as number, length (in characters) and size (in bytes)
    number: int
    start: int
    length: int
    size: int
    text: str

    @property
    def end(self) -> int:
        return self.start + len(self.text)


class _Kept:
    """So much text, of the pieces with the greatest keys."""

    def __init__(self, wanted: int) -> None:
        self._wanted, self._held, self._order = wanted, 0, count()
        self._heap: list[tuple[float, int, _Piece]] = []  # on top what is given up first

    def add(self, key: float, piece: _Piece) -> None:
        held = self._held + len(piece.text)
        if held > self._wanted and self._heap and key <= self._heap[0][0]:
            return
        heapq.heappush(self._heap, (key, next(self._order), piece))
        while held > self._wanted and len(self._heap) > 1:
            held -= len(heapq.heappop(self._heap)[2].text)
        self._held = held

    @property
    def pieces(self) -> list[_Piece]:
        """In an order that is none of their files."""
        return sorted(piece for _, _, piece in self._heap)


class Sample:
    """Sees every document once. Documents with the least hashes are for validation, so the greatest are kept; where
    validation text was named, `all_train`, the least."""

    def __init__(self, wanted: int, fraction: float | None, all_train: bool) -> None:
        self._wanted, self._fraction, self._all_train = wanted, fraction, all_train
        self._doubtful = -1.0 if all_train else FRACTION if fraction is None else fraction
        self._length = max(_LEAST_PIECE, min(_PIECE, wanted // 16))
        self._kept = _Kept(wanted)
        # Of the document with the least hash, whatever that is: it is for validation, or its end is.
        self._least, self._least_kept = -inf if all_train else inf, _Kept(wanted)

    def see(self, number: int, text: str, place: float, size: int) -> None:
        if not self._wanted:
            return
        if place < self._least:
            for piece in self._least_kept.pieces:
                self._add(piece)
            self._least, self._least_kept = place, _Kept(self._wanted)
        head = len(text)
        if place == self._least:
            head = least_head(len(text), size, tail_of_one(self._fraction, size))
        for start in range(0, len(text), self._length):
            part = text if len(text) <= self._length else text[start : start + self._length]
            piece = _Piece(place, number, start, len(text), size, part)
            if place == self._least:
                self._least_kept.add(place_of(part) + (piece.end <= head), piece)
            else:
                self._add(piece)

    def _add(self, piece: _Piece) -> None:
        key = piece.place if len(piece.text) == piece.length else place_of(piece.text)
        self._kept.add(-key if self._all_train else key + (piece.place > self._doubtful), piece)

    def texts(self, split: Split | None) -> list[str]:
        """What of it is for training. Where nothing is, a tokenizer that has seen the rest is better than none."""
        if split is None:
            return [text for _, text in _joined(self._kept.pieces)]
        least = self._least_kept.pieces
        for piece in least:
            if split.training_length(piece.place, piece.length, piece.size) > piece.start:
                self._add(piece)
        found = [part for run in _joined(self._kept.pieces) for part in _for_training(*run, split)]
        return found or [text for _, text in _joined(self._kept.pieces or least)]


def _joined(pieces: list[_Piece]) -> Iterator[tuple[_Piece, str]]:
    """Neighbours as one text again, by its first piece: at a cut words are not what they were."""
    run: list[_Piece] = []
    for piece in pieces:
        if run and (piece.start == 0 or piece.start != run[-1].end or piece.number != run[0].number):
            yield run[0], "".join([each.text for each in run])
            run = []
        run.append(piece)
    if run:
        yield run[0], "".join([each.text for each in run])


def _for_training(first: _Piece, text: str, split: Split) -> Iterator[str]:
    if len(text) == first.length:
        yield from (part for name, part in split.parts(text, first.place) if name == "train")
    elif part := text[: max(0, split.training_length(first.place, first.length, first.size) - first.start)]:
        yield part
