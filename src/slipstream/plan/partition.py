"""Cutting the layers into contiguous stages: the exact optimum, by dynamic programming.

    best(s, j) = min over i < j of  max(best(s-1, i), cost(s, i, j))

where cost(s, i, j) is what layers [i, j) cost as stage s: the embedding weighs on the first stage, the head
on the last, and a segment that does not fit stage s's memory costs infinity. Among the partitions with the
least bottleneck the one with the least sum of squares is taken, so that slack is spread evenly.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf

Segment = Callable[[int, int, int], float]  # stage, first layer, last layer (exclusive) -> cost


def partition(layers: int, stages: int, cost: Segment) -> list[range] | None:
    """The best cut of `layers` into `stages` non-empty ranges; None where every cut costs infinity."""
    if stages > layers:
        return None
    table = [[[cost(s, i, j) for j in range(layers + 1)] for i in range(layers)] for s in range(stages)]
    bottleneck, _ = _best(layers, stages, table, max, inf)
    if bottleneck == inf:
        return None
    limit = bottleneck * (1 + 1e-12)
    _, ends = _best(layers, stages, table, lambda total, new: total + new * new, limit)
    starts = [0, *ends[:-1]]
    return [range(first, last) for first, last in zip(starts, ends, strict=True)]


def _best(
    layers: int,
    stages: int,
    table: list[list[list[float]]],
    join: Callable[[float, float], float],
    limit: float,
) -> tuple[float, list[int]]:
    """Least joined cost with no segment above `limit`, and where the stages end."""
    value = [0.0] + [inf] * layers
    choices: list[list[int]] = []
    for s in range(stages):
        new, choice = [inf] * (layers + 1), [0] * (layers + 1)
        for j in range(s + 1, layers - (stages - 1 - s) + 1):
            for i in range(s, j):
                segment = table[s][i][j]
                if value[i] == inf or segment == inf or segment > limit:
                    continue
                joined = join(value[i], segment)
                if joined < new[j]:
                    new[j], choice[j] = joined, i
        value = new
        choices.append(choice)
    ends, at = [], layers
    for choice in reversed(choices):
        ends.append(at)
        at = choice[at]
    return value[layers], ends[::-1]
