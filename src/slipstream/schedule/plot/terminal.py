"""A timeline in the terminal: one row per rank, one coloured cell per action, dots where a rank idles.

The number in a cell is the microbatch. Without colours the cell begins with the kind's letter instead, a small one
where the action belongs to the old part of its group.
"""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Group, RenderableType
from rich.text import Text

from slipstream.schedule.actions import Action, Kind
from slipstream.schedule.plot.palette import (
    WORDS,
    colour,
    has_parts,
    ink,
    is_chunked,
    is_old,
    kinds_in,
    label,
    seconds,
)
from slipstream.schedule.timeline import Timeline

_WIDEST_UNIT = 4  # columns of the shortest action, when there is room
_TERMINAL_UPDATE = "#f4f4f4"
_BEFORE_OLD = 0.2  # of a picture that begins late, the share before its first old action


def terminal(
    timelines: Mapping[str, Timeline], width: int, colours: bool = True, unit: str = "units"
) -> RenderableType:
    """The picture in `width` columns; all timelines share one scale, and `unit` names what their times are in."""
    names = max(len(_rank_name(t, len(t.ranks) - 1)) for t in timelines.values())
    columns = max(10, width - names - 2)
    step, shown = _scale(timelines, columns)
    first = _first_shown(timelines, shown)
    lines: list[Text] = []
    for title, timeline in timelines.items():
        lines.append(Text(title, style="bold"))
        for rank in range(len(timeline.ranks)):
            line = Text.assemble((f"{_rank_name(timeline, rank):>{names}}  ", "dim"))
            line.append_text(_row(timeline, rank, first, step, columns, colours))
            lines.append(line)
        end = timeline.makespan
        note = f"{seconds(end)} {unit} in all"
        if first:
            note = f"from {seconds(first)} to {seconds(min(end, first + shown))} of {note}"
        elif end > shown * (1 + 1e-9):
            note = f"the first {seconds(shown)} of {note}"
        lines.append(Text(f"{'':>{names}}  {note}", style="dim"))
    lines.append(_legend(timelines, colours))
    return Group(*lines)


def _rank_name(timeline: Timeline, rank: int) -> str:
    return f"{'rank' if is_chunked(timeline) else 'stage'} {rank}"


def _scale(timelines: Mapping[str, Timeline], columns: int) -> tuple[float, float]:
    """Time per column, and the time the picture ends.

    The shortest action gets a whole number of columns, one at least: an action that is not drawn would make the order
    look wrong. If then not everything fits, the picture ends early and says so.
    """
    lengths = [
        span.end - span.start
        for timeline in timelines.values()
        for span in timeline.spans
        if span.action.kind is not Kind.UPDATE and span.end > span.start
    ]
    longest = max(timeline.makespan for timeline in timelines.values())
    if not lengths or not longest:
        return 1.0, longest
    unit = min(lengths)
    per_unit = min(_WIDEST_UNIT, int(columns * unit / longest * (1 + 1e-9)))
    if per_unit >= 1:
        return unit / per_unit, longest
    return unit, columns * unit


def _first_shown(timelines: Mapping[str, Timeline], shown: float) -> float:
    """Where the picture begins: with the first action, or later if it would end before anything old is seen."""
    old = [
        span.start - timeline.begin
        for timeline in timelines.values()
        if has_parts(timeline)
        for span in timeline.spans
        if is_old(span.action)
    ]
    latest = max(timeline.makespan for timeline in timelines.values()) - shown
    if not old or min(old) <= (1 - _BEFORE_OLD) * shown or latest <= 0:
        return 0.0
    return min(min(old) - _BEFORE_OLD * shown, latest)


def _row(timeline: Timeline, rank: int, first: float, step: float, columns: int, colours: bool) -> Text:
    begin = timeline.begin + first
    last = max(0, min(columns, round((timeline.makespan - first) / step)))
    row = Text()
    column, parts = 0, has_parts(timeline)
    spans = zip(timeline.ranks[rank], timeline.starts[rank], timeline.ends[rank], strict=True)
    for action, start, end in spans:
        left, right = round((start - begin) / step), min(round((end - begin) / step), last)
        if right <= max(left, column):
            continue
        row.append(_idle(left - column), style="dim")
        row.append(*_cell(action, right - max(left, column), colours, parts and is_old(action)))
        column = right
    row.append(_idle(last - column), style="dim")
    return row


def _idle(columns: int) -> str:
    return "·" * max(columns, 0)


def _cell(action: Action, columns: int, colours: bool, old: bool = False) -> tuple[str, str]:
    if not colours:
        letter = action.kind.value.lower() if old else action.kind.value
        text = letter + ("" if action.microbatch is None else str(action.microbatch))
        return (text if len(text) <= columns else text[:1]).ljust(columns, "-"), ""
    text = label(action)
    text = text if len(text) <= columns else text[-1:] if columns == 1 else ""
    if action.kind is Kind.UPDATE:
        return text.center(columns), f"bold black on {_TERMINAL_UPDATE}"
    return text.center(columns), f"{ink(action, old)} on {colour(action, old)}"


def _legend(timelines: Mapping[str, Timeline], colours: bool) -> Text:
    legend = Text()
    for kind in kinds_in(timelines):
        example = Action(kind, 0, None if kind is Kind.UPDATE else 0, 0)
        legend.append(*_cell(example, 2, colours))
        legend.append(f" {WORDS[kind]}   ")
    legend.append("··", style="dim")
    legend.append(" idle   ")
    if any(has_parts(timeline) for timeline in timelines.values()):
        legend.append("Lighter: reads old weights. " if colours else "Small letters: reads old weights. ")
    legend.append(
        "Numbers are microbatches, left out where they do not fit; "
        + ("the hue changes with the group." if colours else "- is the rest of an action's time."),
        style="dim",
    )
    return legend
