"""A study as one HTML file: its tables and its loss curves, from the parts of the run report."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from slipstream.metrics.report_page import Chart, Part, Section, Series, Table, Text, page
from slipstream.study.cells import AxisRoles, Cell, pairs
from slipstream.study.results import Curve, Result
from slipstream.study.sweep import Expansion, Study
from slipstream.study.tables import as_csv, compared_cells, markdown, runs_table, table_csv, tables

_BROKEN = 0.5  # a rise of the validation loss that no noise explains


def write_tables(study: Study, expansion: Expansion, results: Mapping[str, Result], out: Path) -> list[Path]:
    """NAME.md, NAME.csv, NAME-runs.csv and NAME.html in `out`."""
    rows, roles = compared_cells(study, expansion, results)
    found = tables(study, expansion, results)
    runs = runs_table(expansion.named, results)
    notes = notes_of(expansion, results)
    texts = {
        f"{study.name}.md": markdown(study, found, notes),
        f"{study.name}.csv": as_csv(rows, roles),
        f"{study.name}-runs.csv": table_csv(runs),
        f"{study.name}.html": study_page(study, found, rows, roles, notes, runs),
    }
    out.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, text in texts.items():
        paths.append(out / name)
        paths[-1].write_text(text, encoding="utf-8", errors="backslashreplace")
    return paths


def study_page(
    study: Study,
    found: Sequence[Table],
    rows: Sequence[Cell],
    roles: AxisRoles,
    notes: Sequence[str],
    runs: Table,
) -> str:
    about: list[Part] = [Text(study.about)] if study.about else []
    about += [Text(" ".join(notes), tone="warning")] if notes else []
    groups = list(dict.fromkeys(cell.group for cell in rows if cell.results))
    losses: list[Part] = []
    gaps: list[Part] = []
    for group in groups:
        cells = [cell for cell in rows if cell.group == group and cell.results]
        title = ", ".join(f"{axis} {label}" for axis, label in group) or study.name
        losses.append(_loss_chart(title, cells))
        gaps += _gap_chart(title, cells, roles)
    note = "Validation loss at the master; the band spans the seeds. Dashed: training loss at the bank."
    return page(
        study.name,
        [
            Section("Tables", [*about, *found]),
            Section("Loss against tokens", losses, note=note),
            Section(
                f"Gap to {roles.reference} against tokens", gaps, note="Mean of the paired gaps over seeds."
            ),
            Section("Runs", [runs]),
        ],
        "slipstream study",
    )


def _loss_chart(title: str, cells: Sequence[Cell]) -> Chart:
    series = []
    for colour, cell in enumerate(cells):
        name = " ".join([cell.mode or "run", *(f"{axis} {label}" for axis, label in cell.chosen)])
        runs = list(cell.results.values())
        series.append(_mean_series(name, [run.validation for run in runs], colour))
        training = _mean_series(f"{name}: training", [run.training for run in runs], colour)
        series.append(Series(training.name, training.x, training.y, dashed=True, colour=colour))
    return Chart(title, series, x_label="tokens", y_label="loss", focus=True, smooth=True)


def _gap_chart(title: str, cells: Sequence[Cell], roles: AxisRoles) -> list[Chart]:
    reference = next((cell for cell in cells if cell.mode == roles.reference), None)
    if reference is None:
        return []
    series = []
    for colour, cell in enumerate(cells):
        curves = [
            _difference(cell.results[seed].validation, reference.results[seed].validation)
            for seed in pairs(cell, reference)
        ]
        if cell is not reference and any(curves):
            series.append(_mean_series(cell.mode, [curve for curve in curves if curve], colour))
    return [Chart(title, series, x_label="tokens", y_label="gap in loss", focus=True)] if series else []


def _difference(curve: Curve, reference: Curve) -> Curve:
    known = dict(reference)
    return [(tokens, loss - known[tokens]) for tokens, loss in curve if tokens in known]


def _mean_series(name: str, curves: Sequence[Curve], colour: int) -> Series:
    """Mean over curves at the points that all have, in a band of their range."""
    common = set.intersection(*({x for x, _ in curve} for curve in curves)) if curves else set()
    table = [dict(curve) for curve in curves]
    xs = sorted(common)
    columns = [[curve[x] for curve in table] for x in xs]
    low, high = [min(column) for column in columns], [max(column) for column in columns]
    band = (low, high) if len(curves) > 1 else (None, None)
    return Series(name, xs, [statistics.fmean(column) for column in columns], *band, colour=colour)


def _rise(curve: Curve) -> tuple[float, float] | None:
    """The lowest loss and a higher one after it, where training once lost more than noise does."""
    lowest = math.inf
    worst = (0.0, 0.0)
    for _, loss in curve:
        lowest = min(lowest, loss)
        worst = max(worst, (lowest, loss), key=lambda pair: pair[1] - pair[0])
    return worst if worst[1] - worst[0] > _BROKEN else None


def notes_of(expansion: Expansion, results: Mapping[str, Result]) -> list[str]:
    """What is missing, failed or broke on the way, and what was not measured on one machine and one text."""
    notes = list(expansion.notes)
    ended = [results[point.digest] for point in expansion.points if point.digest in results]
    missing = len(expansion.points) - len(ended)
    if missing or expansion.waiting:
        notes.append(
            f"{missing + expansion.waiting} of {len(expansion.points) + expansion.waiting} runs are missing."
        )
    for point in expansion.points:
        result = results.get(point.digest)
        if result is not None and result.failed:
            notes.append(f"{point.name} failed: {result.failed.partition(chr(10))[0]}")
        elif result is not None and (rise := _rise(result.validation)) is not None:
            low, high = rise
            notes.append(
                f"{point.name} broke on the way: its validation loss rose from {low:.2f} to {high:.2f}. "
                "Gaps to or of such a run say little."
            )
    compared = [result for result in ended if not result.failed]
    if unknown := sum(1 for result in compared if not result.source):
        notes.append(
            f"{unknown} of {len(compared)} runs were made before a run noted the commit and fingerprint of its code."
        )
    for attribute, what in (("device", "device"), ("data", "data"), ("held_out", "validation text")):
        kinds = sorted({getattr(result, attribute) for result in compared if getattr(result, attribute)})
        if len(kinds) > 1:
            apart = "" if attribute == "device" else " Only runs on the same data are paired."
            notes.append(
                f"These runs do not share their {what}: {', '.join(kind[:24] for kind in kinds)}.{apart}"
            )
    return notes
