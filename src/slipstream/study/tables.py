"""Cells -> tables, and tables as Markdown and CSV. The page (`page.py`) shows the same ones.

Invariant: a number appears with how many seeds it rests on, and with an interval only where there are two or
more. A figure from the simulator says so in its title.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence

from slipstream.metrics.report_page import Table
from slipstream.study.cells import AxisRoles, Cell, all_cells, compared, roles_of, slope_by_length, whole
from slipstream.study.penalty import net_gain, penalty_of_gap, speedup
from slipstream.study.results import Result
from slipstream.study.statistics import Estimate
from slipstream.study.sweep import Expansion, Point, Study, by_value

STAGES = (8, 16, 32)
MICROBATCHES = (1, 2, 3)  # per stage
NONE = "–"


Compared = tuple[list[Cell], AxisRoles]


def compared_cells(study: Study, expansion: Expansion, results: Mapping[str, Result]) -> Compared:
    """The rows of the loss table, and what the study calls its axes."""
    roles = roles_of(study)
    return compared(whole(all_cells(expansion.points, results, roles)), roles), roles


def tables(study: Study, expansion: Expansion, results: Mapping[str, Result]) -> list[Table]:
    """Everything a study says, in the order a reader wants it."""
    roles = roles_of(study)
    cells = all_cells(expansion.points, results, roles)
    rows = compared(whole(cells), roles)
    cheaper = [cell for cell in cells if cell.tuning]
    found = [
        loss_table(rows, roles),
        *gain_table(rows, roles),
        *shorter_table(rows, cheaper, roles),
        *grid_tables(cheaper or cells, roles),
    ]
    return [table for table in found if table.rows]


def loss_table(cells: Sequence[Cell], roles: AxisRoles) -> Table:
    """Mean, standard error, paired gap, share recovered and token penalty of every group and mode."""
    axes = _axes(cells)
    header = [*axes, roles.mode, *roles.best, "seeds", "validation loss", f"gap to {roles.reference}"]
    header += [f"share of {roles.baseline}'s gap recovered", "token penalty"]
    body = []
    for cell in cells:
        labels, chosen = dict(cell.group), dict(cell.chosen)
        loss = NONE if cell.mean is None else f"{cell.mean:.4f}{_error(cell.error)}"
        if cell.failed:
            loss += f" ({len(cell.failed)} failed)"
        body.append(
            [
                *(labels.get(axis, NONE) for axis in axes),
                cell.mode or NONE,
                *(chosen.get(axis, NONE) for axis in roles.best),
                _seeds(cell, roles),
                loss,
                _estimate(cell.gap, "+.4f"),
                _percent(cell.recovered),
                _estimate(cell.penalty, ".3f") + (" *" if cell.extrapolated else ""),
            ]
        )
    curve = (
        f"the curve of final synchronous losses by {roles.length}"
        if roles.length
        else "the validation curve of the paired synchronous run"
    )
    note = (
        "Validation loss at the master after the last update: mean ± standard error over seeds. Gap: paired by "
        f"seed, 95 % t-interval in brackets. Token penalty: tokens at which {curve} reached the "
        "reference's loss / tokens at which it was at this mode's."
    )
    if any(cell.extrapolated for cell in cells):
        note += " *: extrapolated beyond that curve."
    return Table(header, body, title="Loss", note=note)


def _seeds(cell: Cell, roles: AxisRoles) -> str:
    """How many, and how many of them have a synchronous run to be held against."""
    count, held = len(cell.results), 0 if cell.gap is None else cell.gap.n
    return str(count) if cell.mode == roles.reference or held == count else f"{count} ({held} paired)"


def gain_table(cells: Sequence[Cell], roles: AxisRoles) -> list[Table]:
    """Speed-up over the fastest synchronous schedule divided by the penalty, for some pipelines."""
    paying = [cell for cell in cells if cell.penalty is not None and not cell.synchronous]
    if not paying:
        return []
    axes = _axes(cells)
    places = [(stages, stages * factor) for stages in STAGES for factor in MICROBATCHES]
    speeds = [speedup(stages, microbatches) for stages, microbatches in places]
    header = [*axes, roles.mode, *(f"P={p} m={m}" for p, m in places)]
    blank = [""] * len(axes)
    body = [
        [*blank, "fastest synchronous schedule", *(speed.rival for speed in speeds)],
        [*blank, "speed-up of 2BW over it", *(f"{speed.factor:.3f}" for speed in speeds)],
    ]
    for cell in paying:
        labels = dict(cell.group)
        assert cell.penalty is not None
        gains = [
            _estimate(net_gain(speed, cell.penalty, cell.flushed_share), ".3f")
            if cell.old * speed.microbatches > speed.stages - 0.5
            else NONE
            for speed in speeds
        ]
        start = [labels.get(axis, NONE) for axis in axes]
        body.append([*start, cell.mode, *gains])
    note = (
        "Simulated speed, measured penalty: the speed-up comes from the schedule simulator (backward = 2 forward, "
        "equal stages, free links and updates) over the fastest synchronous schedule that keeps no more "
        "activations; it is divided by the token penalty above. Flushed updates of a synchronous start or "
        "finish run at the speed of 1F1B. Above 1, asynchrony pays."
    )
    if any(cell.old < 1 for cell in paying):
        note += f" {NONE}: with so small a part of the update old, that pipeline would have to wait (it takes P of m)."
    return [Table(header, body, title="Net gain (simulated)", note=note)]


def shorter_table(rows: Sequence[Cell], cheaper: Sequence[Cell], roles: AxisRoles) -> list[Table]:
    """What gaps are worth by the losses of shorter synchronous runs, where a grid was tuned on such runs."""
    references = {cell.group: cell for cell in rows if cell.mode == roles.reference}
    slopes = {group: slope_by_length(cell, cheaper) for group, cell in references.items()}
    axes = _axes(rows)
    body = []
    for cell in rows:
        slope = slopes.get(cell.group)
        if slope is None or cell.gap is None:
            continue
        labels = dict(cell.group)
        worth = penalty_of_gap(cell.gap, slope)
        body.append(
            [*(labels.get(axis, NONE) for axis in axes), cell.mode, f"{slope:.4f}", _estimate(worth, ".3f")]
        )
    if not body:
        return []
    note = (
        "The other reading of the token penalty: how much longer to train to make up for the gap. Slope: how far the "
        "final synchronous loss falls per e-fold of tokens between the best run of the shorter grid and the whole run "
        "of the same seed, each with its own schedule. Penalty = exp(gap / slope); its interval is the gap's alone."
    )
    header = [*axes, roles.mode, "slope", "token penalty by length"]
    return [Table(header, body, title="Token penalty by length", note=note)]


def grid_tables(cells: Sequence[Cell], roles: AxisRoles) -> list[Table]:
    """Loss by value of each tuned axis."""
    found = []
    for position, axis in enumerate(roles.best):
        values = list(
            dict.fromkeys(cell.chosen[position][1] for cell in cells if len(cell.chosen) > position)
        )
        values.sort(key=by_value)
        rows: dict[tuple[str, ...], dict[str, str]] = {}
        axes = _axes(cells)
        for cell in cells:
            if len(cell.chosen) <= position:
                continue
            labels = dict(cell.group)
            rest = tuple(label for other, label in cell.chosen if other != axis)
            place = (*(labels.get(name, NONE) for name in axes), cell.mode, *rest)
            text = "failed" if cell.mean is None else f"{cell.mean:.4f} ({len(cell.results)})"
            rows.setdefault(place, {})[cell.chosen[position][1]] = text
        others = [other for other in roles.best if other != axis]
        body = [[*place, *(row.get(value, "") for value in values)] for place, row in rows.items()]
        note = "Mean validation loss (seeds)."
        found.append(Table([*axes, roles.mode, *others, *values], body, title=f"By {axis}", note=note))
    return found


def runs_table(points: Sequence[Point], results: Mapping[str, Result]) -> Table:
    """Every run, so that each number above can be traced to its folder or its line of the export."""
    axes = list(dict.fromkeys(axis for point in points for axis in point.labels))
    header = [*axes, "loss", "tokens", "tokens/s", "seconds", "skipped", "run", "problem"]
    body = []
    for point in points:
        result = results.get(point.digest)
        if result is None:
            continue
        labels = [point.labels.get(axis, "") for axis in axes]
        loss = "" if result.loss is None else f"{result.loss:.6f}"
        speed = "" if result.tokens_per_second is None else f"{result.tokens_per_second:.0f}"
        row = [loss, f"{result.tokens:.0f}", speed, f"{result.seconds:.1f}", str(result.skipped), result.run]
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
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    estimates = [
        f"{name}{part}" for name in ("gap", "recovered", "penalty") for part in ("", "_low", "_high")
    ]
    writer.writerow(
        [
            *axes,
            roles.mode,
            *roles.best,
            "seeds",
            "failed",
            "mean",
            "standard_error",
            *estimates,
            "extrapolated",
        ]
    )
    for cell in cells:
        labels, chosen = dict(cell.group), dict(cell.chosen)
        numbers = [cell.mean, cell.error]
        for estimate in (cell.gap, cell.recovered, cell.penalty):
            around = (estimate.interval if estimate else None) or (None, None)
            numbers += [estimate.value if estimate else None, *around]
        start = [*(labels.get(axis, "") for axis in axes), cell.mode]
        start += [
            *(chosen.get(axis, "") for axis in roles.best),
            str(len(cell.results)),
            str(len(cell.failed)),
        ]
        plain = ["" if value is None else f"{value:.6g}" for value in numbers]
        writer.writerow([*start, *plain, int(cell.extrapolated)])
    return file.getvalue()


def table_csv(table: Table) -> str:
    file = io.StringIO()
    csv.writer(file, lineterminator="\n").writerows([table.header, *table.rows])
    return file.getvalue()


def _axes(cells: Sequence[Cell]) -> list[str]:
    return list(dict.fromkeys(axis for cell in cells for axis, _ in cell.group))


def _error(error: float | None) -> str:
    return "" if error is None else f" ± {error:.4f}"


def _estimate(estimate: Estimate | None, form: str) -> str:
    if estimate is None:
        return NONE
    value, *around = (_number(one, form) for one in (estimate.value, *(estimate.interval or ())))
    return f"{value} [{', '.join(around)}]" if around else value


def _number(value: float, form: str) -> str:
    """What is a million or more is a run that broke: its size is told, not its digits."""
    return f"{value:{form}}" if abs(value) < 1e6 else f"{value:.1e}"


def _percent(estimate: Estimate | None) -> str:
    if estimate is None:
        return NONE
    if estimate.interval is None:
        return f"{100 * estimate.value:.0f} %"
    low, high = estimate.interval
    return f"{100 * estimate.value:.0f} % [{100 * low:.0f}, {100 * high:.0f}]"


def pipes(table: Table) -> str:
    """A table in Markdown."""

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    return "\n".join(
        [line(table.header), line(["---"] * len(table.header)), *(line(row) for row in table.rows)]
    )
