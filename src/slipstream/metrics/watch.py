"""A live terminal view of a run: reads events.jsonl as it grows and redraws; works on a finished run too.

Nothing here talks to the running job: the run folder is the only channel, so it can be watched from any
machine that sees the folder, and stopping the view never touches the run.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from slipstream.errors import UserError
from slipstream.formats import si
from slipstream.metrics.events import Event, Follower, Run, number, read_run, values
from slipstream.metrics.report_columns import duration, shape

BLOCKS = " ▁▂▃▄▅▆▇█"
STATUS_STYLE = {"finished": "green", "failed": "red", "running": "cyan", "empty": "dim"}
LONGEST_INTERVAL = 3600  # seconds
QUIET_SECONDS = 120.0  # a running job that has written nothing for this long is probably dead


def watch(folder: str | Path, console: Console, *, once: bool = False, interval: float = 1.0) -> None:
    """Show the run until it ends (or for one frame); Ctrl-C leaves the run alone."""
    if not 0 < interval <= LONGEST_INTERVAL:
        raise UserError(f"--interval {interval:g} must be above 0 and at most {LONGEST_INTERVAL} seconds.")
    run = read_run(folder)
    planned = run.settings.get("train.steps")
    total = planned if isinstance(planned, int) and planned > 0 else None
    if once:
        console.print(frame(run, total, console.width, time.time()))
        return
    follower = Follower(run.path)
    try:
        with Live(console=console, refresh_per_second=4, screen=False) as live:
            while True:
                follower.poll()
                run = Run(run.path, tuple(follower.events), config=run.config, environment=run.environment)
                live.update(frame(run, total, console.width, time.time()))
                if run.status in ("finished", "failed"):
                    return
                time.sleep(interval)
    except KeyboardInterrupt:
        return


def frame(run: Run, total: int | None, width: int, now: float) -> RenderableType:
    """One picture of the run as it stands at `now`."""
    steps, validation, start = run.surviving("step"), run.surviving("validation"), run.last("start")
    status = run.status
    head = Text.assemble((f" {status} ", f"bold reverse {STATUS_STYLE[status]}"), "  ", _shape(start))
    if not steps:
        return Panel(
            Group(head, Text("No step has been recorded yet.", "dim")),
            title=Text(printable(run.name)),
            title_align="left",
        )
    last = steps[-1]
    quiet = now - (number(last.get("time")) or now)
    rows: list[RenderableType] = [head, _progress(run, steps, total, width - 4), Text()]
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim")
    table.add_column(justify="right")
    table.add_column(no_wrap=True)
    chart = max(10, width - 40)
    for label, key, show in CURVES:
        if figures := values(steps, key):
            table.add_row(label, show(figures[-1]), Text(sparkline(figures, chart), "cyan"))
    if losses := values(validation, "loss"):
        table.add_row("validation", f"{losses[-1]:.4f}", Text(sparkline(losses, chart), "magenta"))
    rows.append(table)
    if stages := _stages(last):
        rows += [Text(), stages]
    skipped = sum(1 for row in steps if row.get("skipped"))
    if skipped:
        rows.append(Text(f"{skipped} groups skipped (non-finite gradient)", "yellow"))
    if status == "running" and quiet > QUIET_SECONDS:
        rows.append(Text(f"Nothing written for {duration(quiet)}: the job may have been killed.", "yellow"))
    for event in [event for event in run.events if event["event"] in ("warning", "error")][-3:]:
        style = "red" if event["event"] == "error" else "yellow"
        rows.append(Text(printable(f"step {event.get('step', '?')}: {event.get('message', '')}"), style))
    sample = run.last("sample")
    if sample:
        text = f"{sample.get('prompt', '')}▸{sample.get('text', '')}"
        rows += [Text(), Text(printable(text)[: 3 * width], "italic")]
    return Panel(Group(*rows), title=Text(printable(run.name)), title_align="left")


CURVES: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("loss", "loss", lambda value: f"{value:.4f}"),
    ("gradient norm", "grad_norm", lambda value: f"{value:.3g}"),
    ("learning rate", "lr", lambda value: f"{value:.2e}"),
    ("tokens / s", "tokens_per_second", si),
    ("MFU", "mfu", lambda value: f"{value:.1%}"),
)


def printable(text: str) -> str:
    """Model output and messages may hold terminal escape sequences: show them, never send them."""
    return "".join(letter if letter.isprintable() or letter == "\n" else "·" for letter in text)


def sparkline(values: list[float], width: int) -> str:
    """Bucket means as block characters, lowest to highest."""
    count = min(width, len(values))
    means = [
        statistics.fmean(values[index * len(values) // count : (index + 1) * len(values) // count])
        for index in range(count)
    ]
    low, high = min(means), max(means)
    scale = (len(BLOCKS) - 2) / (high - low) if high > low else 0.0
    return "".join(BLOCKS[1 + round((mean - low) * scale)] for mean in means)


def _shape(start: Event) -> str:
    if not start:
        return ""
    rest = f"{start.get('microbatches', '?')} microbatches, {si(number(start.get('parameters')))} parameters"
    return f"{shape(start)}, {rest}"


def _progress(run: Run, steps: list[Event], total: int | None, width: int) -> Text:
    step, clock = steps[-1]["step"], run.clock()
    elapsed = clock.get(id(steps[-1]))
    if not total:
        return Text(f"step {step}, {duration(elapsed)}")
    recent = steps[-50:]
    first, last = (clock.get(id(row)) for row in (recent[0], recent[-1]))
    left = None
    if first is not None and last is not None and len(recent) > 1:
        left = (last - first) / (recent[-1]["step"] - recent[0]["step"]) * max(0, total - step)
    note = f" step {step} / {total}  {duration(elapsed)} so far, {duration(left)} left"
    room = max(8, width - len(note))
    done = min(room, round(room * step / total))
    return Text.assemble(("█" * done, "green"), ("░" * (room - done), "dim"), note)


def _stages(last: Event) -> Table | None:
    busy, memory = last.get("busy"), last.get("memory_bytes")
    if not isinstance(busy, list) or not busy:
        return None
    table = Table.grid(padding=(0, 2))
    for stage, share in enumerate(busy[:16]):
        value = number(share)
        held = number(memory[stage]) if isinstance(memory, list) and stage < len(memory) else None
        bar = "" if value is None else "█" * round(20 * min(max(value, 0.0), 1.0))
        size = "" if held is None else f"{held / 2**20:,.0f} MiB"
        table.add_row(
            Text(f"stage {stage}", "dim"),
            Text(f"{bar:<20}", "blue"),
            "–" if value is None else f"{value:.1%} busy",
            size,
        )
    if len(busy) > 16:
        table.add_row(Text(f"… {len(busy) - 16} more stages", "dim"), "", "", "")
    return table
