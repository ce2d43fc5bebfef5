"""`slipstream study`: run many runs and tabulate what delay costs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from slipstream.errors import UserError
from slipstream.metrics.report_page import Table as PageTable
from slipstream.study.parse import load_study
from slipstream.study.results import collect, losses, of_points, write_export
from slipstream.study.tables import pipes, tables

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, no_args_is_help=True)

OUT = Path("runs/study")
File = Annotated[Path, typer.Argument(help="A study, TOML.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="Changes of its base, say data.path=FOLDER."),
]
Results = Annotated[Path, typer.Option(help="Folder of runs (and exports), or one export.")]


@app.command()
def run(
    file: File,
    overrides: Overrides = None,
    workers: Annotated[int, typer.Option(min=1, help="Processes; several may share one GPU.")] = 1,
    only: Annotated[str | None, typer.Option(help="Only runs whose name matches, say 'mode=ef'.")] = None,
    limit_minutes: Annotated[
        float | None, typer.Option(help="Start no run that would end later than this.")
    ] = None,
    retry: Annotated[bool, typer.Option(help="Run failed runs again.")] = False,
    out: Annotated[Path, typer.Option(help="Folder of the runs; studies may share one.")] = OUT,
) -> None:
    """Execute what is missing: finished runs are skipped, failed ones recorded."""
    from slipstream.study.run import Limits, run_study
    from slipstream.study.show import Show

    show = Show(out)
    outcome = run_study(
        load_study(file, overrides or ()), out, Limits(workers, only, limit_minutes, retry), show
    )
    left = f", {outcome.left} left" if outcome.left else ""
    waiting = f", {outcome.waiting} more once a grid has ended" if outcome.waiting else ""
    show.note(f"{len(outcome.finished)} runs finished, {len(outcome.failed)} failed{left}{waiting}.")
    show.note(f"Next: slipstream study table {file} --results {out}")


@app.command("list")
def list_runs(file: File, overrides: Overrides = None, results: Results = OUT) -> None:
    """Every run of a study with its state."""
    study, found = load_study(file, overrides or ()), collect(results)
    expansion = study.expand(losses(found))
    for point in expansion.points:
        result = found.get(point.digest)
        state = (
            "missing"
            if result is None
            else f"failed: {result.failed}"
            if result.failed
            else f"{result.loss:.4f}"
        )
        print(f"{point.folder}  {point.name}  {state}")
    if expansion.waiting:
        print(f"{expansion.waiting} more once a grid has ended")


@app.command()
def export(
    file: File,
    overrides: Overrides = None,
    results: Results = OUT,
    out: Annotated[Path, typer.Option(help="Folder the file is written to.")] = Path("docs/results"),
) -> None:
    """Write the ended runs of a study as one small file that `study table` reads back."""
    study, found = load_study(file, overrides or ()), collect(results)
    ended = of_points(study.expand(losses(found)).points, found)
    if not ended:
        raise UserError(
            f"No run of '{file}' has ended in {results}. Run it first, or name its folder with --results."
        )
    path = out / f"{study.name}.jsonl.gz"
    count = write_export(path, ended)
    print(f"{path}  {count} runs, {path.stat().st_size:,} bytes")


@app.command()
def table(
    file: File,
    overrides: Overrides = None,
    results: Results = OUT,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the files. Default: that of the results.")
    ] = None,
) -> None:
    """Print the tables; write them as Markdown, CSV and one HTML page with the loss curves."""
    from slipstream.study.page import write_tables

    study, found = load_study(file, overrides or ()), collect(results)
    expansion = study.expand(losses(found))
    if not of_points(expansion.points, found):
        raise UserError(
            f"No run of '{file}' has ended in {results}. Run it first, or name its folder with --results."
        )
    _print(tables(study, expansion, found))
    folder = out or (results if results.is_dir() else results.parent)
    for path in write_tables(study, expansion, found, folder):
        print(path)


def _print(found: Sequence[PageTable]) -> None:
    """Drawn on a terminal; as Markdown into a pipe."""
    console = Console(highlight=False)
    for one in found:
        if not console.is_terminal:
            print(f"\n{one.title}\n{pipes(one)}\n{one.note}")
            continue
        shown = Table(title=one.title, caption=one.note, title_justify="left", caption_justify="left")
        for name in one.header:
            shown.add_column(escape(name))
        for row in one.rows:
            shown.add_row(*(escape(cell) for cell in row))
        console.print(shown)
