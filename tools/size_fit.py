"""How the gap of one update of delay scales with the model: the figures of docs/results/size.md.

The gap of each seed of the ladder (20 tokens per parameter) is its loss less the synchronous loss of the same seed.
The fit is that of `power_fit`, gap = a parameters^-b, through the sizes.

Read are the tables of docs/results and, for 2M at twice the rate, `ladder-log.csv`: final losses that only a log kept.

    python tools/size_fit.py        prints the tables of size.md
"""

from __future__ import annotations

import csv
import math
import statistics
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path

from power_fit import Setting, fit, lack_of_fit, local_power

from slipstream.study.results import Result, read_export
from slipstream.study.statistics import Estimate, interval

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


def gaps(size: str, mode: str) -> dict[str, float]:
    """By seed, of those that both have."""
    reference = losses(size, "sync")
    return {seed: loss - reference[seed] for seed, loss in losses(size, mode).items() if seed in reference}


def parameters(size: str) -> float:
    return synchronous(size)["0"].parameters


def quarter_loss(size: str, mode: str) -> tuple[float, int]:
    """The best of the grid at a quarter of the length, and its updates."""
    mine = [row for row in table("ladder-runs") if (row["size"], row["mode"]) == (size, mode)]
    rows = [row for row in mine if row["loss"] and row["tuning"]]
    best = min(rows, key=lambda row: float(row["loss"]))
    return float(best["loss"]), runs()[best["run"]].steps


def gap_rows() -> list[str]:
    """Gap and token penalty as the study's own table has them."""
    found = {(row["size"], row["mode"]): row for row in table("ladder")}
    rows = []
    for size in SIZES:
        for mode, name in NAMES.items():
            row = found[size, mode]
            if int(row["seeds"]) < SEEDS:
                name = f"{name}, {row['seeds']} seeds"
            rows.append(row_of([size, name, entry(row, "gap", "+.4f"), *penalties(row)]))
    return rows


def settings(mode: str) -> list[Setting]:
    return [Setting((parameters(size),), tuple(gaps(size, mode).values())) for size in SIZES]


def fit_rows() -> list[str]:
    rows = []
    for mode, name in NAMES.items():
        found, lack = fit(settings(mode)), lack_of_fit(settings(mode))
        (power,), (half,) = found.exponents, found.halves
        told = [predicted(found.setting((size,))) for _, size in LARGER]
        off = f"F({lack.freedom[0]}, {lack.freedom[1]}) = {lack.ratio:.1f}, p {lack.chance:.2g}"
        rows.append(row_of([name, f"{power:.2f} [{power - half:.2f}, {power + half:.2f}]", off, *told]))
    return rows


def local_rows() -> list[str]:
    """The power that leads from each size to the next, by seed."""
    rows = []
    for mode, name in NAMES.items():
        powers = [
            local_power(gaps(small, mode), gaps(large, mode), parameters(large) / parameters(small))
            for small, large in pairwise(SIZES)
        ]
        few = [f" ({one.n} seeds)" if one.n < SEEDS else "" for one in powers]
        rows.append(
            row_of([name, *(shown(one, ".2f") + said for one, said in zip(powers, few, strict=True))])
        )
    return rows


def needed_rows() -> list[str]:
    """The exponents that lead from our 8M to the published gaps, and from one of them to the other."""
    published = {(row["model"], row["mode"]): _number(row["gap"]) for row in table("published")}
    rows = []
    for mode in ("delay", "ef"):
        ours = statistics.fmean(gaps("8M", mode).values())
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


def entry(row: Mapping[str, str], key: str, form: str) -> str:
    """A figure of a study's table as CSV, as its page shows it."""
    low, high = row[f"{key}_low"], row[f"{key}_high"]
    around = (float(low), float(high)) if low and high else None
    return shown(Estimate(float(row[key]), around, int(row["seeds"])), form)


def penalties(row: Mapping[str, str]) -> list[str]:
    """By curve and by length; – where there is none, ≥ where only a lower bound is known."""
    by_length = entry(row, "penalty_by_length", ".3f") if row.get("penalty_by_length") else "–"
    least = "≥ " if row.get("by_length_least") == "1" else ""
    return [entry(row, "penalty", ".3f"), least + by_length]


def shown(estimate: Estimate | None, form: str) -> str:
    assert estimate is not None
    if estimate.interval is None:
        return f"{estimate.value:{form}}"
    low, high = (f"{end:{form.lstrip('+')}}" for end in estimate.interval)
    return f"{estimate.value:{form}} [{low}, {high}]"


def predicted(estimate: Estimate) -> str:
    assert estimate.interval is not None
    ends = (estimate.value, *estimate.interval)
    value, low, high = ("<0.0001" if one < 5e-5 else f"{one:.4f}" for one in ends)
    return f"{value} [{low}, {high}]"


def row_of(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


KINDS = (gap_rows, fit_rows, local_rows, needed_rows, length_rows, rate_rows)


def rows() -> list[str]:
    """Every row of the page."""
    return [row for kind in KINDS for row in kind()]


if __name__ == "__main__":
    for kind in KINDS:
        print(*kind(), "", sep="\n")
