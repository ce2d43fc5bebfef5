"""Results -> cells: one per combination of axes other than the seed, with what its seeds say together."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from slipstream.config.settings import updates
from slipstream.errors import UserError
from slipstream.study.penalty import Curve, mean_penalty, token_penalty
from slipstream.study.results import Result
from slipstream.study.statistics import Estimate, paired_gap, share_recovered, standard_error
from slipstream.study.sweep import TUNING, Point, Study, names

Labels = tuple[tuple[str, str], ...]
_PLACES = "lengths"  # of [table]: names no axis


@dataclass(frozen=True)
class AxisRoles:
    """A study's [table]: which axis is which. Axes without a role make the groups."""

    seed: str = "seed"  # runs that differ in it alone are repetitions, paired by label
    mode: str = "mode"  # the axis that is compared
    reference: str = "sync"  # the mode gaps are taken to
    baseline: str = "delay"  # the mode whose gap is the whole, for the share recovered
    best: tuple[str, ...] = ()  # each cell takes the value with the lowest mean, on the seeds all have
    length: str | None = None  # an axis of run lengths: groups that differ in it alone differ in length alone
    lengths: tuple[str, ...] = ()  # exports of other studies, whose synchronous runs have other lengths


@dataclass(frozen=True)
class Reading:
    """How a penalty by length was read."""

    power: float | None = None  # of the curve through three lengths, mean over seeds
    slope: float | None = None  # of two lengths: loss per e-fold of tokens, for a lower bound
    curve: bool = False  # whether the reading by curve is a lower bound as well
    beyond: bool = (
        False  # whether they led beyond the shorter run, so that the ratio of the lengths is the bound
    )


@dataclass(frozen=True)
class Cell:
    """One row of the table."""

    group: Labels
    mode: str
    chosen: Labels  # the values of the `best` axes
    results: Mapping[str, Result]  # finished runs by seed
    failed: Mapping[str, str]  # problems by seed
    mean: float | None = None
    error: float | None = None
    gap: Estimate | None = None
    recovered: Estimate | None = None
    penalty: Estimate | None = None  # by curve: read off that of the paired synchronous run
    by_length: Estimate | None = None  # read off the final losses of synchronous runs of several lengths
    read: Reading | None = None  # how `by_length` was
    other_code: bool = False  # whether the code of a run is not that of the one it is paired with

    @property
    def losses(self) -> dict[str, float]:
        return {seed: result.loss for seed, result in self.results.items() if result.loss is not None}

    @property
    def tuning(self) -> bool:
        """Whether its runs belong to a grid that was made cheaper by `tune_with`."""
        return any(axis == TUNING for axis, _ in self.group)

    @property
    def synchronous(self) -> bool:
        """Whether none of its gradients is late: the reference, or a change of the optimizer without delay."""
        return bool(self.results) and all(result.synchronous for result in self.results.values())

    @property
    def old(self) -> float:
        """The share of an update's microbatches that are late."""
        return next(iter(self.results.values())).old

    @property
    def fine_start(self) -> bool:
        """Whether its first updates are cut into more microbatches than the others."""
        return bool(next(iter(self.results.values())).key("pipeline.fine_start", 0))

    @property
    def flushed_share(self) -> float:
        """The part of the updates that runs without delay because the run asks for it."""
        result = next(iter(self.results.values()))
        named = [result.key(f"optim.{key}", 0) for key in ("sync_start", "sync_finish")]
        return sum(updates(value, result.steps) for value in named) / result.steps


def roles_of(study: Study) -> AxisRoles:
    known = [item.name for item in fields(AxisRoles)]
    if unknown := set(study.table) - set(known):
        raise UserError(f"[table] of '{study.name}' has {sorted(unknown)}; it may have {sorted(known)}.")
    values: dict[str, Any] = dict(study.table)
    best = values.get("best", [])
    values["best"] = tuple(best) if isinstance(best, list) else (best,)
    values[_PLACES] = tuple(values.get(_PLACES, ()))
    roles, labels = AxisRoles(**values), study.labels()
    for key in (key for key in known if key in study.table and key != _PLACES):
        modes = key in ("reference", "baseline")
        allowed = labels.get(roles.mode, []) if modes else list(labels)
        wanted = values[key] if key == "best" else (values[key],)
        if stray := [name for name in wanted if name not in allowed]:
            there = f"'{roles.mode}' has {names(allowed) or 'no values'}"
            what = there if modes else f"the axes are {names(allowed)}"
            raise UserError(f"[table] of '{study.name}' has {key} = {stray[0]!r}, and {what}.")
    return roles


