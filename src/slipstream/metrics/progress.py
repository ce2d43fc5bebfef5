"""What a person sees while a run trains: a progress bar on a terminal, one plain line per step elsewhere."""

from __future__ import annotations

import math
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn


class Show:
    """Prints step events. The training loss is the one at the bank; validation is at the master."""

    def __init__(self, total: int, every: int = 1, console: Console | None = None) -> None:
        self._total, self._every = total, every
        self._console = console or Console(highlight=False)
        self._bar: Progress | None = None

    def __enter__(self) -> Show:
        if self._console.is_terminal:
            self._bar = Progress(
                TextColumn("[bold]{task.completed:.0f}/{task.total:.0f}"),
                BarColumn(bar_width=None),
                TextColumn("{task.fields[line]}"),
                TimeElapsedColumn(),
                console=self._console,
            )
            self._task = self._bar.add_task("train", total=self._total, line="")
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def step(self, event: dict[str, Any], eta_seconds: float) -> None:
        """One step event, drawn or printed."""
        line = f"{step_line(event)}  eta {duration(eta_seconds)}"
        if self._bar is not None:
            self._bar.update(self._task, completed=event["step"], line=line)
        elif event["step"] % self._every == 0 or event["step"] == self._total:
            # Not through the console, whose layout of a line takes longer than all the rest of a report.
            print(f"step {event['step']}/{self._total}  {line}", file=self._console.file, flush=True)

    def note(self, text: str, style: str = "") -> None:
        """A line of its own, above the bar if there is one."""
        text = escape(text)
        self._console.print(f"[{style}]{text}[/]" if style else text, soft_wrap=True)


def step_line(event: dict[str, Any]) -> str:
    """loss, learning rate, gradient norm, speed, utilisation, memory of one step event."""
    parts = [f"loss(bank) {number(event['loss'])}", f"lr {event['lr']:.3g}"]
    parts.append("skipped: not finite" if event["skipped"] else f"norm {number(event['grad_norm'], 3)}")
    parts.append(f"{event['tokens_per_second']:,.0f} tok/s")
    if event["busy"]:
        parts.append("busy " + "/".join(f"{share:.0%}" for share in event["busy"]))
    if event["mfu"] is not None:
        parts.append(f"mfu {event['mfu']:.1%}")
    if event["memory_bytes"]:
        parts.append(f"mem {max(event['memory_bytes']) / 2**30:.2f} GiB")
    return "  ".join(parts)


def number(value: float | None, digits: int = 4) -> str:
    return "not finite" if value is None or not math.isfinite(value) else f"{value:.{digits}f}"


def duration(seconds: float) -> str:
    """93 -> 1:33, 4000 -> 1:06:40"""
    whole = round(seconds)
    hours, rest = divmod(whole, 3600)
    minutes, seconds = divmod(rest, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
