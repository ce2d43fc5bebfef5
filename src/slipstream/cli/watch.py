"""`slipstream watch RUN`: a live view of a running job."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from slipstream.metrics import watch as view

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def watch(
    run: Annotated[Path, typer.Argument(help="A run folder.")],
    once: Annotated[bool, typer.Option(help="Show one frame and leave.")] = False,
    interval: Annotated[float, typer.Option(help="Seconds between readings.")] = 1.0,
) -> None:
    """Follow a run in the terminal. Ctrl-C leaves the run alone."""
    view.watch(run, Console(), once=once, interval=interval)
