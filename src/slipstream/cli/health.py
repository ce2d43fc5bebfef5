"""`slipstream health`: one line about a run, and an exit code for scripts."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from slipstream.metrics.events import read_run
from slipstream.metrics.pulse import is_held, pulse

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def health(run: Annotated[Path, typer.Argument(help="A run folder.")]) -> None:
    """Whether a run is well. Exit codes: 0 finished, or running; 75 stopped or killed, so the same command goes on with
    it; 2 ended with an error, which is shown; 1 running, but nothing was written for a minute and 20 usual steps."""
    found = pulse(read_run(run), is_held(run / "lock"), time.time())
    print(f"{run}: {found.words}")
    raise typer.Exit(found.code)
