"""Means over seeds, and paired gaps with their 95 % intervals.

    standard error   s / sqrt(n)
    paired gap       mean of d_i = x_i - r_i over the seeds both have, ± t(0.975, n-1) s_d / sqrt(n)
    share recovered  1 - gap(x) / gap(baseline), over the seeds all three have

Pairing removes what a seed does to every mode alike (initialisation, order of the data), which is most of the
spread between seeds. One or two seeds give a value and no interval: of two, t(0.975, 1) = 12.7 makes one that says
nothing but how far apart the two happened to lie.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

FEWEST = 3  # seeds that make an interval


@dataclass(frozen=True)
class Estimate:
    """A value from `n` seeds and its 95 % interval, None with fewer than `FEWEST` seeds."""

    value: float
    interval: tuple[float, float] | None
    n: int
    extrapolated: bool = False  # read off beyond the end of a curve
    least: bool = False  # a lower bound of what is asked for

    def mapped(self, function: Callable[[float], float]) -> Estimate:
        """A monotonic function of it, in place of the value and of both ends of the interval. Whether it makes an upper
        bound of a lower one the caller knows."""
        around = None
        if self.interval is not None:
            low, high = sorted(map(function, self.interval))
            around = low, high
        return replace(self, value=function(self.value), interval=around, least=False)


def standard_error(values: Sequence[float]) -> float | None:
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None


def interval(values: Sequence[float]) -> Estimate:
    """The mean with its t-interval."""
    mean, error = statistics.fmean(values), standard_error(values)
    if error is None or len(values) < FEWEST:
        return Estimate(mean, None, len(values))
    half = t_quantile(len(values) - 1) * error
    return Estimate(mean, (mean - half, mean + half), len(values))


def paired_gap(values: Mapping[str, float], reference: Mapping[str, float]) -> Estimate | None:
    """Gap of `values` to `reference`, both by seed; None without a common seed."""
    common = [seed for seed in values if seed in reference]
    return interval([values[seed] - reference[seed] for seed in common]) if common else None


def share_recovered(
    values: Mapping[str, float], reference: Mapping[str, float], baseline: Mapping[str, float]
) -> Estimate | None:
    """How much of the baseline's gap is gone; its interval from the ratio's linear part (delta method)."""
    seeds = [seed for seed in values if seed in reference and seed in baseline]
    if not seeds:
        return None
    gaps = [values[seed] - reference[seed] for seed in seeds]
    whole = [baseline[seed] - reference[seed] for seed in seeds]
    size = statistics.fmean(whole)
    if size <= 0:
        return None  # there was nothing to recover
    ratio = statistics.fmean(gaps) / size
    residuals = [(gap - ratio * all_of_it) / size for gap, all_of_it in zip(gaps, whole, strict=True)]
    # The residuals sum to zero.
    return replace(interval(residuals), value=0.0).mapped(lambda part: 1 - ratio + part)


@cache
def t_quantile(freedom: int, level: float = 0.975) -> float:
    """Student's t: the value below which `level` (at least 1/2) of its distribution lies."""
    low, high = 0.0, 2.0
    while _t_below(high, freedom) < level:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _t_below(middle, freedom) < level else (low, middle)
    return (low + high) / 2


def _t_below(value: float, freedom: int) -> float:
    """The distribution function in closed form (Abramowitz & Stegun 26.7.3 and 26.7.4)."""
    angle = math.atan2(value, math.sqrt(freedom))
    cosine, odd = math.cos(angle), freedom % 2
    term = cosine if odd else 1.0
    total = term if freedom > 1 or not odd else 0.0
    for j in range(3 if odd else 2, freedom - 1, 2):
        term *= cosine**2 * (j - 1) / j
        total += term
    inside = 2 / math.pi * (angle + math.sin(angle) * total) if odd else math.sin(angle) * total
    return (1 + inside) / 2
