"""How the gap of one update of delay scales with the model: the figures of docs/results/size.md.

The gap of each seed of the ladder (20 tokens per parameter) is its loss less the synchronous loss of the same seed.
The fit is a straight line by least squares through all seeds,

    ln gap = ln a - b ln(parameters),    so that gap = a parameters^-b,

with t-intervals. More than two sizes can be held against the line: `bend` is how many standard errors they lie off it,
by the spread between seeds alone (95 % of three sizes would be within 2.4, of four within 2.1).

Read are the tables of docs/results and, for 2M at twice the rate, `ladder-log.csv`: final losses that only a log kept.

    python tools/size_fit.py        prints the tables of size.md
"""

from __future__ import annotations

import csv
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path

from slipstream.study.penalty import mean_penalty, penalty_of_gap, token_penalty
from slipstream.study.results import Result, read_export
from slipstream.study.statistics import Estimate, interval, t_quantile

RESULTS = Path(__file__).parents[1] / "docs" / "results"
NAMES = {"delay": "delay", "ef": "error feedback", "ef 1/3": "a third of it old"}
SIZES = ("2M", "4M", "8M", "16M")
SEEDS = 3  # of a row
LARGER = (("360M", 360e6), ("10B", 10e9))


def table(name: str) -> list[dict[str, str]]:
    with (RESULTS / f"{name}.csv").open(newline="") as file:
        return list(csv.DictReader(file))


@cache
def runs() -> Mapping[str, Result]:
    return {run.run: run for run in read_export(RESULTS / "ladder.jsonl.gz")}


def losses(size: str, mode: str) -> dict[str, float]:
    """Final loss by seed of the whole runs, each row's rate being the one that was chosen for it."""
    rows = [row for row in table("ladder-runs") if (row["size"], row["mode"]) == (size, mode)]
    return {row["seed"]: float(row["loss"]) for row in rows if row["loss"] and not row["tuning"]}


def logged(size: str, mode: str) -> dict[str, float]:
    rows = [row for row in table("ladder-log") if (row["size"], row["mode"]) == (size, mode)]
    longest = max((int(row["updates"]) for row in rows), default=0)
    return {row["seed"]: float(row["loss"]) for row in rows if int(row["updates"]) == longest}


def synchronous(size: str) -> dict[str, Result]:
    rows = [row for row in table("ladder-runs") if (row["size"], row["mode"]) == (size, "sync")]
    return {row["seed"]: runs()[row["run"]] for row in rows if not row["tuning"]}


def gaps(size: str, mode: str) -> list[float]:
    """Of the seeds that both have."""
    reference = losses(size, "sync")
    return [loss - reference[seed] for seed, loss in losses(size, mode).items() if seed in reference]


def parameters(size: str) -> float:
    return synchronous(size)["0"].parameters


def slope(size: str) -> float:
    """How far the final synchronous loss of seed 0 falls per e-fold of tokens, from a quarter of the length."""
    whole, (quarter, updates) = synchronous(size)["0"], quarter_loss(size, "sync")
    return (quarter - losses(size, "sync")["0"]) / math.log(whole.steps / updates)


def quarter_loss(size: str, mode: str) -> tuple[float, int]:
    """The best of the grid at a quarter of the length, and its updates."""
    mine = [row for row in table("ladder-runs") if (row["size"], row["mode"]) == (size, mode)]
    rows = [row for row in mine if row["loss"] and row["tuning"]]
    best = min(rows, key=lambda row: float(row["loss"]))
    return float(best["loss"]), runs()[best["run"]].steps


@dataclass(frozen=True)
class Line:
    """ln gap = intercept - exponent * ln(parameters)."""

    exponent: float
    half: float  # of the exponent's 95 % interval
    middle: tuple[float, float]  # mean ln(parameters), mean ln(gap)
    variance: float  # of a seed about the line
    spread: float  # sum of squares of ln(parameters) about its mean
    points: int
    bend: float | None  # standard errors that the sizes lie off the line; None of two sizes

    def at(self, size: float) -> tuple[float, float, float]:
        """The gap on the line, and the 95 % interval of the line there."""
        away = math.log(size) - self.middle[0]
        value = self.middle[1] - self.exponent * away
        error = math.sqrt(self.variance * (1 / self.points + away**2 / self.spread))
        half = t_quantile(self.points - 2) * error
        return math.exp(value), math.exp(value - half), math.exp(value + half)


def sizes_of(mode: str) -> tuple[str, ...]:
    """Those with as many seeds as an interval needs."""
    return tuple(size for size in SIZES if len(losses(size, mode)) >= SEEDS)


