"""Timelines as pictures: in the terminal, as one HTML file, as SVG, and as a Perfetto trace.

`figure` and `comparison` lay measured timelines under their predictions; the others take `{title: Timeline}` and draw
the timelines one under the other on one time axis, so that schedules compare by eye.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from slipstream.errors import UserError
from slipstream.schedule.plot.html import comparison, figure, panels, to_html
from slipstream.schedule.plot.svg import to_svg
from slipstream.schedule.plot.terminal import terminal
from slipstream.schedule.plot.trace import to_trace
from slipstream.schedule.timeline import Timeline

__all__ = [
    "comparison",
    "figure",
    "panels",
    "save",
    "terminal",
    "to_html",
    "to_svg",
    "to_trace",
    "write_text",
]

FORMATS = {".html": to_html, ".svg": to_svg, ".json": to_trace}


def save(path: Path, timelines: Mapping[str, Timeline]) -> None:
    """Write the picture whose format the file's name asks for: .html, .svg or .json (a trace)."""
    draw = FORMATS.get(path.suffix.lower())
    if draw is None:
        kinds = ", ".join(FORMATS)
        raise UserError(f"No picture can be written as '{path.name}'. End the file name in one of: {kinds}.")
    write_text(path, draw(timelines))


def write_text(path: Path, text: str) -> None:
    """Write a file, or say why that cannot be done."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"Cannot write {path}: {error.strerror or error}. Choose another file.") from None
