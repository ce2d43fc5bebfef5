"""`slipstream study`: run many runs and tabulate what delay costs."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from slipstream.errors import UserError
from slipstream.metrics.report_page import Table as PageTable
from slipstream.study.parse import load_study
from slipstream.study.results import Result, collect, losses, of_points, write_export
from slipstream.study.tables import Compared, compared_cells, pipes, tables

app = typer.Typer(
    add_completion=False, no_args_is_help=True, help="Run many runs and tabulate what delay costs."
)

OUT = Path("runs/study")
File = Annotated[Path, typer.Argument(help="A study, TOML.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="Changes of its base, say data.path=FOLDER."),
]
Results = Annotated[
    list[Path] | None,
    typer.Option(help="Folder of runs (and exports), or one export; may be repeated.", show_default=str(OUT)),
]
RUNS_FAILED = 3  # exit code: everything asked for was tried, and some runs failed


@app.command()
def run(
    file: File,
    overrides: Overrides = None,
    workers: Annotated[int, typer.Option(min=1, help="Processes; several may share one GPU.")] = 1,
    only: Annotated[
        str | None, typer.Option(help="Only runs with this in their name, say 'seed=0*mode=ef'.")
    ] = None,
    limit_minutes: Annotated[
        float | None, typer.Option(help="Start no run that would end later than this.")
    ] = None,
    retry: Annotated[bool, typer.Option(help="Run failed runs again.")] = False,
    out: Annotated[Path, typer.Option(help="Folder of the runs; studies may share one.")] = OUT,
    also: Annotated[
        list[Path] | None, typer.Option(help="More results, as --results: what they hold is not run again.")
    ] = None,
) -> None:
    """Execute what is missing: finished runs are skipped, failed ones recorded.

    Exit code 0: nothing failed (runs may be left, for want of time); 3: runs failed, now or on record; 2: a mistake.
    """
    from slipstream.study.run import Limits, run_study
    from slipstream.study.show import Show

    show = Show(out)
    limits = Limits(workers, only, limit_minutes, retry)
    outcome = run_study(load_study(file, overrides or ()), out, limits, show, _places(also))
    left = f", {outcome.left} left" if outcome.left else ""
    waiting = f", {outcome.waiting} more once a grid has ended" if outcome.waiting else ""
    show.note(f"{len(outcome.finished)} runs finished, {len(outcome.failed)} failed{left}{waiting}.")
    named = [part for place in (out, *_places(also)) for part in ("--results", str(place))]
    again = shlex.join([str(file), *(overrides or ()), *named])
    show.note(f"Next: slipstream study table {again}")
    if outcome.failed_before:
        show.note(f"{outcome.failed_before} more failed before; --retry runs them again.")
    if outcome.failed or outcome.failed_before:
        raise typer.Exit(RUNS_FAILED)


@app.command()
def warm(file: File, overrides: Overrides = None) -> None:
    """Compile what the runs of a study need, into torch's cache on disk; needs no data.

    Workers that start together then read the cache instead of each compiling the same code.
    """
    from slipstream.study.warm import warm_up

    for name, seconds in warm_up(load_study(file, overrides or ())):
        print(f"{name}  {seconds:.1f} s")


@app.command("list")
def list_runs(file: File, overrides: Overrides = None, results: Results = None) -> None:
    """Every run of a study with its state, under each name it has."""
    study, found = load_study(file, overrides or ()), collect(*_places(results, OUT))
    expansion = study.expand(losses(found))
    for point in expansion.named:
        result = found.get(point.digest)
        state = "missing"
        if result is not None:
            state = f"failed: {result.failed}" if result.failed else f"{result.loss:.4f}"
        print(f"{point.folder}  {point.name}  {state}")
    if expansion.waiting:
        print(f"{expansion.waiting} more once a grid has ended")


@app.command()
def export(
    file: File,
    overrides: Overrides = None,
    results: Results = None,
    out: Annotated[Path, typer.Option(help="Folder the file is written to.")] = Path("docs/results"),
) -> None:
    """Write the ended runs of a study as one small file that `study table` reads back."""
    study, found = load_study(file, overrides or ()), collect(*_places(results, OUT))
    expansion = study.expand(losses(found))
    ended = of_points(expansion.points, found)
    if not ended:
        raise _nothing(file, results, found)
    path = out / f"{study.name}.jsonl.gz"
    _keep_all(path, {result.digest for result in ended})
    count = write_export(path, ended)
    print(f"{path}  {count} runs, {path.stat().st_size:,} bytes")
    if expansion.waiting and len(found) > count:
        print(
            f"{len(found) - count} runs that were read are not in it. {expansion.waiting} runs of this study wait "
            "for the best of a grid: if those are among them, name the results that hold the grid as well, with one "
            "more --results."
        )


@app.command()
def table(
    file: File,
    overrides: Overrides = None,
    results: Results = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the files. Default: that of the results.")
    ] = None,
    penalty: Annotated[
        Path | None, typer.Option(help="Also put the token penalties into this table of `slipstream plan`.")
    ] = None,
) -> None:
    """Print the tables; write them as Markdown, CSV and one HTML page with the loss curves."""
    from slipstream.study.page import notes_of, write_tables

    study, found = load_study(file, overrides or ()), collect(*_places(results, OUT))
    expansion = study.expand(losses(found))
    if not of_points(expansion.points, found):
        raise _nothing(file, results, found)
    _print(tables(study, expansion, found))
    for note in notes_of(expansion, found):
        print(f"- {note}")
    first = _places(results, OUT)[0]
    folder = out or (first if first.is_dir() else first.parent)
    for path in write_tables(study, expansion, found, folder):
        print(path)
    if penalty is not None:
        _refresh(penalty, study.name, compared_cells(study, expansion, found))


def _places(named: Sequence[Path] | None, *otherwise: Path) -> list[Path]:
    for place in named or ():
        if not place.exists():
            raise UserError(
                f"There are no results at '{place}'. Name a folder of runs, or an export (*.jsonl.gz)."
            )
    return list(named or otherwise)


def _nothing(file: Path, results: Sequence[Path] | None, found: Mapping[str, Result]) -> UserError:
    places = ", ".join(str(place) for place in _places(results, OUT))
    advice = "Run it first, or name its folder with --results."
    if found:  # most often the runs are there, but KEY=VALUE of their making was left out
        paths = sorted({path for result in found.values() if (path := result.key("data.path"))})
        made = f", made with {' or '.join(f'data.path={path}' for path in paths)}" if paths else ""
        advice = f"It holds {len(found)} other runs{made}. Give the KEY=VALUE that they were made with."
    return UserError(f"No run of '{file}' has ended in {places}. {advice}")


def _keep_all(path: Path, digests: Set[str]) -> None:
    """An export is often all that another machine's runs have left behind: none is written over."""
    lost = set(collect(path)) - digests if path.exists() else ()
    if lost:
        raise UserError(
            f"'{path}' holds {len(lost)} runs that are not among these. Name it as well to keep them, with --results "
            f"{path} beside the other --results, or delete it first."
        )


