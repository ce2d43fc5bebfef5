"""What a person sees while a run trains: a bar that stays in place on a terminal, a line every few seconds elsewhere.

Output that nobody reads any more (`| head -2`) is no reason to stop a training: a closed pipe is let go.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, TextIO, cast

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn

LINE_SECONDS = 5.0  # between two lines where output is no terminal
LEAST_BAR = 8  # columns


class Unbroken(io.TextIOBase):
    """A stream that may lose its reader. From then on what is written goes nowhere."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def write(self, text: str) -> int:
        return self._try(lambda: self._file.write(text)) or len(text)

    def flush(self) -> None:
        self._try(self._file.flush)

    def isatty(self) -> bool:
        return self._file.isatty()

    def fileno(self) -> int:
        return self._file.fileno()

    @property
    def encoding(self) -> str:  # pyrefly: ignore[bad-override]
        return self._file.encoding

    def _try(self, action: Callable[[], Any]) -> Any:
        try:
            return action()
        except BrokenPipeError:
            discard(self._file)


def discard(file: TextIO) -> None:
    """Point a stream at nothing, so that what is still in its buffer cannot fail at the end of the process."""
    with contextlib.suppress(OSError, ValueError), open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), file.fileno())


def unbroken_console() -> Console:
    return Console(file=cast("TextIO", Unbroken(sys.stdout)), highlight=False)


class Show:
    """Prints step events. The training loss is that of the weights a group read; validation is at the newest.

    `every`: steps between lines, None: a line every few seconds. `quiet`: only what has a style, such as warnings.
    """

    def __init__(
        self, total: int, every: int | None = None, console: Console | None = None, *, quiet: bool = False
    ) -> None:
        self._total, self._every, self._quiet = total, every, quiet
        self._console = console or unbroken_console()
        self._bar: Progress | None = None
        self._printed = -math.inf

    def __enter__(self) -> Show:
        if self._console.is_terminal and not self._quiet:
            self._bar = Progress(
                TextColumn("[bold]{task.completed:.0f}/{task.total:.0f}"),
                BarColumn(bar_width=None),
                TextColumn("{task.fields[line]}", markup=False),
                console=self._console,
                expand=True,
            )
            self._task = self._bar.add_task("train", total=self._total, line="starting")
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def step(self, event: dict[str, Any], eta_seconds: float) -> None:
        """One step event, drawn or printed."""
        if self._bar is not None:
            room = self._console.width - LEAST_BAR - 2 * len(str(self._total)) - 3
            self._bar.update(self._task, completed=event["step"], line=short_line(event, eta_seconds, room))
        elif not self._quiet and self._due(event["step"]):
            # Not through the console, whose layout of a line takes longer than all the rest of a report.
            line = f"step {event['step']}/{self._total}  {step_line(event)}  eta {duration(eta_seconds)}"
            print(line, file=self._console.file, flush=True)

    def note(self, text: str, style: str = "") -> None:
        """A line of its own, above the bar if there is one."""
        if self._quiet and not style:
            return
        text = escape(text)
        self._console.print(f"[{style}]{text}[/]" if style else text, soft_wrap=True)

    def _due(self, step: int) -> bool:
        now = time.monotonic()
        due = step % self._every == 0 if self._every else now - self._printed >= LINE_SECONDS
        if due or step == self._total:
            self._printed = now
            return True
        return False


def step_line(event: dict[str, Any]) -> str:
    """loss, learning rate, gradient norm, speed, utilisation, memory of one step event."""
    parts = _parts(event)
    order = ("loss", "lr", "norm", "speed", "busy", "mfu", "memory")
    return "  ".join(parts[name] for name in order if name in parts)


def short_line(event: dict[str, Any], eta_seconds: float, room: int) -> str:
    """As much of it as fits, what matters most first."""
    parts = _parts(event)
    line = f"{parts['loss']}  eta {duration(eta_seconds)}"
    for name in ("speed", "norm", "busy", "lr", "mfu", "memory"):
        if name in parts and len(line) + 2 + len(parts[name]) <= room:
            line += f"  {parts[name]}"
    return line


def _parts(event: dict[str, Any]) -> dict[str, str]:
    parts = {"loss": f"loss {number(event['loss'])}", "lr": f"lr {event['lr']:.3g}"}
    parts["norm"] = "skipped: not finite" if event["skipped"] else f"norm {number(event['grad_norm'], 3)}"
    if event["tokens_per_second"] is not None:
        parts["speed"] = f"{event['tokens_per_second']:,.0f} tok/s"
    if event["busy"]:
        parts["busy"] = "busy " + "/".join(f"{share:.0%}" for share in event["busy"])
    if event["mfu"] is not None:
        parts["mfu"] = f"mfu {event['mfu']:.1%}"
    if event["memory_bytes"]:
        parts["memory"] = f"mem {max(event['memory_bytes']) / 2**30:.2f} GiB"
    return parts


def number(value: float | None, digits: int = 4) -> str:
    return "not finite" if value is None or not math.isfinite(value) else f"{value:.{digits}f}"


def duration(seconds: float) -> str:
    """93 -> 1:33, 4000 -> 1:06:40"""
    whole = round(seconds)
    hours, rest = divmod(whole, 3600)
    minutes, seconds = divmod(rest, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
