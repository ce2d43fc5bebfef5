"""Muon on a matrix problem whose constants are known; the tables of docs/convergence.md about Muon.

    PYTHONPATH=tests python -m optim.noisy_matrix     writes noisy_matrix.csv, four minutes; prints the tables

Minimise F(W) = 1/2 sum_ij l_i r_j (W - W*)_ij^2 over W [24, 16] from W = 0, with l and r spread evenly on a log scale
over [0.1, 1] and W* Gaussian; the optimizer sees grad F + noise, Gaussian of deviation 0.3 in each entry. The quality
of a run is the nuclear norm of grad F at its masters, which the bound is about. Two kinds of Muon:

    exact      what the bound assumes: the exact orthogonal factor, no Nesterov blend, steps of length lr, m_0 = G_0
    package    `optim.muon` as it is: five Newton-Schulz iterations, the blend, steps of sqrt(24 / 16) lr, m_{-1} = 0
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from optim import quadratic
from slipstream.optim.newton_schulz import orthogonalise

TABLE = Path(__file__).with_suffix(".csv")
SHAPE = ROWS, COLUMNS = 24, 16
DEVIATION = 0.3
ROW_CURVATURE, COLUMN_CURVATURE = (torch.logspace(0, -1, n, dtype=torch.float64) for n in SHAPE)
CURVATURE = ROW_CURVATURE[:, None] * COLUMN_CURVATURE
TARGET = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

# The constants of the bound. Schatten norms obey Hölder: |diag(l) E diag(r)|_nuclear <= |l| |E|_spectral |r|.
SMOOTHNESS = float(ROW_CURVATURE.norm() * COLUMN_CURVATURE.norm())  # L
NOISE = DEVIATION * math.sqrt(ROWS * COLUMNS)  # sigma
NORMS = math.sqrt(COLUMNS)  # rho: nuclear <= rho Frobenius
START = float(0.5 * (CURVATURE * TARGET.square()).sum())  # F(z_0) - F*


class Case(NamedTuple):
    lr: float
    momentum: float
    old: float = 0.0
    feedback: bool = False


def nuclear(stack: Tensor) -> Tensor:
    """By the Gram matrix of the smaller side: twice as quick as singular values."""
    return torch.linalg.eigvalsh(stack.mT @ stack).clamp(min=0).sqrt().sum(-1)


def orthogonal(stack: Tensor) -> Tensor:
    """M (M' M)^(-1/2), the exact orthogonal factor."""
    values, vectors = torch.linalg.eigh(stack.mT @ stack)
    return stack @ ((vectors / values.sqrt().unsqueeze(-2)) @ vectors.mT)


def gradient_norms(cases: Sequence[Case], updates: int, seeds: Sequence[int], exact: bool) -> Tensor:
    """The nuclear norm of the true gradient at the master before each update: [case, seed, update].

    Every case sees the same noise at the same seed.
    """
    lr, mu, old, fed = (
        torch.tensor([float(case[k]) for case in cases], dtype=torch.float64).view(-1, 1, 1, 1)
        for k in range(4)
    )
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    z = torch.zeros(len(cases), len(seeds), *SHAPE, dtype=torch.float64)
    before, earlier, average = z, z, torch.zeros_like(z)
    norms = z.new_empty(len(cases), len(seeds), updates)
    for update in range(updates):
        norms[:, :, update] = nuclear(CURVATURE * (z - TARGET))
        bank = before + fed * (before - earlier)
        noise = torch.stack([torch.randn(SHAPE, generator=g, dtype=torch.float64) for g in generators])
        gradient = CURVATURE * ((1 - old) * z + old * bank - TARGET) + DEVIATION * noise
        if exact and not update:
            average = gradient
        else:
            average = mu * average + (1 - mu) * gradient
        if exact:
            step = lr * orthogonal(average)
        else:
            blend = (1 - mu) * gradient + mu * average
            step = lr * math.sqrt(ROWS / COLUMNS) * orthogonalise(blend.flatten(0, 1)).view_as(z)
        z, before, earlier = z - step, z, before
    return norms


class Bound(NamedTuple):
    """The four terms of the bound on the mean gradient norm of a run."""

    way: float
    noise: float
    age: float
    delay: float


def bound(updates: int, case: Case) -> Bound:
    lr, mu, old, fed = case
    return Bound(
        START / (lr * updates),
        2 * NORMS * NOISE * (math.sqrt((1 - mu) / (1 + mu)) + 1 / (updates * (1 - mu))),
        SMOOTHNESS * lr / 2 + 2 * SMOOTHNESS * lr * mu / (1 - mu),
        2 * SMOOTHNESS * lr * old * (2 if fed else 1),
    )


@lru_cache
def _gaussian() -> Tensor:
    return torch.randn(500, *SHAPE, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@lru_cache
def gain() -> float:
    """kappa: the orthogonal factor of S + s N is about kappa S / s in the mean, for Gaussian N and a small S."""
    return float(nuclear(_gaussian()).mean()) / (ROWS * COLUMNS)


TRUSTED = 0.55


def predicted(case: Case) -> tuple[float, float]:
    """The gradient norm that exact Muon settles at, as SGD at the rate lr kappa / s, no correction; the largest x.

    s, the deviation of an entry of the average, is found with the rate. What it says of delay is to be trusted
    up to an x of TRUSTED; above it, it says too much.
    """
    lr, mu, old, _ = case
    quiet = DEVIATION * math.sqrt((1 - mu) / (1 + mu))  # the deviation of averaged noise
    size = quiet
    for _ in range(60):
        x = lr * gain() / size * CURVATURE
        swell = quadratic.closed_average(x, mu, old).mean() if float(x.max()) * old < 1 else 4.0
        size = (size + quiet * math.sqrt(swell)) / 2
    x = lr * gain() / size * CURVATURE
    if float(x.max()) * old >= 1:
        return math.nan, float(x.max())
    deviations = DEVIATION * (x * quadratic.closed_level(x, mu, old) / 2).sqrt()
    return float(nuclear(deviations * _gaussian()).mean()), float(x.max())


@dataclass(frozen=True)
class Row:
    """Of a case: mean over seeds of the gradient norm after `skip` updates, and what it has more than `synchronous`."""

    muon: str
    updates: int
    skip: int
    seeds: int
    lr: float
    momentum: float
    old: float
    feedback: bool
    level: float
    level_error: float
    added: float
    added_error: float

    @property
    def case(self) -> Case:
        return Case(self.lr, self.momentum, self.old, self.feedback)


def measure(muon: str, cases: Sequence[Case], updates: int, skip: int, seeds: int) -> list[Row]:
    """`cases` contain the synchronous one of every rate and momentum. Errors are standard errors."""
    norms = gradient_norms(cases, updates, range(1, seeds + 1), muon == "exact")[:, :, skip:].mean(-1)
    rows = []
    for case, found in zip(cases, norms, strict=True):
        added = found - norms[cases.index(Case(case.lr, case.momentum))]
        pairs = [(float(v.mean()), float(v.std()) / math.sqrt(seeds)) for v in (found, added)]
        numbers = [float(f"{number:.5g}") for pair in pairs for number in pair]
        rows.append(Row(muon, updates, skip, seeds, *case, *numbers))
    return rows


LENGTHS = {64: 64, 256: 64, 1024: 16, 4096: 8, 16384: 4}  # updates -> seeds
PARTS = (0.0, 1 / 3, 0.5, 1.0)
SETTLED = (2400, 400, 8)  # updates, of which not counted; seeds
RATES, MOMENTA = (0.05, 0.1, 0.2, 0.4), (0.0, 0.5, 0.9, 0.95, 0.98)
SHOWN = [(lr, 0.95) for lr in RATES] + [(0.2, mu) for mu in MOMENTA if mu != 0.95]


def of_length(updates: int, old: float = 0.0) -> Case:
    """lr = 2 T^(-3/4), 1 - mu = T^(-1/2)."""
    return Case(float(f"{2 * updates**-0.75:.6g}"), float(f"{1 - updates**-0.5:.6g}"), old)


def measure_all() -> Iterable[Row]:
    for muon in ("exact", "package"):
        for updates, seeds in LENGTHS.items():
            yield from measure(muon, [of_length(updates, old) for old in (0.0, 0.5, 1.0)], updates, 0, seeds)
        for lr, mu in SHOWN:
            cases = [Case(lr, mu, old) for old in PARTS] + [Case(lr, mu, 1.0, feedback=True)]
            yield from measure(muon, cases, *SETTLED)
    for lr, mu in [(lr, mu) for lr in RATES[1:] for mu in MOMENTA if (lr, mu) not in SHOWN]:
        yield from measure("exact", [Case(lr, mu), Case(lr, mu, 1.0)], *SETTLED)


def write(rows: Iterable[Row]) -> None:
    with TABLE.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(field.name for field in fields(Row))
        writer.writerows(astuple(row) for row in rows)


@lru_cache
def read() -> dict[tuple[str, int, Case], Row]:
    rows = []
    with TABLE.open() as file:
        for line in csv.DictReader(file):
            kinds = {"muon": str, "feedback": lambda text: text == "True"}
            kinds |= dict.fromkeys(("updates", "skip", "seeds"), int)
            rows.append(Row(**{name: kinds.get(name, float)(text) for name, text in line.items()}))
    return {(row.muon, row.updates, row.case): row for row in rows}


def shares(muon: str = "exact") -> dict[tuple[float, float], tuple[float, float]]:
    """(lr, momentum) -> what delay adds to the level, over the level, and two standard errors."""
    table = read()
    found = {}
    for (kind, updates, case), row in table.items():
        if (kind, updates, case[2:]) == (muon, SETTLED[0], (1.0, False)):
            level = table[muon, updates, Case(case.lr, case.momentum)].level
            found[case.lr, case.momentum] = (row.added / level, 2 * row.added_error / level)
    return found


def bound_rows() -> list[str]:
    """The bound beside what runs of T updates do, exact Muon with everything old."""
    table, rows, before = read(), [], math.nan
    for length in LENGTHS:
        case = of_length(length, 1.0)
        terms, row = bound(length, case), table["exact", length, case]
        total, power = sum(terms), math.log(row.added / before) / math.log(4)
        sums = " + ".join(f"{term:#.3g}" for term in terms)
        rows.append(
            f"| {length} | {sums} = {total:.1f} | {row.level:.2f} | {total / row.level:.1f} | {row.added:#.3g} "
            f"| {terms.delay / row.added:.0f} | {'–' if math.isnan(power) else f'{power:.2f}'} |"
        )
        before = row.added
    return rows


def length_rows() -> list[str]:
    """In thousandths: what delay adds to the mean gradient norm of runs of T updates; of the level, in %."""
    table, rows = read(), []
    for length, seeds in LENGTHS.items():
        whole, half = (table["exact", length, of_length(length, old)] for old in (1.0, 0.5))
        package = table["package", length, of_length(length, 1.0)]
        share = 100 * whole.added / (whole.level - whole.added)
        cells = [f"{1e3 * row.added:+.3f} ± {1e3 * row.added_error:.3f}" for row in (half, whole, package)]
        rows.append(f"| {length} | {seeds} | {' | '.join(cells)} | {share:.2f} % |")
    return rows


def settled_rows() -> list[str]:
    """By rate and by momentum: the level, what an old part adds to it, and the same predicted and of the package."""
    table, rows = read(), []
    for lr, mu in SHOWN:
        base, *late, fed = (
            table["exact", SETTLED[0], Case(lr, mu, *rest)]
            for rest in ((0.0,), *((old,) for old in PARTS[1:]), (1.0, True))
        )
        package = table["package", SETTLED[0], Case(lr, mu)].level
        (level, _), (delayed, x) = predicted(Case(lr, mu)), predicted(Case(lr, mu, 1.0))
        guess = f"{100 * (delayed / level - 1):.1f} %" if x < TRUSTED else "–"
        cells = [f"{row.added:+.3f}" for row in (*late, fed)]
        share, packaged = (100 * shares(muon)[lr, mu][0] for muon in ("exact", "package"))
        rows.append(
            f"| {lr} | {mu:g} | {base.level:.2f} | {level:.2f} | {' | '.join(cells)} | {share:.1f} % "
            f"| {guess} | {package:.2f} | {packaged:.1f} % |"
        )
    return rows


if __name__ == "__main__":
    write(measure_all())
    print(*bound_rows(), *length_rows(), *settled_rows(), sep="\n")
