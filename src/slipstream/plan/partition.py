"""Cutting a model into contiguous stages: the exact optimum, by dynamic programming.

    best(s, j) = min over i < j of  max(best(s-1, i), cost(s, i, j))

where cost(s, i, j) is what units [i, j) (layers, or halves of them) cost as stage s: the embedding weighs on the first
stage, the head on the last, and a segment that does not fit stage s's memory costs infinity. Among the partitions with
the least bottleneck the one with the least sum of squares is taken, so that slack is spread evenly. A segment must cost
no less than one that lies in it: what is longer than one that costs too much is not looked at.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from sys import float_info

TIE = (
    1e-12  # less than this is rounding; of equal cuts the later stages get more, whose activations are fewer
)
Segment = Callable[[int, int, int], float]  # stage, first unit, last unit (exclusive) -> cost


def partition(units: int, stages: int, cost: Segment, limit: float = inf) -> list[range] | None:
    """The best cut of `units` into `stages` non-empty ranges; None where every cut costs infinity, or above `limit`."""
    found = _best(units, stages, cost, max, min(limit, float_info.max))
    if found is None:
        return None
    found = _best(units, stages, cost, lambda total, new: total + new * new, found[0] * (1 + stages * TIE))
    assert found is not None, (units, stages)
    _, ends = found
    starts = [0, *ends[:-1]]
    return [range(first, last) for first, last in zip(starts, ends, strict=True)]


def _best(
    units: int, stages: int, cost: Segment, join: Callable[[float, float], float], limit: float
) -> tuple[float, list[int]] | None:
    """Least joined cost with no segment above `limit`, and where the stages end."""
    value = {0: 0.0}  # by the end of the stages so far
    choices: list[dict[int, int]] = []
    for stage in range(stages):
        found: dict[int, float] = {}
        choice: dict[int, int] = {}
        left = stages - 1 - stage
        for start, total in sorted(value.items()):
            for end in range(start + 1, units - left + 1):
                segment = cost(stage, start, end)
                if segment > limit:
                    break
                joined = join(total, segment)
                if joined < found.get(end, inf) * (1 - TIE):
                    found[end], choice[end] = joined, start
        value = found
        choices.append(choice)
    if units not in value:
        return None
    ends, at = [], units
    for choice in reversed(choices):
        ends.append(at)
        at = choice[at]
    return value[units], ends[::-1]
