"""The parts a report page is made of, and the page itself: one HTML file that opens offline.

A page is a title and sections; a section is a list of parts (charts, timelines, tables, tiles, text). The
report of a run and the HTML of a study are built from the same parts.

Invariant: nothing that comes from a run can become markup or code. Text goes through `html.escape`;
numbers of charts travel in one `<script type="application/json">` block in which <, > and & are \\u
escapes, and the script writes them with textContent only. As a second lock the page's Content-Security-
Policy allows exactly the hash of our own script, so that even an injected tag could not run or load
anything.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

KEPT_AS_THEY_ARE = 64  # the first points of a curve fall steeply and are few: never merged
BUCKETS = 800  # about one per two pixels of a wide chart


@dataclass(frozen=True)
class Series:
    """A curve. `low` and `high` make a band around it: the range inside a bucket, or over seeds."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None
    dashed: bool = False
    markers: bool = False  # points only: events, or a handful of values
    colour: int | None = None  # index into the palette; default: position in the chart


@dataclass(frozen=True)
class Chart:
    title: str
    series: Sequence[Series]
    x_label: str = "step"
    y_label: str = ""
    note: str = ""
    log_x: bool = False
    log_y: bool = False
    from_zero: bool = False
    smooth: bool = False  # offer a smoothing slider
    focus: bool = False  # choose the height by what comes after the first steep fall


@dataclass(frozen=True)
class Lanes:
    """Bars on lanes against time. A row is (lane, kind, stage, microbatch, group, version, start, end)."""

    title: str
    lanes: Sequence[str]
    measured: Sequence[Sequence[Any]]
    predicted: Sequence[Sequence[Any]] = ()
    note: str = ""


@dataclass(frozen=True)
class Grid:
    """Small integers in cells (delay by stage and microbatch); None leaves a cell empty."""

    title: str
    rows: Sequence[str]
    columns: Sequence[str]
    cells: Sequence[Sequence[int | None]]
    cell_label: str = ""
    note: str = ""


@dataclass(frozen=True)
class Table:
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""
    note: str = ""


@dataclass(frozen=True)
class Tiles:
    """Headline numbers: (label, value, small print)."""

    tiles: Sequence[tuple[str, str, str]]


@dataclass(frozen=True)
class Text:
    text: str
    preformatted: bool = False
    title: str = ""
    folded: bool = False
    tone: str = ""  # "", "warning" or "error"


Part = Chart | Lanes | Grid | Table | Tiles | Text


@dataclass(frozen=True)
class Section:
    title: str
    parts: Sequence[Part] = field(default_factory=tuple)
    note: str = ""


def thin(series: Series, buckets: int = BUCKETS) -> Series:
    """At most KEPT_AS_THEY_ARE + buckets points: a bucket keeps its mean, lowest and highest value."""
    count = len(series.x)
    if count <= KEPT_AS_THEY_ARE + buckets or series.markers:
        return series
    lows, highs = series.low or series.y, series.high or series.y
    head, rest = KEPT_AS_THEY_ARE, count - KEPT_AS_THEY_ARE
    x, y = list(series.x[:head]), list(series.y[:head])
    low, high = list(lows[:head]), list(highs[:head])
    for bucket in range(buckets):
        first, last = head + bucket * rest // buckets, head + (bucket + 1) * rest // buckets
        x.append(series.x[last - 1])
        y.append(sum(series.y[first:last]) / (last - first))
        low.append(min(lows[first:last]))
        high.append(max(highs[first:last]))
    return Series(series.name, x, y, low, high, series.dashed, series.markers, series.colour)


