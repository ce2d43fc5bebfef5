"""Whether updates, batch or size decide what one update of delay costs: length_and_batch.md in docs/results.

The gap of a run is its loss less the synchronous loss of the same seed. All runs are Muon's, on one text: the ladder's
(20 tokens per parameter), its 4M rung at two more lengths and two more batches. The fit is by least squares through
all seeds,

    ln gap = ln a - u ln(updates) - b ln(batch) - n ln(parameters),

with t-intervals. Without a correction there is one batch only, and no power of it.

    python tools/updates_fit.py        prints the tables of length_and_batch.md
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from size_fit import NAMES, RESULTS, row_of, shown, table

from slipstream.study.results import read_export
from slipstream.study.statistics import interval, t_quantile

PUBLISHED_TOKENS = 7.2e9  # 360M parameters at 20 tokens each
BATCHES = (2**17, 2**19, 2**21)  # tokens; the published one is not known to us
UPDATES, BATCH, SIZE = range(3)
FITS = {
    "delay": ((UPDATES, SIZE), (UPDATES,)),
    "ef": ((UPDATES, BATCH, SIZE), (UPDATES, BATCH), (UPDATES, SIZE), (UPDATES,)),
}


@dataclass(frozen=True)
class Run:
    """A delayed run and its gap to the synchronous one of the same seed."""

    mode: str
    seed: str
    updates: int
    batch: int
    parameters: int
    gap: float


def runs() -> list[Run]:
    """The whole runs of the three studies, each once."""
    found = {}
    for study, axis in (("ladder", "size"), ("ladder-length", "updates"), ("ladder-batch", "setting")):
        results = {result.run: result for result in read_export(RESULTS / f"{study}.jsonl.gz")}
        rows = [row for row in table(f"{study}-runs") if row["loss"] and not row.get("tuning")]
        reference = {(row[axis], row["seed"]): float(row["loss"]) for row in rows if row["mode"] == "sync"}
        for row in rows:
            unpaired = (row[axis], row["seed"]) not in reference
            if row["mode"] == "sync" or row[axis].startswith("momentum") or unpaired:
                continue
            result, gap = results[row["run"]], float(row["loss"]) - reference[row[axis], row["seed"]]
            batch = round(result.tokens / result.steps)
            found[row["run"]] = Run(row["mode"], row["seed"], result.steps, batch, result.parameters, gap)
    return list(found.values())


def setting_a() -> list[Run]:
    """42M at two lengths, on another tokenizer and at untuned rates: beside the fit, not in it."""
    results = {result.run: result for result in read_export(RESULTS / "a-length.jsonl.gz")}
    rows = [row for row in table("a-length-runs") if row["batch"] == "16k" and row["loss"]]
    reference = {(row["updates"], row["seed"]): float(row["loss"]) for row in rows if row["mode"] == "sync"}
    found = []
    for row in rows:
        if row["mode"] in ("delay", "ef"):
            result, gap = results[row["run"]], float(row["loss"]) - reference[row["updates"], row["seed"]]
            batch = round(result.tokens / result.steps)
            found.append(Run(row["mode"], row["seed"], result.steps, batch, result.parameters, gap))
    return found


@dataclass(frozen=True)
class Powers:
    """ln gap = intercept - exponents . ln(updates, batch, parameters); those not fitted are 0."""

    intercept: float
    exponents: tuple[float, float, float]
    halves: tuple[float, float, float]  # of the 95 % intervals
    covariance: np.ndarray  # of the intercept and the fitted exponents
    fitted: tuple[int, ...]
    points: int
    scatter: float  # standard deviation of ln gap about the fit

    def at(self, updates: float, batch: float, parameters: float) -> tuple[float, float, float]:
        """The gap of the fit, and the 95 % interval of the fit there."""
        logs = [math.log(value) for value in (updates, batch, parameters)]
        value = self.intercept - sum(power * log for power, log in zip(self.exponents, logs, strict=True))
        row = np.array([1.0, *(-logs[one] for one in self.fitted)])
        half = t_quantile(self.points - len(row)) * math.sqrt(row @ self.covariance @ row)
        return math.exp(value), math.exp(value - half), math.exp(value + half)


def fit(mode: str, fitted: Sequence[int]) -> Powers:
    points = [run for run in runs() if run.mode == mode]
    logs = np.log([[run.updates, run.batch, run.parameters] for run in points])
    design = np.column_stack([np.ones(len(points)), -logs[:, list(fitted)]])
    gaps = np.log([run.gap for run in points])
    solution = np.linalg.lstsq(design, gaps, rcond=None)[0]
    left = len(points) - design.shape[1]
    variance = float(np.sum((gaps - design @ solution) ** 2)) / left
    covariance = variance * np.linalg.inv(design.T @ design)
    errors = t_quantile(left) * np.sqrt(np.diag(covariance))
    powers, halves = [0.0] * 3, [0.0] * 3
    for place, which in enumerate(fitted, 1):
        powers[which], halves[which] = float(solution[place]), float(errors[place])
    return Powers(
        float(solution[0]),
        (*powers,),
        (*halves,),
        covariance,
        tuple(fitted),
        len(points),
        math.sqrt(variance),
    )


def gap_rows() -> list[str]:
    """By updates, then batch, then size: runs of about as many updates stand together."""
    groups: dict[tuple[int, int, int], dict[str, list[float]]] = {}
    for run in [*runs(), *setting_a()]:
        groups.setdefault((run.updates, run.batch, run.parameters), {}).setdefault(run.mode, []).append(
            run.gap
        )
    rows = []
    for (updates, batch, parameters), modes in sorted(groups.items()):
        cells = [
            f"{updates:,}",
            f"{batch / 1024:.0f}k",
            f"{parameters / 1e6:.1f}M",
            f"{updates * batch / parameters:.2g}",
        ]
        rows.append(row_of([*cells, *(gap_shown(modes.get(mode, [])) for mode in ("delay", "ef"))]))
    return rows


def gap_shown(gaps: Sequence[float]) -> str:
    if not gaps:
        return "–"
    few = "" if len(gaps) > 2 else f" ({len(gaps)} of 3 seeds)"
    return shown(interval(gaps), "+.4f") + few


def fit_rows() -> list[str]:
    rows = []
    for mode, fits in FITS.items():
        for fitted in fits:
            found = fit(mode, fitted)
            cells = [
                f"{power:.2f} [{power - half:.2f}, {power + half:.2f}]" if which in fitted else "–"
                for which, (power, half) in enumerate(zip(found.exponents, found.halves, strict=True))
            ]
            rows.append(row_of([NAMES[mode], *cells, f"{found.scatter:.2f}", str(found.points)]))
    return rows


def local_rows() -> list[str]:
    """4M in batches of 32k tokens: the power of the updates between two lengths, paired by seed."""
    rows = []
    for mode in FITS:
        four = [
            run for run in runs() if run.mode == mode and run.batch == 2**15 and 3e6 < run.parameters < 5e6
        ]
        gaps = {(run.updates, run.seed): run.gap for run in four}
        lengths = sorted({updates for updates, _ in gaps})
        cells = [
            shown(interval([math.log(gaps[a, s] / gaps[b, s]) / math.log(b / a) for s in "012"]), ".2f")
            for a, b in pairwise(lengths)
        ]
        rows.append(row_of([NAMES[mode], *cells]))
    return rows


def predicted_rows() -> list[str]:
    """360M parameters on 7.2B tokens, by the power of updates alone and by those of updates and size."""
    rows = []
    for batch in BATCHES:
        updates = PUBLISHED_TOKENS / batch
        cells = [f"{batch // 1024}k", f"{updates:,.0f}"]
        for mode in FITS:
            for fitted in ((UPDATES,), (UPDATES, SIZE)):
                value, low, high = fit(mode, fitted).at(updates, batch, 360e6)
                cells.append(f"{value:+.4f} [{low:.4f}, {high:.4f}]")
        rows.append(row_of(cells))
    return rows


def momentum_rows() -> list[str]:
    rows = [row for row in table("ladder-batch-runs") if not row["tuning"]]
    names = {"momentum 0.9": "0.9", "batch 32k": "0.95", "momentum 0.975": "0.975"}
    found = []
    for setting, name in names.items():
        chosen = [row for row in rows if row["setting"] == setting and row["mode"] in ("sync", "ef")]
        by = {mode: {row["seed"]: row for row in chosen if row["mode"] == mode} for mode in ("sync", "ef")}
        losses = {mode: [float(row["loss"]) for row in one.values()] for mode, one in by.items()}
        gaps = [float(row["loss"]) - float(by["sync"][seed]["loss"]) for seed, row in by["ef"].items()]
        rates = " and ".join(sorted({float(row["lr"]).__format__("g") for row in chosen}))
        means = [f"{statistics.fmean(losses[mode]):.4f}" for mode in ("sync", "ef")]
        found.append(row_of([name, rates, *means, shown(interval(gaps), "+.4f")]))
    return found


if __name__ == "__main__":
    for rows in (gap_rows(), fit_rows(), local_rows(), predicted_rows(), momentum_rows()):
        print(*rows, "", sep="\n")
