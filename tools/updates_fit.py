"""Whether updates, batch or size decide what one update of delay costs: length_and_batch.md in docs/results.

The gap of a run is its loss less the synchronous loss of the same seed. All runs are Muon's, on one text: the ladder's
(20 tokens per parameter), its 4M rung at two more lengths and two more batches. The fits are those of `power_fit`:
through settings, not seeds. Without a correction there is one batch only, and no power of it.

    python tools/updates_fit.py        prints the tables of length_and_batch.md
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

from power_fit import Powers, Setting, fit, lack_of_fit, local_power, pooled, with_spread
from size_fit import NAMES, RESULTS, predicted, row_of, shown, table

from slipstream.study.results import read_export
from slipstream.study.statistics import Estimate, interval

ELSEWHERE = (
    ("30M", 30_155_264, 602_931_200, (2**15,)),  # `rung`; the others are published
    ("360M", 360e6, 7.2e9, (2**17, 2**19, 2**21)),
    ("10B", 10e9, 200e9, (2**22,)),
)  # tokens of a batch
UPDATES, BATCH, SIZE = range(3)
FITS = {
    "delay": ((UPDATES, SIZE), (UPDATES,)),
    "ef": ((UPDATES, BATCH, SIZE), (UPDATES, BATCH), (UPDATES, SIZE), (UPDATES,)),
}
M4, M16, M42 = 3_903_200, 16_619_136, 42_082_816
SMALL = 0.045  # gaps below it have about one spread over seeds
GRID = (0.004, 0.008, 0.016)
MOMENTA = {"0.9": "momentum 0.9", "0.95": "batch 32k", "0.975": "momentum 0.975"}


@dataclass(frozen=True)
class Run:
    """A delayed run and its gap to the synchronous one of the same seed."""

    mode: str
    seed: str
    updates: int
    batch: int
    parameters: int
    gap: float

    @property
    def place(self) -> tuple[int, int, int]:
        return self.updates, self.batch, self.parameters


@cache
def runs() -> tuple[Run, ...]:
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
    return tuple(found.values())


@cache
def setting_a() -> tuple[Run, ...]:
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
    return tuple(found)


@cache
def rung() -> tuple[Run, ...]:
    """30M, one seed, on the text of the fit: beside it, since it came later and says whether the fit foretold it."""
    results = {result.run: result for result in read_export(RESULTS / "ladder-30m.jsonl.gz")}
    rows = [row for row in table("ladder-30m-runs") if row["loss"] and row["length"] == "whole"]
    (reference,) = (float(row["loss"]) for row in rows if row["mode"] == "sync")
    found = []
    for row in rows:
        if row["mode"] in FITS:
            result, gap = results[row["run"]], float(row["loss"]) - reference
            batch = round(result.tokens / result.steps)
            found.append(Run(row["mode"], row["seed"], result.steps, batch, result.parameters, gap))
    return tuple(found)


def by_seed(found: Sequence[Run]) -> dict[tuple[str, tuple[int, int, int]], dict[str, float]]:
    """Gaps by mode and place, then by seed."""
    groups: dict[tuple[str, tuple[int, int, int]], dict[str, float]] = {}
    for run in found:
        groups.setdefault((run.mode, run.place), {})[run.seed] = run.gap
    return groups


def settings(mode: str, fitted: Sequence[int]) -> list[Setting]:
    """The points of a fit: every updates, batch and size that was run, by those of them that are fitted."""
    groups = {place: gaps for (other, place), gaps in by_seed(runs()).items() if other == mode}
    return [
        Setting(tuple(place[one] for one in fitted), tuple(gaps.values())) for place, gaps in groups.items()
    ]


def fitted(mode: str, which: Sequence[int]) -> Powers:
    return fit(settings(mode, which))


def gap_rows() -> list[str]:
    """By updates, then batch, then size: runs of about as many updates stand together."""
    groups = by_seed([*runs(), *setting_a(), *rung()])
    rows = []
    for updates, batch, parameters in sorted({place for _, place in groups}):
        cells = [
            f"{updates:,}",
            f"{batch / 1024:.0f}k",
            f"{parameters / 1e6:.1f}M",
            f"{updates * batch / parameters:.2g}",
        ]
        found = [groups.get((mode, (updates, batch, parameters)), {}) for mode in ("delay", "ef")]
        rows.append(row_of([*cells, *(gap_shown(list(gaps.values())) for gaps in found)]))
    return rows


def size_name(parameters: int) -> str:
    """As the studies call it: 1.94 million are 2M, 16.6 are 16M."""
    return f"{math.floor(parameters / 1e6 + 0.1)}M"


def gap_shown(gaps: Sequence[float]) -> str:
    if not gaps:
        return "–"
    few = {1: " (one seed)", 2: " (2 of 3 seeds)"}.get(len(gaps), "")
    return shown(interval(gaps), "+.4f") + few


def pooled_rows() -> list[str]:
    """Gaps whose own three seeds do not tell them from 0, by the spread of all small gaps of these studies."""
    groups = by_seed(runs())
    small = {place: list(gaps.values()) for place, gaps in groups.items() if _mean(gaps) < SMALL}
    spread, freedom = pooled(list(small.values()))
    rows = [
        row_of(["updates, batch, parameters", "mode", "own interval", f"spread {spread:.4f}, df {freedom}"])
    ]
    for (mode, (updates, batch, parameters)), gaps in small.items():
        own = interval(gaps)
        if own.interval is not None and own.interval[0] <= 0:
            place = f"{updates:,} of {batch // 1024}k, {size_name(parameters)}"
            other = with_spread(gaps, spread, freedom)
            rows.append(row_of([place, NAMES[mode], shown(own, "+.4f"), shown(other, "+.4f")]))
    return rows


def _mean(gaps: Mapping[str, float]) -> float:
    return statistics.fmean(gaps.values())


def equal_rows() -> list[str]:
    """Settings of about as many updates, the second less the first, by seed."""
    groups = by_seed([*runs(), *setting_a()])
    pairs = (
        ("batch", (595, 2**15, M4), (595, 2**17, M4)),
        ("batch", (9520, 2**13, M4), (9520, 2**15, M4)),
        ("size", (9520, 2**15, M4), (10132, 2**15, M16)),
        ("size, rate, batch and text", (595, 2**15, M4), (600, 2**14, M42)),
        ("size, rate, batch and text", (2380, 2**15, M4), (2400, 2**14, M42)),
    )
    rows = []
    for what, first, second in pairs:
        cells = [what, *(f"{n:,} of {b // 1024}k, {size_name(p)}" for n, b, p in (first, second))]
        for mode in FITS:
            one, other = groups.get((mode, first)), groups.get((mode, second))
            differences = [other[seed] - one[seed] for seed in other if seed in one] if one and other else []
            cells.append(gap_shown(differences))
        rows.append(row_of(cells))
    return rows


def fit_rows() -> list[str]:
    rows = []
    for mode, fits in FITS.items():
        for which in fits:
            found, lack = fitted(mode, which), lack_of_fit(settings(mode, which))
            powers = dict(zip(which, zip(found.exponents, found.halves, strict=True), strict=True))
            cells = [
                f"{powers[one][0]:.2f} [{powers[one][0] - powers[one][1]:.2f}, {powers[one][0] + powers[one][1]:.2f}]"
                if one in powers
                else "–"
                for one in (UPDATES, BATCH, SIZE)
            ]
            told = f"F({lack.freedom[0]}, {lack.freedom[1]}) = {lack.ratio:.1f}, p {lack.chance:.2g}"
            number = str(len(settings(mode, which)))
            rows.append(row_of([NAMES[mode], *cells, f"{found.scatter:.2f}", told, number]))
    return rows


def lengths_of_4m(mode: str) -> dict[int, dict[str, float]]:
    """Gaps by updates, then seed, in batches of 32k tokens."""
    groups = by_seed(runs())
    return {
        place[0]: groups[mode, place]
        for other, place in sorted(groups)
        if other == mode and place[1:] == (2**15, M4)
    }


def local_rows() -> list[str]:
    """4M: the power of the updates between two lengths, by seed, and by how much the two differ."""
    rows = []
    for mode in FITS:
        gaps = lengths_of_4m(mode)
        powers = [local_power(gaps[a], gaps[b], b / a) for a, b in pairwise(gaps)]
        alone = [
            [local_power({s: gaps[a][s]}, {s: gaps[b][s]}, b / a).value for a, b in pairwise(gaps)]
            for s in gaps[min(gaps)]
        ]
        difference = interval([first - second for first, second in alone])
        rows.append(row_of([NAMES[mode], *(shown(one, ".2f") for one in (*powers, difference))]))
    return rows


def last_power(mode: str, updates: float) -> float:
    """The gap if it goes on falling as between the two longest runs of 4M: the other end of what may be."""
    gaps = lengths_of_4m(mode)
    before, longest = sorted(gaps)[-2:]
    power = local_power(gaps[before], gaps[longest], longest / before).value
    return _mean(gaps[longest]) * (updates / longest) ** -power


def predicted_rows() -> list[str]:
    """What larger models would pay: by the power of updates, of updates and size, and by the last one."""
    rows = []
    for name, size, tokens, batches in ELSEWHERE:
        for batch in batches:
            updates = tokens / batch
            cells = [name, f"{batch // 1024}k", f"{updates:,.0f}"]
            for mode in FITS:
                alone = fitted(mode, (UPDATES,)).setting((updates,))
                sized = fitted(mode, (UPDATES, SIZE)).setting((updates, size))
                cells += [predicted(alone), predicted(sized), f"{last_power(mode, updates):+.4f}"]
            rows.append(row_of(cells))
    return rows


def momentum_losses(name: str, mode: str) -> dict[str, float]:
    rows = [row for row in table("ladder-batch-runs") if not row["tuning"]]
    return {
        row["seed"]: float(row["loss"])
        for row in rows
        if (row["setting"], row["mode"]) == (MOMENTA[name], mode)
    }


def momentum_gaps(name: str) -> dict[str, float]:
    reference = momentum_losses(name, "sync")
    return {seed: loss - reference[seed] for seed, loss in momentum_losses(name, "ef").items()}


def momentum_rows() -> list[str]:
    """With what each pays more than 0.95 does, by seed."""
    rates = {row["setting"]: float(row["lr"]) for row in table("ladder-batch") if row["mode"] == "ef"}
    rows = []
    for name, setting in MOMENTA.items():
        means = [f"{_mean(momentum_losses(name, mode)):.4f}" for mode in ("sync", "ef")]
        gap = interval(list(momentum_gaps(name).values()))
        more = "–" if name == "0.95" else shown(momentum_difference(name, "0.95"), "+.4f")
        rows.append(row_of([name, f"{rates[setting]:g}", *means, shown(gap, "+.4f"), more]))
    return rows


def momentum_difference(one: str, other: str) -> Estimate:
    first, second = momentum_gaps(one), momentum_gaps(other)
    return interval([first[seed] - second[seed] for seed in first])


def momentum_grid_rows() -> list[str]:
    """Seed 0 at a quarter of the length: the gap at the same rate with and without delay."""
    rows = [row for row in table("ladder-batch-runs") if row["tuning"]]
    losses = {
        (row["setting"], row["mode"], float(row["lr"])): float(row["loss"]) for row in rows if row["loss"]
    }
    found = []
    for rate in GRID:
        gaps = [losses[s, "ef", rate] - losses[s, "sync", rate] for s in MOMENTA.values()]
        found.append(row_of([f"{rate:g}", *(f"{gap:+.3f}" for gap in gaps)]))
    return found


KINDS = (
    gap_rows,
    equal_rows,
    pooled_rows,
    fit_rows,
    local_rows,
    predicted_rows,
    momentum_rows,
    momentum_grid_rows,
)


def rows() -> list[str]:
    """Every row of the page."""
    return [row for kind in KINDS for row in kind()]


if __name__ == "__main__":
    for kind in KINDS:
        print(*kind(), "", sep="\n")