def fit(mode: str, sizes: Sequence[str]) -> Line:
    points = [(math.log(parameters(size)), math.log(gap)) for size in sizes for gap in gaps(size, mode)]
    x, y = (statistics.fmean(values) for values in zip(*points, strict=True))
    spread = sum((a - x) ** 2 for a, _ in points)
    falls = -sum((a - x) * (b - y) for a, b in points) / spread
    squares = sum((b - y + falls * (a - x)) ** 2 for a, b in points)
    variance = squares / (len(points) - 2)
    bend = None
    if len(sizes) > 2:
        logs = [[math.log(gap) for gap in gaps(size, mode)] for size in sizes]
        within = sum((value - statistics.fmean(one)) ** 2 for one in logs for value in one)
        freedom = len(sizes) - 2
        bend = math.sqrt((squares - within) / freedom / (within / (len(points) - len(sizes))))
    half = t_quantile(len(points) - 2) * math.sqrt(variance / spread)
    return Line(falls, half, (x, y), variance, spread, len(points), bend)


def gap_rows() -> list[str]:
    rows = []
    for size in SIZES:
        for mode, name in NAMES.items():
            if (seeds := len(losses(size, mode))) < SEEDS:
                name = f"{name}, {seeds} seeds"
            gap, references = interval(gaps(size, mode)), synchronous(size)
            found = [
                token_penalty(references[seed].validation, references[seed].loss or 0.0, loss)
                for seed, loss in losses(size, mode).items()
            ]
            by_curve = mean_penalty([one for one in found if one is not None])
            by_length = penalty_of_gap(gap, slope(size))
            cells = [size, name, shown(gap, "+.4f"), shown(by_curve, ".3f"), shown(by_length, ".3f")]
            rows.append(row_of(cells))
    return rows


def fit_rows() -> list[str]:
    rows = []
    for mode, name in NAMES.items():
        every = sizes_of(mode)
        for sizes in (every, every[:2], every[1:]):
            line = fit(mode, sizes)
            around = f"{line.exponent:.2f} [{line.exponent - line.half:.2f}, {line.exponent + line.half:.2f}]"
            bend = "–" if line.bend is None else f"{line.bend:.1f}"
            told = [_predicted(*line.at(size)) for _, size in LARGER]
            rows.append(
                row_of([name, ", ".join(sizes), around, bend, *(told if sizes[-1] == every[-1] else "––")])
            )
    return rows


def needed_rows() -> list[str]:
    """The exponents that lead from our 8M to the published gaps, and from one of them to the other."""
    published = {(row["model"], row["mode"]): _number(row["gap"]) for row in table("published")}
    rows = []
    for mode in ("delay", "ef"):
        ours = statistics.fmean(gaps("8M", mode))
        steps = [(parameters("8M"), ours), *((size, published[name, mode]) for name, size in LARGER)]
        cells = [NAMES[mode], f"{ours:+.4f}"]
        for (small, first), (large, second) in pairwise(steps):
            told = f"{math.log(first / second) / math.log(large / small):.2f}" if first and second else "–"
            cells += [f"{second:+.3f}", told]
        rows.append(row_of(cells))
    return rows


def length_rows() -> list[str]:
    """Error feedback, seed 0: the gap at a quarter of the length, whose grid chose the rates, and at the whole."""
    rows = []
    for size in SIZES:
        (sync, updates), (late, _) = quarter_loss(size, "sync"), quarter_loss(size, "ef")
        whole = [
            str(synchronous(size)["0"].steps),
            f"{losses(size, 'ef')['0'] - losses(size, 'sync')['0']:+.4f}",
        ]
        rows.append(row_of([size, str(updates), f"{late - sync:+.4f}", *whole]))
    return rows


def rate_rows() -> list[str]:
    """2M: the gaps to synchronous runs at twice the rate, which a quarter of the length would have chosen."""
    reference = logged("2M", "sync")
    told = {mode: [loss - reference[seed] for seed, loss in losses("2M", mode).items()] for mode in NAMES}
    return [row_of([NAMES[mode], shown(interval(values), "+.4f")]) for mode, values in told.items()]


def _number(text: str) -> float:
    return float(text) if text else 0.0


def shown(estimate: Estimate | None, form: str) -> str:
    assert estimate is not None
    if estimate.interval is None:
        return f"{estimate.value:{form}}"
    low, high = (f"{end:{form.lstrip('+')}}" for end in estimate.interval)
    return f"{estimate.value:{form}} [{low}, {high}]"


def _predicted(*values: float) -> str:
    value, low, high = ("<0.0001" if value < 5e-5 else f"{value:.4f}" for value in values)
    return f"{value} [{low}, {high}]"


def row_of(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


if __name__ == "__main__":
    for rows in (gap_rows(), fit_rows(), needed_rows(), length_rows(), rate_rows()):
        print(*rows, "", sep="\n")
