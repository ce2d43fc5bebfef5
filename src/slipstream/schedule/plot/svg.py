"""A timeline as a small SVG, written by hand: rectangles with tooltips, a time axis, a legend."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

from slipstream.schedule.actions import Action, Kind
from slipstream.schedule.plot.palette import (
    IDLE,
    WORDS,
    colour,
    describe,
    has_parts,
    ink,
    is_chunked,
    is_old,
    kinds_in,
    label,
    seconds,
)
from slipstream.schedule.timeline import Timeline

_LEFT, _RIGHT, _WIDTH = 74, 16, 1200
_ROW, _GAP, _TITLE, _AXIS, _LEGEND = 24, 3, 30, 26, 34
_MOST_SPANS = 20_000


def to_svg(timelines: Mapping[str, Timeline], unit: str = "units", *, most_spans: int = _MOST_SPANS) -> str:
    """One SVG document; a run of very many actions is cut at a time that the title then names."""
    timelines = dict(timelines)
    per_timeline = most_spans // len(timelines)
    cut = min(timeline.time_of_span(per_timeline) for timeline in timelines.values())
    longest = min(cut, max(timeline.makespan for timeline in timelines.values())) or 1.0
    scale = (_WIDTH - _LEFT - _RIGHT) / longest
    parts: list[str] = []
    y = 8.0
    for title, timeline in timelines.items():
        until = min(longest, timeline.makespan)
        note = ""
        if until < timeline.makespan:
            note = f" (the first {seconds(until)} of {seconds(timeline.makespan)} {unit})"
        parts.append(f'<text class="title" x="{_LEFT}" y="{y + 20:g}">{escape(title + note)}</text>')
        y += _TITLE
        parts += _rows(timeline, y, scale, until)
        y += len(timeline.ranks) * (_ROW + _GAP)
        parts += _axis(y, scale, longest)
        y += _AXIS
    two_parts = any(has_parts(timeline) for timeline in timelines.values())
    parts += _legend(y, kinds_in(timelines), unit, two_parts)
    height = y + _LEGEND
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height:g}" '
        f'width="{_WIDTH}" height="{height:g}">\n<style>text{{font:12px system-ui,sans-serif;fill:#333a45}}'
        ".title{font-size:15px;font-weight:600}.cell{font-size:11px;text-anchor:middle;pointer-events:none}"
        ".tick{fill:#77808d;text-anchor:middle}.rank{text-anchor:end}</style>\n"
        f'<rect width="{_WIDTH}" height="{height:g}" fill="#ffffff"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def _rows(timeline: Timeline, top: float, scale: float, until: float) -> list[str]:
    chunked, begin, two = is_chunked(timeline), timeline.begin, has_parts(timeline)
    word = "rank" if chunked else "stage"
    parts = []
    for rank in range(len(timeline.ranks)):
        y = top + rank * (_ROW + _GAP)
        parts.append(f'<text class="rank" x="{_LEFT - 8}" y="{y + 16:g}">{word} {rank}</text>')
        parts.append(
            f'<rect x="{_LEFT}" y="{y:g}" width="{until * scale:.2f}" height="{_ROW}" fill="{IDLE}"/>'
        )
    for rank, action, start, end in timeline.spans:
        if end <= start or start - begin >= until:
            continue
        x = _LEFT + (start - begin) * scale
        width = (min(end - begin, until) - (start - begin)) * scale
        y = top + rank * (_ROW + _GAP)
        old = two and is_old(action)
        tip = f"{describe(action, chunked)}\n{seconds(start)} to {seconds(end)}"
        parts.append(
            f'<rect x="{x:.2f}" y="{y:g}" width="{max(width - 0.6, 0.3):.2f}" height="{_ROW}" rx="1.5" '
            f'fill="{colour(action, old)}"><title>{escape(tip)}</title></rect>'
        )
        text = label(action)
        if width >= 4 + 6.5 * len(text):
            middle, style = f"{x + width / 2:.2f}", f"fill:{ink(action, old)}"
            parts.append(f'<text class="cell" x="{middle}" y="{y + 16:g}" style="{style}">{text}</text>')
    return parts


def _axis(y: float, scale: float, longest: float) -> list[str]:
    step = _round_step(longest / 10)
    return [
        f'<text class="tick" x="{_LEFT + i * step * scale:.2f}" y="{y + 14:g}">{seconds(i * step)}</text>'
        for i in range(int(longest / step * (1 + 1e-9)) + 1)
    ]


def _round_step(least: float) -> float:
    """The least of 1, 2 or 5 times a power of ten that is not below `least`."""
    power = 10.0 ** int(f"{least:e}".split("e")[1])
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least * (1 - 1e-9))


def _legend(y: float, kinds: list[Kind], unit: str, two_parts: bool) -> list[str]:
    parts, x = [], float(_LEFT)
    entries = [(colour(Action(kind, 0, 0, 0)), WORDS[kind]) for kind in kinds] + [(IDLE, "idle")]
    if two_parts:
        entries.insert(-1, (colour(Action(Kind.BACKWARD, 0, 0, 0), old=True), "lighter: reads old weights"))
    for fill, word in entries:
        parts.append(f'<rect x="{x:g}" y="{y + 6:g}" width="14" height="14" rx="2" fill="{fill}"/>')
        parts.append(f'<text x="{x + 20:g}" y="{y + 17:g}">{word}</text>')
        x += 34 + 6.6 * len(word)
    hint = f"Numbers are microbatches; the hue changes with the group; time in {unit}."
    parts.append(f'<text class="hint" x="{x + 6:g}" y="{y + 17:g}" style="fill:#77808d">{hint}</text>')
    return parts