def all_cells(points: Sequence[Point], results: Mapping[str, Result], roles: AxisRoles) -> list[Cell]:
    """A cell for every combination that has an ended run, in the order of the study."""
    seeds: dict[tuple[Labels, str, Labels], tuple[dict[str, Result], dict[str, str]]] = {}
    special = {roles.seed, roles.mode, *roles.best}
    counted: set[tuple[tuple[Labels, str, Labels], str]] = set()
    for point in points:
        result = results.get(point.digest)
        if result is None:
            continue
        # A point of a cheaper grid keeps its label on TUNING, and so a group of its own.
        group = tuple((axis, label) for axis, label in point.labels.items() if axis not in special)
        chosen = tuple((axis, point.labels[axis]) for axis in roles.best if axis in point.labels)
        key = (group, point.labels.get(roles.mode, ""), chosen)
        finished, failed = seeds.setdefault(key, ({}, {}))
        seed = point.labels.get(roles.seed, "")
        if (key, result.digest) in counted:
            continue  # one run is one seed, whatever it is called
        counted.add((key, result.digest))
        if result.loss is None:
            failed[seed] = result.failed
        else:
            finished[seed] = result
    cells = []
    for (group, mode, chosen), (finished, failed) in seeds.items():
        cell = Cell(group, mode, chosen, finished, failed)
        values = list(cell.losses.values())
        mean = statistics.fmean(values) if values else None
        cells.append(replace(cell, mean=mean, error=standard_error(values)))
    return cells


def compared(cells: Sequence[Cell], roles: AxisRoles) -> list[Cell]:
    """The best cell of each group and mode, with its gap, share recovered and penalty."""
    by_place: dict[tuple[Labels, str], list[Cell]] = {}
    for cell in cells:
        by_place.setdefault((cell.group, cell.mode), []).append(cell)
    chosen = {place: best_of(found) for place, found in by_place.items()}
    return [_compare(cell, chosen, roles) for cell in chosen.values()]


def best_of(cells: Sequence[Cell]) -> Cell:
    """Lowest mean over the seeds that all values have; then a value with more seeds is no better for it.

    A value at which a seed failed is no match for one at which none did: what is left of it are its lucky seeds.
    """
    alive = _alive(cells)
    if len(alive) < 2:
        return (alive or list(cells))[0]
    common = common_seeds(cells)
    if not common:
        return min(alive, key=lambda cell: cell.mean or 0.0)
    return min(alive, key=lambda cell: statistics.fmean(cell.losses[seed] for seed in common))


def common_seeds(cells: Sequence[Cell]) -> set[str]:
    """The seeds over which the values of one axis are compared."""
    alive = _alive(cells)
    return set.intersection(*(set(cell.results) for cell in alive)) if alive else set()


def _alive(cells: Sequence[Cell]) -> list[Cell]:
    alive = [cell for cell in cells if cell.results]
    return [cell for cell in alive if not cell.failed] or alive


def pairs(cell: Cell, reference: Cell) -> list[str]:
    """Seeds both have, with runs that read the same tokens."""
    known = reference.results
    return [seed for seed, run in cell.results.items() if seed in known and run.same_text(known[seed])]


def _compare(cell: Cell, chosen: Mapping[tuple[Labels, str], Cell], roles: AxisRoles) -> Cell:
    reference = chosen.get((cell.group, roles.reference))
    if reference is None or not reference.results or not cell.results or cell.mode == roles.reference:
        return cell
    baseline = chosen.get((cell.group, roles.baseline))
    losses, recovered = {seed: cell.losses[seed] for seed in pairs(cell, reference)}, None
    if baseline is not None and cell.mode != roles.baseline and not cell.synchronous:
        delayed = {seed: baseline.losses[seed] for seed in pairs(baseline, reference)}
        recovered = share_recovered(losses, reference.losses, delayed)
    by_curve = {seed: reference.results[seed].validation for seed in losses}
    return replace(
        cell,
        gap=paired_gap(losses, reference.losses),
        recovered=recovered,
        penalty=_read_off(by_curve, reference.losses, losses),
        other_code=any(cell.results[seed].source != reference.results[seed].source for seed in losses),
    )


def _read_off(
    curves: Mapping[str, Curve], synchronous: Mapping[str, float], losses: Mapping[str, float]
) -> Estimate | None:
    """The token penalty, each seed's off its own curve."""
    found = [token_penalty(curves[seed], synchronous[seed], loss) for seed, loss in losses.items()]
    return mean_penalty([one for one in found if one is not None])


def without(group: Labels, axis: str) -> Labels:
    return tuple(pair for pair in group if pair[0] != axis)
