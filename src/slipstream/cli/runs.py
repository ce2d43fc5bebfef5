"""`slipstream runs`, `report`, `watch` and `health`: what runs there are, how they stand, in what they differ."""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from slipstream.errors import UserError
from slipstream.formats import si
from slipstream.metrics import watch as live
from slipstream.metrics.events import EVENTS_FILE, Run, number, read_run, values
from slipstream.metrics.pulse import is_held, pulse
from slipstream.metrics.report import write_report
from slipstream.metrics.report_columns import duration, labels

NOT_COMPARED = ("run.dir", "run.name", "run.tags")
RunFolder = Annotated[Path, typer.Argument(help="A run folder.")]


def runs(
    places: Annotated[
        list[Path] | None,
        typer.Argument(help="A folder of runs to list, or runs to compare.", show_default="runs"),
    ] = None,
    tag: Annotated[str | None, typer.Option(help="List only runs with this tag (run.tags).")] = None,
    diff: Annotated[bool, typer.Option("--diff", help="Only the settings in which the runs differ.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the runs in a folder; with two or more runs, compare their figures and settings.

    slipstream runs                      every run under ./runs
    slipstream runs runs/a runs/b        side by side, with the settings in which they differ
    slipstream runs runs/a runs/b --diff only those settings
    """
    found = [run for place in places or [Path("runs")] for run in find(place)]
    if tag is not None:
        found = [run for run in found if tag in run.settings.get("run.tags", [])]
    if not found:
        where = ", ".join(map(str, places or ["runs"]))
        raise UserError(
            f"There is no run{f' tagged {tag!r}' if tag else ''} in {where}. `slipstream train` makes one."
        )
    rows = [describe(run, name) for run, name in zip(found, labels(found), strict=True)]
    differing = differences(found)
    if as_json:
        print(json.dumps({"runs": rows, "differences": differing}))
        return
    console = Console(highlight=False)
    named = len(places or ()) > 1
    if not diff:
        figures = {name: [words(row) for row in rows] for name, words in WORDS.items()}
        console.print(_side_by_side("", rows, figures) if named else _listed(rows))
    if diff or named:
        cells = {
            key: ["–" if value is None else escape(json.dumps(value)) for value in values]
            for key, values in differing.items()
        }
        console.print(_side_by_side("setting", rows, cells) if differing else "The settings are the same.")


def report(
    runs: Annotated[list[Path], typer.Argument(help="Run folders; several are laid over one another.")],
    out: Annotated[
        Path | None, typer.Option(help="Where to write. Default: report.html in the first run.")
    ] = None,
) -> None:
    """Write a self-contained page: curves, utilisation, memory, timeline, config, samples."""
    print(write_report(runs, out))


def watch(
    run: RunFolder,
    once: Annotated[bool, typer.Option(help="Show one frame and leave.")] = False,
    interval: Annotated[float, typer.Option(help="Seconds between readings.")] = 1.0,
) -> None:
    """Follow a run in the terminal. Ctrl-C leaves the run alone."""
    live.watch(run, Console(), once=once, interval=interval)


def health(run: RunFolder) -> None:
    """Whether a run is well. Exit codes: 0 finished, or running; 75 stopped or killed, so the same command goes on with
    it; 2 ended with an error, which is shown; 1 running, but nothing was written for a minute and 20 usual steps."""
    found = pulse(read_run(run), is_held(run / "lock"), time.time())
    print(f"{run}: {found.words}")
    raise typer.Exit(found.code)


def find(place: Path) -> list[Run]:
    """The run at `place`, or the runs below it, newest last."""
    if (place / EVENTS_FILE).is_file() or (place / "config.toml").is_file():
        return [read_run(place)]
    if not place.is_dir():
        raise UserError(f"There is no folder '{place}'. Name one that holds runs, or a run's own.")
    logs = [path for path in place.rglob(EVENTS_FILE) if "checkpoints" not in path.parts]
    found = []
    for path in sorted(logs):
        with contextlib.suppress(UserError):  # removed in this moment
            found.append(read_run(path.parent))
    return sorted(found, key=lambda run: number(run.events[-1].get("time")) or 0.0 if run.events else 0.0)


def describe(run: Run, label: str) -> dict[str, Any]:
    """The figures of one run; None where it has none."""
    settings, finish, steps = run.settings, run.last("finish"), run.surviving("step")
    losses, speeds = values(run.surviving("validation"), "loss"), values(steps, "tokens_per_second")
    last = steps[-1] if steps else {}
    tags = settings.get("run.tags")
    return {
        "run": str(settings.get("run.name") or label),
        "folder": str(run.path),
        "status": "stopped" if run.status == "running" and not is_held(run.path / "lock") else run.status,
        "step": last.get("step"),
        "steps": settings.get("train.steps"),
        "validation_loss": losses[-1] if losses else None,
        "best_loss": min(losses, default=None),
        "tokens": number(finish.get("tokens")) if finish else number(last.get("tokens")),
        "seconds": max(run.clock().values(), default=None),
        "tokens_per_second": sorted(speeds)[len(speeds) // 2] if speeds else None,
        "schedule": settings.get("pipeline.schedule"),
        "optimizer": settings.get("optim.name"),
        "tags": [str(tag) for tag in tags] if isinstance(tags, list) else [],
    }


def differences(found: list[Run]) -> dict[str, list[Any]]:
    """Settings that are not the same in all runs, and each run's value."""
    keys = dict.fromkeys(key for run in found for key in run.settings if key not in NOT_COMPARED)
    by_run = {key: [run.settings.get(key) for run in found] for key in keys}
    return {key: own for key, own in by_run.items() if any(value != own[0] for value in own)}


WORDS = {
    "status": lambda row: f"[{live.STATUS_STYLE.get(row['status'], 'yellow')}]{row['status']}[/]",
    "step": lambda row: "–" if row["step"] is None else f"{row['step']}/{row['steps'] or '?'}",
    "loss": lambda row: _loss(row["validation_loss"]),
    "best": lambda row: _loss(row["best_loss"]),
    "tokens": lambda row: si(row["tokens"]),
    "tok/s": lambda row: si(row["tokens_per_second"]),
    "time": lambda row: duration(row["seconds"]),
    "schedule": lambda row: str(row["schedule"] or "–"),
    "optimizer": lambda row: str(row["optimizer"] or "–"),
    "tags": lambda row: escape(" ".join(row["tags"])),
}
LISTED = ("status", "step", "loss", "tokens", "tok/s", "time", "schedule", "tags")


def _loss(value: float | None) -> str:
    return "–" if value is None else f"{value:.4f}"


def _listed(rows: list[dict[str, Any]]) -> Table:
    columns = [name for name in LISTED if name != "tags" or any(row["tags"] for row in rows)]
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    table.add_column("run", overflow="fold")
    for name in columns:
        table.add_column(
            name, no_wrap=True, justify="right" if name in ("loss", "tokens", "tok/s", "time") else "left"
        )
    for row in rows:
        table.add_row(escape(row["run"]), *(WORDS[name](row) for name in columns))
    return table


def _side_by_side(head: str, rows: list[dict[str, Any]], lines: dict[str, list[str]]) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    table.add_column(head, no_wrap=True)
    for row in rows:
        table.add_column(escape(row["run"]), overflow="fold")
    for name, cells in lines.items():
        table.add_row(name, *cells)
    return table
