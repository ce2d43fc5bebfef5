"""Cells -> tables, and tables as Markdown and CSV. The page (`page.py`) shows the same ones.

Invariant: a number appears with how many seeds it rests on, and with an interval only where there are three or
more. A token penalty appears by curve and by length, wherever there are runs for both; a lower bound has no interval
and says ≥. A figure from the simulator says so in its title.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean

from slipstream.metrics.report_page import Table
from slipstream.study.cells import AxisRoles, Cell, Labels, all_cells, common_seeds, compared, roles_of
from slipstream.study.lengths import with_lengths
from slipstream.study.penalty import Speedup, net_gain, speedup
from slipstream.study.results import Result
from slipstream.study.statistics import Estimate
from slipstream.study.sweep import Expansion, Point, Study, by_value

STAGES = (8, 16, 32)
MICROBATCHES = (1, 2, 3)  # per stage
NONE = "–"
BY_CURVE, BY_LENGTH = "token penalty by curve", "token penalty by length"


Compared = tuple[list[Cell], AxisRoles]


def compared_cells(study: Study, expansion: Expansion, results: Mapping[str, Result]) -> Compared:
    """The rows of the loss table, and what the study calls its axes. A cheaper grid only chose values for them."""
    roles = roles_of(study)
    cells = all_cells(expansion.named, results, roles)
    cheaper = [cell for cell in cells if cell.tuning]
    return with_lengths(compared([cell for cell in cells if not cell.tuning], roles), cheaper, roles), roles


def tables(study: Study, expansion: Expansion, results: Mapping[str, Result]) -> list[Table]:
    """Everything a study says, in the order a reader wants it."""
    rows, roles = compared_cells(study, expansion, results)
    cells = all_cells(expansion.named, results, roles)
    cheaper = [cell for cell in cells if cell.tuning]
    found = [loss_table(rows, roles), *gain_table(rows, roles), *grid_tables(cheaper or cells, roles)]
    return [table for table in found if table.rows]


def loss_table(cells: Sequence[Cell], roles: AxisRoles) -> Table:
    """Mean, standard error, paired gap, share recovered and token penalty of every group and mode."""
    axes = _axes(cells)
    header = [*axes, roles.mode, *roles.best, "seeds", "validation loss", f"gap to {roles.reference}"]
    header += [f"share of {roles.baseline}'s gap recovered", BY_CURVE]
    header += [BY_LENGTH] if any(cell.by_length for cell in cells) else []
    body = []
    for cell in cells:
        labels, chosen = dict(cell.group), dict(cell.chosen)
        loss = NONE if cell.mean is None else f"{cell.mean:.4f}"
        loss += "" if cell.error is None else f" ± {cell.error:.4f}"
        if cell.failed:
            loss += f" ({len(cell.failed)} failed)"
        body.append(
            [
                *(labels.get(axis, NONE) for axis in axes),
                cell.mode or NONE,
                *(chosen.get(axis, NONE) for axis in roles.best),
                _seeds(cell, roles),
                loss,
                _estimate(cell.gap, "+.4f") + (" †" if cell.other_code else ""),
                _percent(cell.recovered),
                _estimate(cell.penalty, ".3f"),
                *([_estimate(cell.by_length, ".3f")] if BY_LENGTH in header else []),
            ]
        )
    note = (
        "Validation loss at the master after the last update: mean ± standard error over seeds. Gap: paired by "
        "seed, 95 % t-interval in brackets where there are three seeds or more. Token penalty: how many times the "
        "tokens are needed to reach the synchronous loss. By curve: tokens at which the validation curve of the paired "
        "synchronous run reached the reference's loss / tokens at which it was at this mode's."
    )
    if BY_LENGTH in header:
        note += _how_by_length(cells, roles)
    if any(one.extrapolated for cell in cells for one in (cell.penalty, cell.by_length) if one):
        note += " *: extrapolated beyond the curve."
    if any(cell.other_code for cell in cells):
        note += " †: the runs of at least one pair are of different code."
    return Table(header, body, title="Loss", note=note)


def _how_by_length(cells: Sequence[Cell], roles: AxisRoles) -> str:
    """What stands in the column, with the figures it was read with."""
    read = [(cell, cell.read) for cell in cells if cell.read is not None]
    powers = [(cell, one.power) for cell, one in read if one.power is not None]
    slopes = [(cell, one.slope) for cell, one in read if one.slope is not None]
    uncurved = [cell.group for cell, one in read if one.slope is not None and not (one.curve or one.beyond)]
    text = " By length: off final losses of synchronous runs of several lengths, each with its own whole schedule."
    if roles.lengths:
        text += f" Other lengths than this study's are {', '.join(map(_stem, roles.lengths))}'s."
    if powers:
        text += (
            " Three lengths: read off E + B / tokens^β through the runs of the same seed; mean β over seeds: "
            f"{_told(powers, '.2f')}."
        )
    if slopes:
        text += (
            " Two lengths give a lower bound (≥) and no interval: the larger of the reading by curve and of "
            "exp(gap / slope), the slope being how far the loss falls per e-fold of tokens from the shorter run to the "
            f"whole one: {_told(slopes, '.4f')}. Where the whole one ends it falls more slowly."
        )
    if any(one.beyond for _, one in read):
        text += " Of a loss above the shorter run's end the bound is the ratio of the two lengths."
    if uncurved:
        groups = dict.fromkeys(uncurved)
        everywhere = all(cell.group in groups for cell, _ in read)
        names = " Here" if everywhere else f" Of {', '.join(map(_name, groups))}"
        text += f"{names} it is exp(gap / slope): no shorter run was seen to end below the curve of the whole one."
    return text


def _told(figures: Sequence[tuple[Cell, float]], form: str) -> str:
    """One figure where all groups share it, so that it does not matter what the groups are called; by mode only where
    those of a group differ."""
    told: dict[Labels, dict[str, list[str]]] = {}  # group -> figure -> modes
    for cell, figure in figures:
        told.setdefault(cell.group, {}).setdefault(f"{figure:{form}}", []).append(cell.mode)
    if len({text for own in told.values() for text in own}) == 1:
        return f"{figures[0][1]:{form}}"
    return ", ".join(
        " ".join(filter(None, [_name(group), " and ".join(modes) if len(own) > 1 else "", text]))
        for group, own in told.items()
        for text, modes in own.items()
    )


def _name(group: Labels) -> str:
    return " ".join(label for _, label in group)


def _stem(place: str) -> str:
    return Path(place).name.removesuffix(".jsonl.gz")


def _seeds(cell: Cell, roles: AxisRoles) -> str:
    """How many, and how many of them have a synchronous run to be held against."""
    count, held = len(cell.results), 0 if cell.gap is None else cell.gap.n
    return str(count) if cell.mode == roles.reference or held == count else f"{count} ({held} paired)"


def gain_table(cells: Sequence[Cell], roles: AxisRoles) -> list[Table]:
    """Speed-up over the fastest synchronous schedule divided by the penalty, for some pipelines."""
    paying = [cell for cell in cells if (cell.penalty or cell.by_length) and not cell.synchronous]
    if not paying:
        return []
    axes, both = _axes(cells), any(cell.by_length for cell in paying)
    places = [(stages, stages * factor) for stages in STAGES for factor in MICROBATCHES]
    speeds = [speedup(stages, microbatches) for stages, microbatches in places]
    header = [*axes, roles.mode, *(["penalty"] if both else []), *(f"P={p} m={m}" for p, m in places)]
    blank, unread = [""] * len(axes), [""] if both else []
    body = [
        [*blank, "fastest synchronous schedule", *unread, *(speed.rival for speed in speeds)],
        [*blank, "speed-up of 2BW over it", *unread, *(f"{speed.factor:.3f}" for speed in speeds)],
    ]
    for cell in paying:
        labels = dict(cell.group)
        start = [*(labels.get(axis, NONE) for axis in axes), cell.mode]
        for reading, penalty in (("by curve", cell.penalty), ("by length", cell.by_length)):
            if penalty is not None:
                gains = [_gain(cell, speed, penalty) for speed in speeds]
                body.append([*start, *([reading] if both else []), *gains])
    note = (
        "Simulated speed, measured penalty: the speed-up comes from the schedule simulator (backward = 2 forward, "
        "equal stages, free links and updates) over the fastest synchronous schedule that keeps no more "
        "activations; it is divided by the token penalty above. Flushed updates of a synchronous start or "
        "finish run at the speed of 1F1B. Above 1, asynchrony pays."
    )
    if any(cell.by_length is not None and cell.by_length.least for cell in paying):
        note += " ≤: of the penalty only a lower bound is known."
    if any(cell.old < 1 for cell in paying):
        note += f" {NONE}: with so small a part of the update old, that pipeline would have to wait (it takes P of m)."
    if any(cell.fine_start for cell in paying):
        note += " A fine start is taken to cost no time, though smaller microbatches keep a device less busy."
    if any("*" in text for row in body for text in row):
        note += " *: of a penalty extrapolated beyond its curve."
    return [Table(header, body, title="Net gain (simulated)", note=note)]


def _gain(cell: Cell, speed: Speedup, penalty: Estimate) -> str:
    if cell.old * speed.microbatches <= speed.stages - 0.5:
        return NONE
    gain = _estimate(net_gain(speed, penalty, cell.flushed_share), ".3f")
    return f"≤ {gain}" if penalty.least else gain


def grid_tables(cells: Sequence[Cell], roles: AxisRoles) -> list[Table]:
    """Loss by value of each tuned axis."""
    found = []
    for position, axis in enumerate(roles.best):
        tried = [cell for cell in cells if len(cell.chosen) > position]
        values = sorted({cell.chosen[position][1]: 0 for cell in tried}, key=by_value)
        rows: dict[tuple[str, ...], dict[str, Cell]] = {}
        axes = _axes(cells)
        for cell in tried:
            labels = dict(cell.group)
            rest = tuple(label for other, label in cell.chosen if other != axis)
            place = (*(labels.get(name, NONE) for name in axes), cell.mode, *rest)
            rows.setdefault(place, {})[cell.chosen[position][1]] = cell
        others = [other for other in roles.best if other != axis]
        body = [[*place, *_on_seeds_of_all(row, values)] for place, row in rows.items()]
        note = "Mean validation loss (seeds), over the seeds that all values of a row have, as they are compared."
        if any(cell.failed for cell in tried):
            note += " A value at which a seed failed is not compared with one at which none did."
        found.append(Table([*axes, roles.mode, *others, *values], body, title=f"By {axis}", note=note))
    return found


def _on_seeds_of_all(row: Mapping[str, Cell], values: Iterable[str]) -> list[str]:
    """The means of a row, by value: over other seeds one would seem better that is not."""
    common = common_seeds(list(row.values()))

    def text(cell: Cell | None) -> str:
        if cell is None:
            return ""
        if cell.mean is None:
            return "failed"
        losses = [loss for seed, loss in cell.losses.items() if seed in common] or list(cell.losses.values())
        failed = f", {len(cell.failed)} failed" if cell.failed else ""
        return f"{fmean(losses):.4f} ({len(losses)}{failed})"

    return [text(row.get(value)) for value in values]


def runs_table(points: Sequence[Point], results: Mapping[str, Result]) -> Table:
    """Every run, so that each number above can be traced to its folder or its line of the export."""
    axes = list(dict.fromkeys(axis for point in points for axis in point.labels))
    header = [*axes, "loss", "tokens", "tokens/s", "seconds", "skipped", "run", "text", "code", "problem"]
    body = []
    for point in points:
        result = results.get(point.digest)
        if result is None:
            continue
        labels = [point.labels.get(axis, "") for axis in axes]
        loss = "" if result.loss is None else f"{result.loss:.6f}"
        speed = "" if result.tokens_per_second is None else f"{result.tokens_per_second:.0f}"
        row = [loss, f"{result.tokens:.0f}", speed, f"{result.seconds:.1f}", str(result.skipped), result.run]
        row += [result.data[:12], result.commit or result.source[:12]]
        body.append([*labels, *row, result.failed.partition("\n")[0]])
    return Table(header, body, title="Runs")


def markdown(study: Study, found: Sequence[Table], notes: Sequence[str]) -> str:
    parts = [f"# {study.name}\n"]
    if study.about:
        parts.append(f"{study.about}\n")
    for table in found:
        parts.append(f"## {table.title}\n")
        parts.append(pipes(table))
        if table.note:
            parts.append(f"\n{table.note}\n")
    parts += [f"- {note}" for note in notes]
    return "\n".join(parts).rstrip() + "\n"


def as_csv(cells: Sequence[Cell], roles: AxisRoles) -> str:
    """The loss table as plain numbers, one column each."""
    axes = _axes(cells)
    estimates = [
        f"{name}{part}"
        for name in ("gap", "recovered", "penalty", "penalty_by_length")
        for part in ("", "_low", "_high")
    ]
    counted = ["seeds", "failed", "mean", "standard_error"]
    marks = ["extrapolated", "by_length_extrapolated", "by_length_least", "other_code"]
    header = [*axes, roles.mode, *roles.best, *counted, *estimates, *marks]
    rows = []
    for cell in cells:
        labels, chosen = dict(cell.group), dict(cell.chosen)
        numbers = [cell.mean, cell.error]
        for estimate in (cell.gap, cell.recovered, cell.penalty, cell.by_length):
            around = (estimate.interval if estimate else None) or (None, None)
            numbers += [estimate.value if estimate else None, *around]
        start = [*(labels.get(axis, "") for axis in axes), cell.mode]
        start += [*(chosen.get(axis, "") for axis in roles.best), len(cell.results), len(cell.failed)]
        plain = ["" if value is None else f"{value:.6g}" for value in numbers]
        marked = [int(bool(one and one.extrapolated)) for one in (cell.penalty, cell.by_length)]
        marked += [int(bool(cell.by_length and cell.by_length.least)), int(cell.other_code)]
        rows.append([str(value) for value in (*start, *plain, *marked)])
    return table_csv(Table(header, rows))


def table_csv(table: Table) -> str:
    file = io.StringIO()
    csv.writer(file, lineterminator="\n").writerows([table.header, *table.rows])
    return file.getvalue()


def _axes(cells: Sequence[Cell]) -> list[str]:
    return list(dict.fromkeys(axis for cell in cells for axis, _ in cell.group))


def _estimate(estimate: Estimate | None, form: str) -> str:
    if estimate is None:
        return NONE
    value, *around = (_number(one, form) for one in (estimate.value, *(estimate.interval or ())))
    text = f"≥ {value}" if estimate.least else f"{value} [{', '.join(around)}]" if around else value
    return f"{text} *" if estimate.extrapolated else text


def _number(value: float, form: str) -> str:
    """What is a million or more is a run that broke: its size is told, not its digits."""
    return f"{value:{form}}" if abs(value) < 1e6 else f"{value:.1e}"


def _percent(estimate: Estimate | None) -> str:
    if estimate is None:
        return NONE
    around = ", ".join(f"{100 * end:.0f}" for end in estimate.interval or ())
    return f"{100 * estimate.value:.0f} %" + (f" [{around}]" if around else "")


def pipes(table: Table) -> str:
    """A table in Markdown."""

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    return "\n".join(
        [line(table.header), line(["---"] * len(table.header)), *(line(row) for row in table.rows)]
    )