def page(title: str, sections: Sequence[Section], subtitle: str = "") -> str:
    """The whole file."""
    charts: list[dict[str, Any]] = []
    body = "".join(_section(section, charts) for section in sections if section.parts)
    links = "".join(
        f'<a href="#{_anchor(section.title)}">{html.escape(section.title)}</a>'
        for section in sections
        if section.parts
    )
    style = _asset("report.css")
    script = (
        _asset("report.js")
        + _asset("report_lanes.js")
        + "document.addEventListener('DOMContentLoaded', start);"
    )
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; \
img-src data:; script-src 'sha256-{digest}'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<link rel="icon" href="data:,">
<title>{html.escape(title)}</title><style>{style}</style></head><body>
<header><div><h1>{html.escape(title)}</h1><p class="subtitle">{html.escape(subtitle)}</p></div>
<button id="theme" type="button" title="light or dark">◐</button></header>
<nav>{links}</nav><main>{body}</main>
<noscript>The charts of this page are drawn by a script inside it; the tables do not need it.</noscript>
<script type="application/json" id="charts">{embed(charts)}</script>
<script>{script}</script></body></html>
"""


def embed(value: Any) -> str:
    """JSON that is safe inside a script block: no <, > or &, no NaN, numbers to 6 digits."""
    text = json.dumps(_plain(value), separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        if not math.isfinite(value):
            return None
        return int(value) if value == int(value) and abs(value) < 1e15 else float(f"{value:.7g}")
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if isinstance(value, str | int | type(None)) else str(value)


def _asset(name: str) -> str:
    return files("slipstream.metrics").joinpath(name).read_text(encoding="utf-8")


def _anchor(title: str) -> str:
    return "".join(letter if letter.isascii() and letter.isalnum() else "-" for letter in title.lower())


def _section(section: Section, charts: list[dict[str, Any]]) -> str:
    note = f'<p class="note">{html.escape(section.note)}</p>' if section.note else ""
    parts = "".join(_part(part, charts) for part in section.parts)
    heading = f"<h2>{html.escape(section.title)}</h2>"
    return f'<section id="{_anchor(section.title)}">{heading}{note}<div class="parts">{parts}</div></section>'


def _part(part: Part, charts: list[dict[str, Any]]) -> str:
    match part:
        case Tiles():
            tiles = "".join(
                f'<div class="tile"><span>{html.escape(label)}</span><b>{html.escape(value)}</b>'
                f"<small>{html.escape(hint)}</small></div>"
                for label, value, hint in part.tiles
            )
            return f'<div class="tiles wide">{tiles}</div>'
        case Table():
            return _table(part)
        case Text():
            return _text(part)
        case Chart():
            spec = {**vars(part), "kind": "lines", "series": [vars(thin(series)) for series in part.series]}
            return _figure(spec, charts)
        case Lanes():
            return _figure({**vars(part), "kind": "lanes"}, charts, wide=True)
        case Grid():
            return _figure({**vars(part), "kind": "grid"}, charts, wide=True)


def _figure(spec: dict[str, Any], charts: list[dict[str, Any]], wide: bool = False) -> str:
    charts.append(spec)
    note = f'<p class="note">{html.escape(spec["note"])}</p>' if spec["note"] else ""
    width = " wide" if wide else ""
    return (
        f'<figure class="chart{width}" data-chart="{len(charts) - 1}">'
        f"<figcaption>{html.escape(spec['title'])}</figcaption>{note}</figure>"
    )


def _table(table: Table) -> str:
    caption = f"<caption>{html.escape(table.title)}</caption>" if table.title else ""
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in table.header)
    rows = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in table.rows
    )
    note = f'<p class="note">{html.escape(table.note)}</p>' if table.note else ""
    return (
        f'<div class="scroll wide"><table>{caption}<thead><tr>{head}</tr></thead>'
        f"<tbody>{rows}</tbody></table>{note}</div>"
    )


def _text(text: Text) -> str:
    tag = "pre" if text.preformatted else "p"
    body = f'<{tag} class="{html.escape(text.tone, quote=True)}">{html.escape(text.text)}</{tag}>'
    title = html.escape(text.title)
    if text.folded:
        return f'<details class="wide"><summary>{title}</summary>{body}</details>'
    return f'<div class="wide">{f"<h3>{title}</h3>" if title else ""}{body}</div>'
