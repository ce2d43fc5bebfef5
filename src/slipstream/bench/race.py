"""Time to loss: the same run under several schedules, one after the other, and who reached one loss first.

Only the schedule differs (and with it the delay and its correction, which only 2bw has). The clock is the wall clock of
training: start-up, compilation, validations and the time until a resumption are left out, alike for all. race.json and
race.html are written anew while a contender trains and after each; the same command goes on with an interrupted race.
"""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table as RichTable

from slipstream.bench.checks import make_room
from slipstream.errors import UserError
from slipstream.formats import si
from slipstream.metrics.events import EVENTS_FILE, Run, number, read_run
from slipstream.metrics.report import write_report
from slipstream.metrics.report_page import Chart, Section, Series, Table, Text

OURS = "2bw"
EVERY_SECONDS = 20.0  # between two writings of the page while a contender trains
STOP_SECONDS = 120.0  # for a contender to save and leave
STOPPED = (75, 130)  # exit codes of a run that was asked to stop (`cli/train.py`)
NO_DELAY = (  # an empty value is the default
    "optim.correction=none",
    "optim.correction_lambda=",
    "optim.sync_start=0",
    "optim.sync_finish=0",
    "pipeline.cutover=",
    "pipeline.fine_start=0",
    "pipeline.fine_microbatches=",
    "pipeline.in_flight=",
)


@dataclass(frozen=True)
class Point:
    """A validation: training seconds and tokens until it, and its loss."""

    seconds: float
    tokens: float
    loss: float


