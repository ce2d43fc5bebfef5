"""events.jsonl: everything a run says, one JSON object per line. Invariant: no step is written twice.

Lines are appended whole (`append.py`), so a kill can cut off at most the last one. On resume the file, and the ranks'
own logs, are cut back to the checkpoint (`cut_back`): lines of later steps describe a future that did not happen.
"""

from __future__ import annotations

import json
import math
import os
import re
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from slipstream.formats import parse_json
from slipstream.metrics.append import Appending
from slipstream.metrics.events import EVENTS_FILE, Event, number, parse_lines

RETRY_SECONDS = 0.2
_STEP_LINE = re.compile(r"step (\d+)  ")  # of a rank's log


class Tracker(Protocol):
    """Somewhere else to log to: TensorBoard, Weights & Biases."""

    def log(self, event: dict[str, Any]) -> None: ...

    def close(self) -> None: ...


class Recorder:
    """Appends events; safe to use from the checkpoint thread. A disk that is full for a moment holds nothing up."""

    def __init__(
        self, folder: Path, trackers: tuple[Tracker, ...] = (), patience_seconds: float = 0.0
    ) -> None:
        self._file = Appending(folder / EVENTS_FILE, patience_seconds)
        self._trackers = trackers
        self._changed = threading.Condition()
        self._step = 0  # the newest whose event is in the file
        self._told = 0  # the newest that was told

    def warn_through(self, warn: Callable[[str], None]) -> None:
        """How a person hears of trouble with the disk."""
        self._file.warn = warn

    def write(self, event: str, step: int, **values: Any) -> dict[str, Any]:
        line = {"event": event, "step": step, "time": round(time.time(), 3)} | values
        with self._changed:
            if event in ("step", "start"):
                self._told = max(self._told, step)
            self._file.write(json.dumps(_finite(line)) + "\n")
            self._advance()
        for tracker in self._trackers:
            tracker.log(line)
        return line

    def _advance(self) -> None:
        if self._file.written and self._step < self._told:
            self._step = self._told
            self._changed.notify_all()

    def wait_for(self, step: int, timeout: float) -> bool:
        """Wait until the events up to `step` are written; what a full disk held up is tried again meanwhile."""
        deadline = time.monotonic() + timeout
        with self._changed:
            while self._step < step and (left := deadline - time.monotonic()) > 0:
                self._changed.wait(min(left, RETRY_SECONDS))
                if not self._file.written:
                    self._file.flush()
                    self._advance()
            return self._step >= step

    def close(self) -> None:
        self._file.close()
        for tracker in self._trackers:
            tracker.close()


@dataclass(frozen=True)
class Cut:
    """What a fault took back: so many steps beyond the checkpoint, and when the run was last heard of."""

    steps: int
    until: float | None


def cut_back(folder: Path, step: int, again: Sequence[str] = ()) -> Cut:
    """Drop what the logs say of later steps than `step`, and a last line that a kill cut off.

    Of `step` itself what the kinds in `again` say is dropped too: it is about to be said once more.
    """
    cut = _cut_events(folder, step, again)
    for log in folder.glob("logs/rank-*.log"):
        _cut_log(log, step)
    return cut


def _cut_log(log: Path, step: int) -> None:
    """In place: a rank may have it open, for appending."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    steps = [_STEP_LINE.match(line) for line in lines]
    kept = [line for line, found in zip(lines, steps, strict=True) if found is None or int(found[1]) <= step]
    with log.open("r+", encoding="utf-8") as file:
        file.writelines(line for line in kept if line.endswith("\n"))
        file.truncate()


def _cut_events(folder: Path, step: int, again: Sequence[str]) -> Cut:
    """Atomic."""
    path = folder / EVENTS_FILE
    if not path.exists():
        return Cut(0, None)
    kept = []
    newest, until = step, None
    for line in _lines(folder):
        try:
            event = parse_json(line)
        except ValueError:
            continue
        if not isinstance(event, dict) or event.get("event") == "finish":
            continue
        at = event.get("step", 0)
        if not isinstance(at, int):
            continue
        until = number(event.get("time")) or until
        if event.get("event") == "step":
            newest = max(newest, at)
        if at < step or (at == step and event.get("event") not in again):
            kept.append(line + "\n")
    draft = path.with_suffix(".draft")
    with draft.open("w", encoding="utf-8") as file:
        file.writelines(kept)
        file.flush()
        os.fsync(file.fileno())
    draft.rename(path)
    return Cut(newest - step, until)


def finished_at(folder: Path) -> int | None:
    """The step at which the run in this folder ended, as its log says."""
    finished = events_of(folder, "finish")
    return finished[-1].get("step") if finished else None


def has_event(folder: Path, event: str, step: int) -> bool:
    """Whether such an event is on record (a kill may fall between a commit and its line)."""
    start = f'{{"event": "{event}", "step": {step},'
    return any(line.startswith(start) for line in _lines(folder))


def events_of(folder: Path, kind: str) -> list[Event]:
    """The events of one kind that are on record; what cannot be read is left out."""
    start = f'{{"event": "{kind}",'
    return parse_lines(line for line in _lines(folder) if line.startswith(start))[0]


def _lines(folder: Path) -> list[str]:
    path = folder / EVENTS_FILE
    return path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []


def _finite(value: Any) -> Any:
    """JSON has no NaN: a loss that is not finite is written as null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value
