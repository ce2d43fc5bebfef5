"""The colours of a timeline. The hue tells the group, the shade the kind of action; what reads old weights, in a
timeline whose groups have an old part and a fresh one, is lighter."""

from __future__ import annotations

from collections.abc import Mapping

from slipstream.schedule.actions import Action, Kind
from slipstream.schedule.timeline import Timeline

HUES = ("blue", "amber", "green", "violet")  # groups take them in turn
_SHADES = {  # forward, input half, whole backward, weight half
    "blue": ("#9ccbff", "#559fe8", "#2f7fd1", "#1b4c86"),
    "amber": ("#ffd88a", "#f0ae3c", "#e0951a", "#955f06"),
    "green": ("#9be3b9", "#52bf88", "#2fa36b", "#155f3a"),
    "violet": ("#d9bfff", "#a880e8", "#8a5bd6", "#54318f"),
}
UPDATE = "#20242b"
IDLE = "#eef0f3"
WORDS = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.BACKWARD_INPUT: "backward, input half",
    Kind.BACKWARD_WEIGHT: "backward, weight half",
    Kind.UPDATE: "update",
}
_SHADE_OF = {Kind.FORWARD: 0, Kind.BACKWARD_INPUT: 1, Kind.BACKWARD: 2, Kind.BACKWARD_WEIGHT: 3}


def colour(action: Action, old: bool = False) -> str:
    """The fill of an action; odd microbatches are a touch darker, so that neighbours stay apart."""
    if action.kind is Kind.UPDATE:
        return UPDATE
    fill = _SHADES[HUES[action.group % len(HUES)]][_SHADE_OF[action.kind]]
    fill = _lighter(fill) if old else fill
    return _darker(fill) if (action.microbatch or 0) % 2 else fill


def ink(action: Action, old: bool = False) -> str:
    """The colour of text on an action's fill."""
    return "#10141a" if action.kind is Kind.FORWARD or old else "#ffffff"


def is_old(action: Action) -> bool:
    """Whether it reads weights that an update of its group's predecessor has yet to change."""
    return action.kind is not Kind.UPDATE and action.version is not None and action.version < action.group


def has_parts(timeline: Timeline) -> bool:
    """Whether groups have an old part and a fresh one: a cutover between none and all."""
    found: dict[int, set[bool]] = {}
    for row in timeline.ranks:
        for action in row:
            if action.kind is Kind.UPDATE:
                continue
            late = action.group - (action.group if action.version is None else action.version)
            if not 0 <= late <= 1:
                return False  # of another kind: versions there do not count groups
            found.setdefault(action.group, set()).add(late == 1)
    return any(len(parts) == 2 for parts in found.values())


def label(action: Action) -> str:
    """The few characters that fit on an action."""
    return "U" if action.microbatch is None else str(action.microbatch)


def describe(action: Action, chunked: bool) -> str:
    """An action in words, for tooltips."""
    parts = [WORDS[action.kind]]
    if action.microbatch is not None:
        parts.append(f"microbatch {action.microbatch}")
    parts.append(f"group {action.group}")
    if chunked:
        parts.append(f"stage {action.stage}")
    if action.version is not None:
        parts.append(f"{'makes' if action.kind is Kind.UPDATE else 'reads'} weights {action.version}")
    return " · ".join(parts)


def is_chunked(timeline: Timeline) -> bool:
    """Whether a rank holds more than one stage, so that its number does not tell the stage."""
    return any(action.stage != rank for rank, row in enumerate(timeline.ranks) for action in row)


def seconds(value: float) -> str:
    """A time in few digits."""
    return f"{value:.4g}"


def kinds_in(timelines: Mapping[str, Timeline]) -> list[Kind]:
    """The kinds of action that take time in any of the timelines, in the order of the legend."""
    present = {
        span.action.kind
        for timeline in timelines.values()
        for span in timeline.spans
        if span.end > span.start
    }
    return [kind for kind in Kind if kind in present]


def _lighter(fill: str, by: float = 0.6) -> str:
    return "#" + "".join(f"{round(255 - (255 - int(fill[i : i + 2], 16)) * (1 - by)):02x}" for i in (1, 3, 5))


def _darker(fill: str, by: float = 0.9) -> str:
    return "#" + "".join(f"{int(int(fill[i : i + 2], 16) * by):02x}" for i in (1, 3, 5))
