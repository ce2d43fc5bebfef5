"""The token penalty by length: what the final losses of synchronous runs of several lengths say of a gap.

Invariant: runs that are held against each other differ in length alone. Within a study its table says which do (an axis
of lengths, a grid that was tuned on shorter runs); of other studies their settings do.

Three lengths give a curve, and a value. Two give a lower bound: the slope of the chord, and the reading by curve where
the shorter runs ended below the curve of the whole ones, as a run does that has finished its decay. Of a loss
above the shorter runs' ends neither says more than that the whole ones are so many times as long.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from slipstream.errors import UserError
from slipstream.study.cells import AxisRoles, Cell, Reading, best_of, pairs, without
from slipstream.study.penalty import PowerLaw, loss_at, mean_penalty, penalty_of_gap, power_law
from slipstream.study.results import Result, collect
from slipstream.study.statistics import Estimate
from slipstream.study.sweep import TUNING

Lengths = Mapping[float, Mapping[str, Result]]  # tokens -> seed -> synchronous run


def with_lengths(cells: Sequence[Cell], shorter: Sequence[Cell], roles: AxisRoles) -> list[Cell]:
    """`cells` with their penalty by length. `shorter`: those of a grid that was tuned on shorter runs."""
    references = {cell.group: cell for cell in cells if cell.mode == roles.reference and cell.results}
    others = [run for run in _elsewhere(roles.lengths) if run.synchronous and run.loss is not None]
    lengths = {
        group: _lengths_of(reference, references, shorter, others, roles)
        for group, reference in references.items()
    }
    return [
        _read(cell, references[cell.group], lengths[cell.group]) if cell.gap is not None else cell
        for cell in cells
    ]


def _elsewhere(places: Iterable[str]) -> list[Result]:
    if missing := [place for place in places if not Path(place).exists()]:
        raise UserError(f"[table] takes lengths from '{missing[0]}', and there is no such folder or export.")
    return list(collect(*map(Path, places)).values())


def _lengths_of(
    reference: Cell,
    references: Mapping[Any, Cell],
    shorter: Sequence[Cell],
    others: Sequence[Result],
    roles: AxisRoles,
) -> Lengths:
    """The reference's runs, and those that are theirs but for the length, on the same text."""
    found: dict[float, dict[str, Result]] = {}

    def add(runs: Iterable[tuple[str, Result]]) -> None:
        for seed, run in runs:
            held = reference.results.get(seed)
            if held is not None and run.same_text(held) and run.tokens > 0:
                found.setdefault(run.tokens, {}).setdefault(seed, run)

    add(reference.results.items())
    if roles.length is not None:
        place = without(reference.group, roles.length)
        for group, cell in references.items():
            if without(group, roles.length) == place:
                add(cell.results.items())
    wanted = {seed: _but_length(run) for seed, run in reference.results.items()}
    known = [(_but_length(run), run) for run in others]
    add((seed, run) for seed, mine in wanted.items() for theirs, run in known if theirs == mine)
    grid = [
        cell
        for cell in shorter
        if cell.mode == reference.mode and without(cell.group, TUNING) == reference.group and cell.results
    ]
    if grid:  # last: the best of several is a little too good
        add(best_of(grid).results.items())
    return found


def _but_length(run: Result) -> dict[str, Any]:
    """The settings that runs of several lengths share. Where their text has a fingerprint, it may lie anywhere."""
    return run.setting("train.steps", *(["data.path"] if run.data else []))


def _read(cell: Cell, reference: Cell, lengths: Lengths) -> Cell:
    seeds = pairs(cell, reference)
    laws = _laws(seeds, lengths)
    if not laws:
        return _bounded(cell, reference, lengths)
    found = [laws[seed].penalty(reference.losses[seed], cell.losses[seed]) for seed in seeds]
    inside = [penalty for penalty in found if penalty is not None]
    if len(inside) < len(found):
        return cell  # too far outside for at least one seed
    power = statistics.fmean(law.power for law in laws.values())
    return replace(cell, by_length=mean_penalty(inside), read=Reading(power=power))


def _laws(seeds: Sequence[str], lengths: Lengths) -> dict[str, PowerLaw]:
    """Each seed's curve through its three longest runs; none where a seed lacks one or its losses are not convex."""
    longest = sorted(lengths)[-3:]
    if len(longest) < 3 or any(seed not in lengths[tokens] for seed in seeds for tokens in longest):
        return {}
    laws = {
        seed: power_law([(tokens, lengths[tokens][seed].loss or 0.0) for tokens in longest]) for seed in seeds
    }
    return {seed: law for seed, law in laws.items() if law is not None} if all(laws.values()) else {}


def _bounded(cell: Cell, reference: Cell, lengths: Lengths) -> Cell:
    """With the larger of two lower bounds, where there are shorter synchronous runs and something was lost."""
    assert cell.gap is not None
    whole = next(iter(reference.results.values())).tokens
    fewer = max((tokens for tokens in lengths if whole / tokens > 1), default=None)
    if fewer is None or cell.gap.value <= 0:
        return cell
    falls, above = [], []
    for seed, run in lengths[fewer].items():
        end, passed = run.loss or 0.0, loss_at(reference.results[seed].validation, fewer)
        falls.append((end - reference.losses[seed]) / math.log(whole / fewer))
        above += [] if passed is None else [passed - end]
    slope = statistics.fmean(falls)
    if slope <= 0:
        return cell
    bound = penalty_of_gap(cell.gap.value, slope)
    curve = bool(above) and statistics.fmean(above) >= 0
    if curve and cell.penalty is not None:
        bound = max(bound, cell.penalty.value)
    # Above the shorter runs' ends the chord, drawn on, lies below the curve, and no run was seen below the whole ones'.
    beyond = bound > whole / fewer
    least = Estimate(whole / fewer if beyond else bound, None, cell.gap.n, least=True)
    return replace(cell, by_length=least, read=Reading(slope=slope, curve=curve, beyond=beyond))