def _refresh(path: Path, name: str, rows: Compared) -> None:
    from slipstream.plan.penalty import write_penalties
    from slipstream.study.measured import entries

    measured = entries(name, *rows)
    if not measured:
        raise UserError(
            f"No row of '{name}' is one that `slipstream plan` could be asked for; {path} is as it was."
        )
    replaced = write_penalties(path, measured)
    print(f"{path}  {len(measured)} entries written, {len(replaced)} replaced")
    for entry in measured:
        print(f"  {entry.optimizer}, {entry.correction}: {entry.penalty:.3f}")


def _print(found: Sequence[PageTable]) -> None:
    """Drawn on a terminal; as Markdown into a pipe."""
    console = Console(highlight=False)
    for one in found:
        if not console.is_terminal:
            print(f"\n{one.title}\n{pipes(one)}\n{one.note}")
            continue
        for number, columns in enumerate(blocks(one, console.width)):
            title = one.title if number == 0 else f"{one.title}, more columns"
            shown = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
            for column in columns:
                shown.add_column(escape(_head(one.header[column])), overflow="fold")
            for row in one.rows:
                shown.add_row(*(escape(_wrapped(row[column])) for column in columns))
            console.print(shown)
        console.print(one.note, style="dim")


def blocks(table: PageTable, width: int) -> list[list[int]]:
    """The columns in as many parts as a terminal needs; each begins with those that name the rows."""
    wide = [
        max(len(line) for cell in (_head(name), *map(_wrapped, cells)) for line in cell.split("\n")) + 3
        for name, *cells in zip(table.header, *table.rows, strict=True)
    ]
    names = [column for column in range(min(2, len(wide) - 1)) if not _figures(table, column)]
    found: list[list[int]] = []
    for column in range(len(wide)):
        if column in names:
            continue
        if not found or sum(wide[other] for other in (*found[-1], column)) > width:
            found.append([*names])
        found[-1].append(column)
    return found


def _figures(table: PageTable, column: int) -> bool:
    return any(row[column][:1].isdigit() or row[column][:1] in "+-" for row in table.rows if row[column])


def _head(name: str) -> str:
    return "\n".join(textwrap.wrap(name, 16))


def _wrapped(cell: str) -> str:
    """An interval stands under its figure; a sentence takes several lines."""
    if len(cell) > 20 and " [" not in cell:
        return _head(cell)
    return cell.replace(" [", "\n[")
