"""Timelines as pictures: in the terminal, as one HTML file, as SVG, and as a Perfetto trace.

All take `{title: Timeline}` and draw the timelines one under the other on one time axis, so that schedules, or a
measurement and its prediction, compare by eye. `unit` names what their times are in.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from slipstream.errors import UserError
from slipstream.schedule.plot.html import to_html
from slipstream.schedule.plot.svg import to_svg
from slipstream.schedule.plot.terminal import terminal
from slipstream.schedule.plot.trace import to_trace
from slipstream.schedule.timeline import Timeline

__all__ = [
    "save",
    "terminal",
    "to_html",
    "to_svg",
    "to_trace",
    "write_text",
]

FORMATS = {".html": to_html, ".svg": to_svg, ".json": lambda timelines, _: to_trace(timelines)}


def save(path: Path, timelines: Mapping[str, Timeline], unit: str = "units") -> None:
    """Write the picture whose format the file's name asks for: .html, .svg or .json (a trace)."""
    draw = FORMATS.get(path.suffix.lower())
    if draw is None:
        kinds = ", ".join(FORMATS)
        raise UserError(f"No picture can be written as '{path.name}'. End the file name in one of: {kinds}.")
    write_text(path, draw(timelines, unit))


def write_text(path: Path, text: str) -> None:
    """Write a file, or say why that cannot be done."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"Cannot write {path}: {error.strerror or error}. Choose another file.") from None
