"""A power of some quantities through the mean gaps of settings: what size.md and length_and_batch.md fit.

    ln gap = ln a - p1 ln(x1) - p2 ln(x2) ...

A point is a setting, its gap the mean over its seeds. More seeds say better what one setting's gap is, and nothing of
how settings lie about the power, so the degrees of freedom are the settings less the parameters. What is predicted is
another setting, with the scatter of one.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from slipstream.study.statistics import Estimate, interval, t_quantile


@dataclass(frozen=True)
class Setting:
    at: tuple[float, ...]  # updates, parameters or what else the gap is a power of
    gaps: tuple[float, ...]  # of its seeds


@dataclass(frozen=True)
class Powers:
    intercept: float
    exponents: tuple[float, ...]
    halves: tuple[float, ...]  # of the exponents' 95 % intervals
    covariance: np.ndarray  # of the intercept and the exponents
    scatter: float  # standard deviation of a setting's ln gap about the power
    freedom: int

    def value(self, at: Sequence[float]) -> float:
        logs = zip(self.exponents, map(math.log, at), strict=True)
        return math.exp(self.intercept - sum(power * log for power, log in logs))

    def setting(self, at: Sequence[float]) -> Estimate:
        """The gap of a setting that was not among the points, with the 95 % interval of its mean."""
        row = np.array([1.0, *(-math.log(value) for value in at)])
        half = t_quantile(self.freedom) * math.sqrt(self.scatter**2 + row @ self.covariance @ row)
        value = self.value(at)
        return Estimate(value, (value * math.exp(-half), value * math.exp(half)), self.freedom)


def fit(settings: Sequence[Setting]) -> Powers:
    """By least squares, every setting counting alike."""
    design = np.array([[1.0, *(-math.log(value) for value in one.at)] for one in settings])
    gaps = np.log([statistics.fmean(one.gaps) for one in settings])
    solution = np.linalg.lstsq(design, gaps, rcond=None)[0]
    freedom = len(settings) - design.shape[1]
    variance = float(np.sum((gaps - design @ solution) ** 2)) / freedom
    covariance = variance * np.linalg.inv(design.T @ design)
    halves = t_quantile(freedom) * np.sqrt(np.diag(covariance))
    return Powers(
        float(solution[0]),
        tuple(map(float, solution[1:])),
        tuple(map(float, halves[1:])),
        covariance,
        math.sqrt(variance),
        freedom,
    )


@dataclass(frozen=True)
class Lack:
    """Of fit: by how much the settings lie further off the power than the scatter of their seeds makes them."""

    ratio: float  # F
    freedom: tuple[int, int]
    chance: float  # of a ratio as large, were the power exact


def lack_of_fit(settings: Sequence[Setting]) -> Lack:
    """On the logarithms of the seeds' gaps, so a seed without a gap above zero has no place here."""
    rows = [(one, math.log(gap)) for one in settings for gap in one.gaps]
    design = np.array([[1.0, *(-math.log(value) for value in one.at)] for one, _ in rows])
    logs = np.array([log for _, log in rows])
    solution = np.linalg.lstsq(design, logs, rcond=None)[0]
    about = float(np.sum((logs - design @ solution) ** 2))
    means = [statistics.fmean(map(math.log, one.gaps)) for one in settings]
    within = sum(
        (math.log(gap) - mean) ** 2 for one, mean in zip(settings, means, strict=True) for gap in one.gaps
    )
    freedom = (len(settings) - design.shape[1], len(rows) - len(settings))
    ratio = (about - within) / freedom[0] / (within / freedom[1])
    return Lack(ratio, freedom, f_above(ratio, *freedom))


def f_above(ratio: float, first: int, second: int) -> float:
    """The chance that Fisher's F is larger. With F = second / first tan² of an angle its density is one of sines."""
    nodes, weights = np.polynomial.legendre.leggauss(64)
    start = math.atan(math.sqrt(first * ratio / second))
    angles = start + (math.pi / 2 - start) * (nodes + 1) / 2
    density = 2 * np.sin(angles) ** (first - 1) * np.cos(angles) ** (second - 1)
    beta = math.exp(math.lgamma(first / 2) + math.lgamma(second / 2) - math.lgamma((first + second) / 2))
    return float((math.pi / 2 - start) / 2 * np.sum(weights * density) / beta)


def local_power(first: Mapping[str, float], second: Mapping[str, float], ratio: float) -> Estimate:
    """The power that leads from one setting's gaps to those of another at `ratio` times the quantity, by seed."""
    common = [seed for seed in first if seed in second]
    return interval([math.log(first[seed] / second[seed]) / math.log(ratio) for seed in common])


def pooled(groups: Sequence[Sequence[float]]) -> tuple[float, int]:
    """One standard deviation of a seed for all groups, and its degrees of freedom."""
    freedom = sum(len(one) - 1 for one in groups)
    squares = sum(statistics.variance(one) * (len(one) - 1) for one in groups if len(one) > 1)
    return math.sqrt(squares / freedom), freedom


def with_spread(values: Sequence[float], spread: float, freedom: int) -> Estimate:
    """The mean with the interval that a standard deviation known from elsewhere gives it."""
    mean, half = statistics.fmean(values), t_quantile(freedom) * spread / math.sqrt(len(values))
    return Estimate(mean, (mean - half, mean + half), len(values))
