"""Reading a run folder: the one reader of events.jsonl that the report, the live view and the study share.

A run folder may be empty, still being written, crashed in the middle of a line, or resumed several times.
The reader never raises on the contents of a line: what cannot be read is counted. The invariant:
`Run.series` holds at most one row per step, the row that the surviving trajectory produced. A resumed run
replays steps after its checkpoint, so a `start` event at step N makes earlier rows with a step beyond N
history that did not happen.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from slipstream.errors import UserError
from slipstream.formats import parse_json, parse_toml

EVENTS_FILE = "events.jsonl"
Event = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """A run folder as it is on disk now."""

    path: Path
    events: tuple[Event, ...]
    unreadable: int = 0  # lines that are no JSON object: usually one, cut off by a crash
    config: str = ""  # config.toml as written
    environment: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.path.resolve().name

    @cached_property
    def settings(self) -> dict[str, Any]:
        """What config.toml says, by dotted keys; nothing where it cannot be read."""
        try:
            tree = parse_toml(self.config)
        except ValueError:
            return {}
        sections = ((section, values) for section, values in tree.items() if isinstance(values, dict))
        return {f"{section}.{name}": value for section, values in sections for name, value in values.items()}

    @property
    def status(self) -> str:
        """'empty', 'running' (or killed without a word), 'failed' or 'finished', by the last word written."""
        for event in reversed(self.events):
            if event["event"] == "finish":
                return "finished"
            if event["event"] == "error":
                return "failed"
            if event["event"] in ("step", "start"):
                return "running"
        return "empty"

    def of(self, kind: str) -> list[Event]:
        """All events of a kind, in the order written, superseded ones included."""
        return [event for event in self.events if event["event"] == kind]

    def last(self, kind: str) -> Event:
        """The newest event of a kind, or an empty one."""
        return next((event for event in reversed(self.events) if event["event"] == kind), {})

    def before(self, event: Event, kind: str) -> Event:
        """The newest event of a kind that was written before `event`, or an empty one."""
        found: Event = {}
        for other in self.events:
            if other is event:
                break
            if other["event"] == kind:
                found = other
        return found

    def surviving(self, kind: str) -> list[Event]:
        """The events of a kind that belong to the trajectory as it stands, one per step, in step order."""
        by_step: dict[int, Event] = {}
        for event in self.events:
            step = event.get("step")
            if not isinstance(step, int):
                continue
            if event["event"] == "start":
                by_step = {known: row for known, row in by_step.items() if known <= step}
            elif event["event"] == kind:
                by_step[step] = event
        return [by_step[step] for step in sorted(by_step)]

    def clock(self) -> dict[int, float]:
        """id(event) -> the seconds the run had been at work by then: what passed between the end of one start's
        events and the next start does not count, unless that only cut the updates otherwise. Events without a time are
        left out."""
        passed: dict[int, float] = {}
        before = seconds = began = 0.0
        for event in self.events:
            at = number(event.get("time"))
            if at is None:
                continue
            if (event["event"] == "start" and not event.get("recut")) or not passed:
                before, began = seconds, at
            passed[id(event)] = before + at - began
            seconds = max(seconds, passed[id(event)])
        return passed

    def series(self, kind: str, y: str, x: str = "step") -> tuple[list[float], list[float]]:
        """Two parallel columns of the surviving events of a kind."""
        return columns(self.surviving(kind), y, lambda event: number(event.get(x)))


_NUMBERS = (int, float)  # a union takes three times as long to ask for, and an export has millions of figures


def number(value: object) -> float | None:
    """A finite number, or None: NaN, infinities, texts and lists are no points of a curve."""
    if isinstance(value, _NUMBERS) and not isinstance(value, bool) and abs(value) <= sys.float_info.max:
        return float(value)
    return None


def values(rows: Iterable[Event], key: str) -> list[float]:
    """The numbers under a key, row by row; a row without one is left out."""
    return [value for row in rows if (value := number(row.get(key))) is not None]


def columns(
    rows: Iterable[Event], y: str, x: Callable[[Event], float | None] = lambda row: row["step"]
) -> tuple[list[float], list[float]]:
    """Two parallel columns of rows; one lacking either number is left out."""
    found = [
        (at, value)
        for row in rows
        if (value := number(row.get(y))) is not None and (at := x(row)) is not None
    ]
    return [at for at, _ in found], [value for _, value in found]


def parse_lines(lines: Iterable[str]) -> tuple[list[Event], int]:
    """Events of JSONL text and the number of lines that could not be read."""
    events: list[Event] = []
    unreadable = 0
    for line in lines:
        if not line.strip():
            continue
        try:
            event = parse_json(line)
        except ValueError:
            event = None
        if isinstance(event, dict) and isinstance(event.get("event"), str):
            events.append(event)
        else:
            unreadable += 1
    return events, unreadable


def read_run(path: str | Path) -> Run:
    """Read a run folder (or the events.jsonl inside it). Only a path that is no run at all is an error."""
    folder = Path(path)
    if folder.name == EVENTS_FILE:
        folder = folder.parent
    if not folder.is_dir():
        raise UserError(
            f"There is no run folder at {folder}. Give the folder that `slipstream train` printed."
        )
    events_file, config_file = folder / EVENTS_FILE, folder / "config.toml"
    if not events_file.exists() and not config_file.exists():
        inside = sorted(child.parent.name for child in folder.glob(f"*/{EVENTS_FILE}"))
        hint = f" Did you mean one of the runs inside it: {', '.join(inside[:5])}?" if inside else ""
        raise UserError(
            f"{folder} is not a run folder: it holds neither {EVENTS_FILE} nor config.toml.{hint}"
        )
    events, unreadable = [], 0
    if events_file.exists():
        with events_file.open(encoding="utf-8", errors="replace") as stream:
            events, unreadable = parse_lines(stream)
    config = config_file.read_text(encoding="utf-8", errors="replace") if config_file.exists() else ""
    return Run(folder, tuple(events), unreadable, config, _environment(folder / "environment.json"))


def _environment(path: Path) -> dict[str, Any]:
    try:
        found = parse_json(path.read_text(encoding="utf-8", errors="replace"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


class Follower:
    """Reads what was appended to events.jsonl since the last call; half-written lines wait for their end.

    A run that goes back to a checkpoint puts a shorter file in its place: that one is read from its beginning, and
    `events` holds what it says.
    """

    def __init__(self, folder: str | Path) -> None:
        self.path = Path(folder) / EVENTS_FILE
        self.events: list[Event] = []
        self._file = 0
        self._offset = 0
        self._tail = b""

    def poll(self) -> list[Event]:
        try:
            with self.path.open("rb") as stream:
                found = os.fstat(stream.fileno())
                if found.st_ino != self._file or found.st_size < self._offset:
                    self.events.clear()
                    self._file, self._offset, self._tail = found.st_ino, 0, b""
                stream.seek(self._offset)
                fresh = stream.read()
        except FileNotFoundError:
            return []
        self._offset += len(fresh)
        *lines, self._tail = (self._tail + fresh).split(b"\n")
        events, _ = parse_lines(line.decode("utf-8", errors="replace") for line in lines)
        self.events.extend(events)
        return events