def race(
    arguments: Sequence[str],
    schedules: Sequence[str],
    out: Path,
    target: float | None = None,
    updates: int | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Run what is missing, compare, and write race.json and race.html into `out`. `updates`: ours, if not as many."""
    if len(set(schedules)) < 2:
        raise UserError("A race needs two schedules or more. Set --schedules to a list such as 2bw,1f1b.")
    if target is not None and not 0 < target < math.inf:
        raise UserError(f"--target {target:g} is no loss to reach. Set it above 0, or leave it out.")
    make_room(out / "race.json")
    for schedule in schedules:
        progress(f"training with {schedule}")
        given = arguments_of(arguments, schedule, out, updates)
        _train(given, schedule, out, lambda: write(schedules, out, target))
    compare({name: read_run(out / name) for name in schedules}, target)  # refuses too few validations
    result = write(schedules, out, target)
    assert result is not None
    return result


def write(schedules: Sequence[str], out: Path, target: float | None) -> dict[str, Any] | None:
    """race.json and race.html of what the contenders have done so far; None where that is too little to say."""
    runs = {name: read_run(out / name) for name in schedules if (out / name / EVENTS_FILE).exists()}
    runs = {name: run for name, run in runs.items() if len(curve(run)) > 1}
    if not runs:
        return None
    result = compare(runs, target)
    done = len(runs) == len(schedules) and all(run.status == "finished" for run in runs.values())
    result |= {"complete": done, "page": str(out / "race.html")}
    lead = Section("Time to loss", [*_verdict(result), _chart(runs, result)])
    write_report([run.path for run in runs.values()], out / "race.html", title="Race", lead=[lead])
    draft = out / ".race.json"
    draft.write_text(json.dumps(result, indent=2) + "\n")
    draft.rename(out / "race.json")
    return result


def arguments_of(arguments: Sequence[str], schedule: str, out: Path, updates: int | None = None) -> list[str]:
    """What `slipstream train` is called with for one contender."""
    own = [f"pipeline.schedule={schedule}", f"run.dir={out / schedule}"]
    if schedule != OURS:
        return [*arguments, *own, *NO_DELAY]
    return [*arguments, *own, *([] if updates is None else [f"train.steps={updates}"])]


def _train(arguments: Sequence[str], schedule: str, out: Path, refresh: Callable[[], object]) -> None:
    """Train one contender, or what is left of it, and look at it now and then."""
    command = [sys.executable, "-P", "-m", "slipstream", "train", *arguments]
    again = "Give the same command again to go on: what has been trained is kept."
    with _terminated_as_interrupted():
        # Its lines are notes: stdout is for the result, with --json for nothing else.
        child = subprocess.Popen(command, stdout=2)
        try:
            while child.poll() is None:
                try:
                    child.wait(EVERY_SECONDS)
                except subprocess.TimeoutExpired:
                    refresh()
        except KeyboardInterrupt:
            child.terminate()  # it saves and leaves; a second request within a second is the same one
            with suppress(subprocess.TimeoutExpired):
                child.wait(STOP_SECONDS)
        finally:
            if child.poll() is None:
                child.kill()
                child.wait()
    refresh()
    if child.returncode not in (0, *STOPPED):
        raise UserError(
            f"The run with {schedule} failed; its words are above, its logs in {out / schedule}. {again}"
        )
    if not (out / schedule / EVENTS_FILE).exists() or read_run(out / schedule).status != "finished":
        raise UserError(f"The race was interrupted while {schedule} trained. {again}")


@contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """SIGTERM as KeyboardInterrupt, so that the contender is asked to stop too."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def compare(runs: dict[str, Run], target: float | None) -> dict[str, Any]:
    """Laps by schedule, the target, and ours against the best of the others."""
    curves = {schedule: curve(run) for schedule, run in runs.items()}
    for schedule, points in curves.items():
        if len(points) < 2:
            raise UserError(
                f"{runs[schedule].path} holds {len(points)} validations: too few to see when a loss was reached. "
                "Set train.eval_every to a smaller number."
            )
    if target is None:
        target = max(points[-1].loss for points in curves.values())
    reached = {schedule: reach(points, target) for schedule, points in curves.items()}
    laps = {
        schedule: _lap(run, schedule, curves[schedule], reached[schedule]) for schedule, run in runs.items()
    }
    result: dict[str, Any] = {"target_loss": target, "laps": list(laps.values())}
    others = {schedule: at for schedule, at in reached.items() if at is not None and schedule != OURS}
    if (ours := reached.get(OURS)) is not None and others:
        best = min(others, key=lambda schedule: others[schedule].seconds)
        theirs = others[best]
        if min(ours.seconds, theirs.seconds) <= 0:  # there before the clock started: no time to compare
            return result
        result |= {
            "best_sync": best,
            "speedup_in_tokens_per_second": (ours.tokens / ours.seconds) / (theirs.tokens / theirs.seconds),
            "token_penalty": ours.tokens / theirs.tokens,
            "speedup_in_time_to_target": theirs.seconds / ours.seconds,
        }
    return result


def curve(run: Run) -> list[Point]:
    """The validations, by training time. A step across a resumption counts as long as a typical one."""
    rows = [(row["step"], at) for row in run.surviving("step") if (at := number(row.get("time"))) is not None]
    validations = run.surviving("validation")
    starts = [event for event in run.of("start") if not event.get("recut")]
    resumed = [at for event in starts if (at := number(event.get("time"))) is not None]
    validated = {row["step"]: number(row.get("time")) for row in validations}
    gaps: list[float | None] = []
    for (step, before), (_, after) in pairwise(rows):
        across = any(before < at <= after for at in resumed)
        gaps.append(None if across else after - max(before, validated.get(step) or before))
    known = [gap for gap in gaps if gap is not None]
    typical = median(known) if known else 0.0
    clock = {rows[0][0]: 0.0} if rows else {}
    for (last, _), (step, _), gap in zip(rows, rows[1:], gaps, strict=False):
        clock[step] = clock[last] + (typical if gap is None else gap)
    points = []
    for row in validations:
        loss, tokens = number(row.get("loss")), number(row.get("tokens"))
        if loss is not None and tokens is not None and row["step"] in clock:
            points.append(Point(clock[row["step"]], tokens, loss))
    return points


def _lap(run: Run, schedule: str, points: Sequence[Point], reached: Point | None) -> dict[str, Any]:
    """What one contender did. Seconds and tokens to the target are None where it was not reached."""
    first, last = points[0], points[-1]
    return {
        "schedule": schedule,
        "finished": run.status == "finished",
        "tokens_per_second": (last.tokens - first.tokens) / (last.seconds - first.seconds),
        "best_loss": min(point.loss for point in points),
        "final_loss": last.loss,
        "seconds": last.seconds,  # of training, to the end of the run
        "tokens": last.tokens,
        "seconds_to_target": reached.seconds if reached else None,
        "tokens_to_target": reached.tokens if reached else None,
    }


def reach(points: Sequence[Point], target: float) -> Point | None:
    """Where the curve first comes down to the target, between validations in a straight line."""
    before: Point | None = None
    for point in points:
        if point.loss <= target:
            if before is None:
                return point
            share = (before.loss - target) / (before.loss - point.loss)
            seconds = before.seconds + share * (point.seconds - before.seconds)
            return Point(seconds, before.tokens + share * (point.tokens - before.tokens), target)
        before = point
    return None


def _table(result: dict[str, Any]) -> Table:
    rows = []
    for lap in result["laps"]:
        reached = lap["seconds_to_target"] is not None
        rows.append(
            [
                lap["schedule"] if lap["finished"] else f"{lap['schedule']} (not finished)",
                f"{lap['seconds_to_target']:.1f}" if reached else "not reached",
                si(lap["tokens_to_target"]) if reached else "",
                f"{lap['tokens_per_second']:,.0f}",
                f"{lap['final_loss']:.4f}",
            ]
        )
    return Table(
        ("schedule", "seconds", "tokens", "tokens / s", "final loss"),
        rows,
        title=f"Time to a validation loss of {result['target_loss']:.4f}",
        note="Seconds of training, without start-up and validations. Tokens / s: after the first validation.",
    )


def _sentence(result: dict[str, Any]) -> str:
    """Ours against the best of the others, where both reached the target."""
    if "best_sync" not in result:
        return ""
    return (
        f"2bw reaches it {result['speedup_in_time_to_target']:.2f} times as fast as {result['best_sync']}: "
        f"{result['speedup_in_tokens_per_second']:.2f} times the tokens per second until there, "
        f"{result['token_penalty']:.3f} times the tokens."
    )


def _verdict(result: dict[str, Any]) -> list[Table | Text]:
    over = (
        []
        if result["complete"]
        else [Text("The race is not over: these are the figures so far.", tone="warning")]
    )
    return [*over, _table(result), *(Text(said) for said in (_sentence(result),) if said)]


def _chart(runs: dict[str, Run], result: dict[str, Any]) -> Chart:
    curves = {schedule: curve(run) for schedule, run in runs.items()}
    series = [
        Series(schedule, [p.seconds for p in points], [p.loss for p in points], colour=index)
        for index, (schedule, points) in enumerate(curves.items())
    ]
    longest = max(points[-1].seconds for points in curves.values())
    level = result["target_loss"]
    series.append(Series("target", [0.0, longest], [level, level], dashed=True, colour=len(series)))
    return Chart("Validation loss by training time", series, x_label="seconds", y_label="nats", focus=True)


def print_table(console: Console, shown: Table) -> None:
    table = RichTable(title=shown.title, box=SIMPLE_HEAD)
    for column, heading in enumerate(shown.header):
        table.add_column(heading, justify="right" if column else "left", no_wrap=True)
    for row in shown.rows:
        table.add_row(*row)
    console.print(table)


def print_race(console: Console, result: dict[str, Any]) -> None:
    print_table(console, _table(result))
    if said := _sentence(result):
        console.print(said)
    console.print(f"Curves and timelines: {result['page']}")
