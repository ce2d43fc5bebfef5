"""`slipstream config`: every key of a run with its meaning and default, or the resolved run of a file."""

from __future__ import annotations

import json

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from slipstream.config import Reach, describe

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def config(
    search: str = typer.Argument("", help="Show only the keys that contain this."),
    as_json: bool = typer.Option(False, "--json", help="Print a JSON list."),
) -> None:
    """Every setting of a run: meaning, default, type, and what changing it does to an existing run.

    `slipstream train run.toml KEY=VALUE --dry-run` prints a resolved run instead.
    """
    found = [key for key in describe() if search in key.name]
    if as_json:
        rows = [
            {
                "key": key.name,
                "type": key.type,
                "default": key.default,
                "meaning": key.meaning,
                "on_resume": key.reach.value,
            }
            for key in found
        ]
        print(json.dumps(rows, indent=2))
        return
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(ratio=1)
    section = ""
    for key in found:
        if section and key.name.partition(".")[0] != section:
            table.add_row()
        section = key.name.partition(".")[0]
        default = "" if key.default is None else f" = {json.dumps(key.default)}"
        kept = "" if key.reach is Reach.TRAJECTORY else ", may differ on resume"
        note = escape(f"({key.type}{kept})")
        table.add_row(f"[bold cyan]{key.name}[/]{escape(default)}", f"{escape(key.meaning)} [dim]{note}[/]")
    Console(highlight=False).print(table)
