"""Time to loss: the same run under several schedules, one after the other, and who reached one loss first.

Every contender is a whole `slipstream train` with the same model, data, seed, batch and learning rates; only the
schedule differs (and with it the delay and its correction, which only 2bw has). The clock is the wall clock of
training from the first recorded step on: start-up, compilation and the validations themselves are left out, alike
for all. The target is the loss that every contender reached, unless one is given: the worst of their best ones.
Finished runs are kept, so an interrupted race goes on where it was.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from slipstream.errors import UserError
from slipstream.metrics.events import Run, number, read_run
from slipstream.metrics.report import write_report

OURS = "2bw"
NO_DELAY = ("optim.correction=none", "optim.sync_start=0", "optim.sync_finish=0")


@dataclass(frozen=True)
class Lap:
    """What one contender did. Seconds and tokens to the target are None where it was not reached."""

    schedule: str
    tokens_per_second: float
    best_loss: float
    final_loss: float
    seconds: float  # of training, to the end of the run
    seconds_to_target: float | None = None
    tokens_to_target: float | None = None


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
    progress: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Run what is missing, compare, and write race.json and race.html into `out`."""
    if len(set(schedules)) < 2:
        raise UserError("A race needs two schedules or more. Set --schedules to a list such as 2bw,1f1b.")
    out.mkdir(parents=True, exist_ok=True)
    for schedule in schedules:
        progress(f"training with {schedule}")
        _train(arguments, schedule, out)
    runs = {schedule: read_run(out / schedule) for schedule in schedules}
    result = compare(runs, target)
    result["page"] = str(write_report([run.path for run in runs.values()], out / "race.html"))
    (out / "race.json").write_text(json.dumps(result, indent=2) + "\n")
    return result


def arguments_of(arguments: Sequence[str], schedule: str, out: Path) -> list[str]:
    """What `slipstream train` is called with for one contender."""
    own = [f"pipeline.schedule={schedule}", f"run.dir={out / schedule}"]
    return [*arguments, *own, *(NO_DELAY if schedule != OURS else ())]


def _train(arguments: Sequence[str], schedule: str, out: Path) -> None:
    command = [sys.executable, "-m", "slipstream", "train", *arguments_of(arguments, schedule, out)]
    if subprocess.run(command).returncode:
        raise UserError(
            f"The run with {schedule} failed; its words are above, its logs in {out / schedule}. "
            "Mend it and start the race again: runs that ended are kept."
        )


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
        target = max(min(point.loss for point in points) for points in curves.values())
    reached = {schedule: reach(points, target) for schedule, points in curves.items()}
    laps = {schedule: _lap(schedule, curves[schedule], reached[schedule]) for schedule in runs}
    result: dict[str, Any] = {"target_loss": target, "laps": [asdict(lap) for lap in laps.values()]}
    others = {schedule: at for schedule, at in reached.items() if at is not None and schedule != OURS}
    if (ours := reached.get(OURS)) is not None and others:
        best = min(others, key=lambda schedule: others[schedule].seconds)
        result |= {
            "best_sync": best,
            "speedup_in_tokens_per_second": laps[OURS].tokens_per_second / laps[best].tokens_per_second,
            "token_penalty": ours.tokens / others[best].tokens,
            "speedup_in_time_to_target": others[best].seconds / ours.seconds,
        }
    return result


def curve(run: Run) -> list[Point]:
    """The validations, by training time: the time each validation took is not training."""
    steps = {row["step"]: at for row in run.surviving("step") if (at := number(row.get("time"))) is not None}
    began, validating = min(steps.values(), default=0.0), 0.0
    points: list[Point] = []
    for row in run.surviving("validation"):
        at, loss, tokens = (number(row.get(key)) for key in ("time", "loss", "tokens"))
        if at is None or loss is None or tokens is None or row["step"] not in steps:
            continue
        before = steps[row["step"]]
        points.append(Point(before - began - validating, tokens, loss))
        validating += max(0.0, at - before)
    return points


def _lap(schedule: str, points: Sequence[Point], reached: Point | None) -> Lap:
    first, last = points[0], points[-1]
    return Lap(
        schedule,
        tokens_per_second=(last.tokens - first.tokens) / (last.seconds - first.seconds),
        best_loss=min(point.loss for point in points),
        final_loss=last.loss,
        seconds=last.seconds,
        seconds_to_target=reached.seconds if reached else None,
        tokens_to_target=reached.tokens if reached else None,
    )


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


def print_race(console: Console, result: dict[str, Any]) -> None:
    table = Table(title=f"Time to a validation loss of {result['target_loss']:.4f}", box=SIMPLE_HEAD)
    for heading in ("schedule", "seconds", "M tokens", "tokens / s", "final loss"):
        table.add_column(heading, justify="left" if heading == "schedule" else "right", no_wrap=True)
    for lap in result["laps"]:
        reached = lap["seconds_to_target"] is not None
        table.add_row(
            lap["schedule"],
            f"{lap['seconds_to_target']:.1f}" if reached else "not reached",
            f"{lap['tokens_to_target'] / 1e6:.2f}" if reached else "",
            f"{lap['tokens_per_second']:,.0f}",
            f"{lap['final_loss']:.4f}",
        )
    console.print(table)
    if "best_sync" in result:
        console.print(
            f"2bw reaches it {result['speedup_in_time_to_target']:.2f} times as fast as {result['best_sync']}: "
            f"{result['speedup_in_tokens_per_second']:.2f} times the tokens per second, "
            f"{result['token_penalty']:.3f} times the tokens."
        )
    console.print(f"Curves and timelines: {result['page']}")
