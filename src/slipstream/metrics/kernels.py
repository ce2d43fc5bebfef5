"""The longest kernels in a trace of torch's profiler, and the gaps in which the device ran none. Imports no torch.

Gaps of a microsecond or two are what every launch costs the device, however far ahead the host is: only fewer kernels
make fewer of them. In a long one the device waited for the host, and the kernel after it tells what for. Without a GPU,
the operations of the busiest thread that no other called stand for kernels.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from slipstream.metrics.breakdown import ON_DEVICE, busiest_thread, operations

NAME_LENGTH = 120  # templates have names of thousands
LENGTHS_US = (1, 2, 4, 8, 16, 64, 256)  # between which gaps are counted


class Piece(NamedTuple):
    """Something that ran, in microseconds."""

    start: float
    end: float
    name: str


def pieces(trace: Mapping[str, Any]) -> list[Piece]:
    """In the order in which they began."""
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    kernels = [event for event in events if event.get("cat") in ON_DEVICE]
    if kernels:
        return sorted(map(_piece, kernels))
    busiest = busiest_thread(operations(events)[0])
    return [Piece(own.start, own.end, own.name) for own in busiest if own.parent is None]


def _piece(event: Mapping[str, Any]) -> Piece:
    return Piece(event["ts"], event["ts"] + event["dur"], event["name"])


def longest(found: Sequence[Piece], updates: int = 1, most: int = 100) -> list[dict[str, Any]]:
    """Of an update: the kernels that take most time in all, and how often they run."""
    times: dict[str, list[float]] = {}
    for piece in found:
        times.setdefault(piece.name, []).append(piece.end - piece.start)
    in_order = sorted(times.items(), key=lambda item: -sum(item[1]))
    return [
        {"name": name[:NAME_LENGTH], "ms": sum(own) / updates / 1e3, "count": len(own) / updates}
        for name, own in in_order[:most]
    ]


def gaps(found: Sequence[Piece], updates: int = 1, most: int = 25) -> dict[str, Any]:
    """`longest`: the longest, with the kernels around them and when they began. `by_length`: of an update, how many are
    of at least `from_us` microseconds and less than the next number, and how long these are together."""
    between = sorted(_between(found), key=lambda gap: gap[0] - gap[1])
    begin = found[0].start if found else 0.0
    lengths = [end - start for start, end, *_ in between]
    groups = pairwise((0, *LENGTHS_US, float("inf")))
    return {
        "longest": [
            {
                "ms": (end - start) / 1e3,
                "at_ms": (start - begin) / 1e3,
                "after": after[:NAME_LENGTH],
                "before": before[:NAME_LENGTH],
            }
            for start, end, after, before in between[:most]
        ],
        "by_length": [
            {
                "from_us": least,
                "count": sum(least <= length < below for length in lengths) / updates,
                "ms": sum(length for length in lengths if least <= length < below) / updates / 1e3,
            }
            for least, below in groups
        ],
    }


def _between(found: Sequence[Piece]) -> Iterator[tuple[float, float, str, str]]:
    """Begin and end of each stretch in which nothing ran, what ended it last before and what began after it."""
    last: Piece | None = None  # of those that began, the one that ends last
    for piece in found:
        if last is not None and piece.start > last.end:
            yield last.end, piece.start, last.name, piece.name
        if last is None or piece.end > last.end:
            last = piece
