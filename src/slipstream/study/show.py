"""What a person sees while a study runs: a bar per run under way on a terminal, one line per ended run elsewhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from slipstream.metrics.events import Follower
from slipstream.metrics.progress import duration
from slipstream.study.pool import Worker
from slipstream.study.results import Result
from slipstream.study.sweep import Expansion, Point


class Show:
    def __init__(self, out: Path, console: Console | None = None) -> None:
        self._out = out
        self._console = console or Console(highlight=False)
        self._bars: Progress | None = None
        self._tasks: dict[str, tuple[TaskID, Follower]] = {}
        self._eta, self._count, self._total = "", 0, 0
        self._notes: set[str] = set()

    def __enter__(self) -> Show:
        if self._console.is_terminal:
            self._bars = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn("{task.completed:.0f}/{task.total:.0f} {task.fields[line]}"),
                TimeElapsedColumn(),
                console=self._console,
            )
            self._whole = self._bars.add_task("[bold]runs", total=0, line="")
            self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bars is not None:
            self._bars.stop()

    def state(
        self,
        expansion: Expansion,
        results: Mapping[str, Result],
        active: Sequence[Worker],
        left_seconds: float | None,
    ) -> None:
        """Once a second: the whole, and the step of each run under way."""
        for note in expansion.notes:
            if note not in self._notes:
                self._notes.add(note)
                self.note(note)
        self._count = sum(1 for point in expansion.points if point.digest in results)
        self._total = len(expansion.points) + expansion.waiting
        more = "+" if expansion.waiting else ""
        self._eta = "" if left_seconds is None else f"eta {duration(left_seconds)}{more}"
        if self._bars is None:
            return
        self._bars.update(self._whole, completed=self._count, total=self._total, line=self._eta)
        for worker in active:
            assert worker.point is not None
            task, follower = self._tasks[worker.point.digest]
            for event in follower.poll():
                if event["event"] == "step":
                    loss = event.get("loss")
                    line = "not finite" if loss is None else f"loss {loss:.3f}"
                    self._bars.update(task, completed=event["step"], line=line)

    def started(self, point: Point) -> None:
        if self._bars is None:
            return
        task = self._bars.add_task(escape(point.name), total=point.config.train.steps, line="")
        self._tasks[point.digest] = (task, Follower(self._out / point.folder))

    def ended(self, point: Point, result: Result, seconds: float) -> None:
        self._count += 1
        if self._bars is not None:
            self._bars.remove_task(self._tasks.pop(point.digest)[0])
        if result.failed:
            told = f"[bold red]failed[/]: {escape(result.failed.splitlines()[0])}"
        else:
            speed = "" if result.tokens_per_second is None else f"  {result.tokens_per_second:,.0f} tok/s"
            told = f"loss {result.loss:.4f}{speed}"
        self.note(
            f"{self._count}/{self._total}  {escape(point.name)}  {told}  {seconds:.1f} s  {self._eta}",
            markup=True,
        )

    def elsewhere(self, point: Point) -> None:
        if self._bars is not None:
            self._bars.remove_task(self._tasks.pop(point.digest)[0])
        self.note(f"{point.name}  left to the process that is running it in this folder")

    def note(self, text: str, *, markup: bool = False) -> None:
        self._console.print(text if markup else escape(text), soft_wrap=True)
