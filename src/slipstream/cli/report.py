"""`slipstream report RUN...`: one HTML page about one or more runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from slipstream.metrics.report import write_report

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(help="Run folders; several are laid over one another.")],
    out: Annotated[
        Path | None, typer.Option(help="Where to write. Default: report.html in the first run.")
    ] = None,
) -> None:
    """Write a self-contained page: curves, utilisation, memory, timeline, config, samples."""
    print(write_report(runs, out))
