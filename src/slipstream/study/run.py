"""`slipstream study run`: execute what is missing, in the order of the file.

A run counts as done when its folder (or an export beside it) holds an ended run with the same digest; a failed
one is recorded and stays so until --retry. With a limit, a run is started only if the time that runs like it
took still fits. Invariant: stopping at any moment loses at most the runs that were under way.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from shutil import rmtree
from typing import Any

from slipstream.data.shards import find_shards
from slipstream.errors import UserError
from slipstream.study.only import matching
from slipstream.study.pool import Pool, Worker
from slipstream.study.results import FAILED_FILE, Result, collect, losses, read_folder, write_failure
from slipstream.study.show import Show
from slipstream.study.sweep import Expansion, Point, Study, each_once, settings

POLL_SECONDS = 1.0
SET_UP_SECONDS = 2.0


@dataclass(frozen=True)
class Limits:
    """Which of the runs to start."""

    workers: int = 1
    only: str | None = None
    minutes: float | None = None
    retry: bool = False


@dataclass
class Outcome:
    """What a call did."""

    finished: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    failed_before: int = 0  # wanted, and on record as failed when this call began
    left: int = 0  # known and wanted, but not run
    waiting: int = 0  # to be known when a grid has ended
    stopped: str = ""  # why runs were left: "time" or "interrupt"


class Clock:
    """How long a run takes, from runs like it: seconds per token of the nearest kind measured so far."""

    def __init__(self, results: Mapping[str, Result]) -> None:
        self._seen: list[tuple[tuple[Any, ...], float]] = []
        for result in results.values():
            if result.seconds and result.tokens and not result.failed:
                seconds = steady_seconds(result, result.seconds)
                self._seen.append((_kind(result.settings), seconds / result.tokens))

    def observe(self, point: Point, seconds: float) -> None:
        self._seen.append((_kind(settings(point.config)), seconds / _tokens(point)))

    def seconds(self, point: Point) -> float | None:
        """None where nothing has been measured."""
        kind = _kind(settings(point.config))
        for depth in range(len(kind), -1, -1):
            rates = [rate for seen, rate in self._seen if seen[:depth] == kind[:depth]]
            if rates:
                return statistics.median(rates) * _tokens(point)
        return None

    def left(self, points: Sequence[Point], active: Sequence[Worker], workers: int) -> float | None:
        """Until all of these are done, None while nothing is measured."""
        times = [self.seconds(point) for point in points]
        for worker in active:
            assert worker.point is not None
            whole = self.seconds(worker.point)
            times.append(None if whole is None else max(0.0, whole - (time.monotonic() - worker.began)))
        known = [seconds for seconds in times if seconds is not None]
        return sum(known) / workers if len(known) == len(times) else None


def steady_seconds(result: Result, seconds: float) -> float:
    """What the run would have taken in a process that had compiled before: its steps, validations, set-up."""
    if not result.tokens_per_second:
        return seconds
    return min(seconds, 1.08 * result.tokens / result.tokens_per_second + SET_UP_SECONDS)


def run_study(study: Study, out: Path, limits: Limits, show: Show, also: Sequence[Path] = ()) -> Outcome:
    """Run what neither `out` nor the results of `also` hold; Ctrl-C ends the runs under way in order."""
    out.mkdir(parents=True, exist_ok=True)
    results = collect(out, *also)

    def asked(whole: Expansion) -> Expansion:
        if limits.only is None:
            return whole
        named = tuple(matching(whole.named, limits.only, study.labels()))
        return Expansion(each_once(named), 0, whole.notes, named)

    if limits.retry:
        _forget_failures(asked(study.expand(losses(results))).points, results, out)
    deadline = None if limits.minutes is None else time.monotonic() + 60 * limits.minutes
    clock, outcome = Clock(results), Outcome()
    attempted: set[str] = set()

    def missing() -> list[Point]:
        return [point for point in wanted.points if point.digest not in results]

    expansion = study.expand(losses(results))
    wanted = asked(expansion)
    _check_data(expansion)
    if not wanted.points and limits.only is not None:
        names = "\n  ".join(point.name for point in expansion.points[:12])
        more = f" {expansion.waiting} more get their names once a grid has ended."
        later = more if expansion.waiting else ""
        raise UserError(f"No run matches --only '{limits.only}'.{later} Runs are named like this:\n  {names}")
    part = f"{len(wanted.points)} of " if limits.only is not None else ""
    later = f" and {expansion.waiting} to be chosen" if expansion.waiting else ""
    done = len(wanted.points) - len(missing())
    show.note(f"{study.name}: {part}{len(expansion.points)} runs{later}, {done} done. Runs: {out}")
    outcome.failed_before = len(_failures(wanted.points, results))
    with Pool(limits.workers, out) as pool, show:
        pool.prepare(len(missing()))
        while True:
            todo = [point for point in missing() if point.digest not in attempted]
            show.state(wanted, results, pool.active, clock.left(todo, pool.active, limits.workers))
            while todo and pool.idle and not outcome.stopped:
                point = next((p for p in todo if _fits(clock.seconds(p), deadline)), None)
                if point is None:
                    outcome.stopped = "time"
                    break
                todo.remove(point)
                attempted.add(point.digest)
                folder = out / point.folder
                (folder / FAILED_FILE).unlink(missing_ok=True)
                pool.start(point, folder)
                show.started(point)
            if not pool.active:
                break
            try:
                ended = pool.wait(POLL_SECONDS)
            except KeyboardInterrupt:
                outcome.stopped = "interrupt"
                pool.interrupt()
                show.note(
                    "Stopping: the runs under way end. Next time they begin again, or go on if they keep checkpoints."
                )
                continue
            for point, report in ended:
                folder = out / point.folder
                if report.elsewhere:  # no failure: written there, it would be taken for the end of that run
                    show.elsewhere(point)
                    continue
                if report.disk:  # no failure either: the next would end as this one did, each on record
                    raise UserError(report.message)
                interrupted = outcome.stopped == "interrupt" and report.broken
                if report.message and not interrupted:  # what Ctrl-C broke is no failure of the run
                    write_failure(folder, point, report.message, report.trace)
                result = read_folder(folder)
                if result is None:
                    continue  # interrupted: the same command runs it again
                assert result.digest == point.digest, f"{folder} holds {result.digest}, not {point.digest}"
                results[point.digest] = result
                if result.failed:
                    outcome.failed[point.name] = result.failed
                else:
                    clock.observe(point, steady_seconds(result, report.seconds))
                    outcome.finished.append(point.name)
                show.ended(point, result, report.seconds)
            if ended:
                expansion = study.expand(losses(results))
                wanted = asked(expansion)
    outcome.left, outcome.waiting = len(missing()), expansion.waiting
    return outcome


def _forget_failures(points: Sequence[Point], results: dict[str, Result], out: Path) -> None:
    """Those of the runs that are wanted now: other studies keep theirs in the same folder."""
    for point in _failures(points, results):
        rmtree(out / point.folder, ignore_errors=True)
        del results[point.digest]


def _failures(points: Sequence[Point], results: Mapping[str, Result]) -> list[Point]:
    ended = [point for point in points if point.digest in results]
    return [point for point in ended if results[point.digest].failed]


def _fits(seconds: float | None, deadline: float | None) -> bool:
    return deadline is None or time.monotonic() + (seconds or 0.0) <= deadline


def _kind(keys: Mapping[str, Any]) -> tuple[Any, ...]:
    """What decides a run's speed, coarse to fine."""
    model = tuple(sorted((key, str(value)) for key, value in keys.items() if key.startswith("model.")))
    batch = tuple(keys.get(key) for key in ("pipeline.microbatches", "pipeline.microbatch_size"))
    return (
        model,
        keys.get("data.sequence"),
        batch,
        keys.get("optim.name"),
        str(keys.get("pipeline.delay")),
        keys.get("optim.correction"),
    )


def _tokens(point: Point) -> float:
    return point.config.train.steps * point.config.tokens_per_step


def _check_data(expansion: Expansion) -> None:
    """Say once that the data are missing, not once per run."""
    for path in {point.config.data.path for point in expansion.points}:
        if path is None:
            continue
        if not Path(path).is_dir():
            raise UserError(
                f"There is no data folder '{path}'. Make it with `slipstream data prepare`, or name another: "
                "slipstream study run FILE data.path=FOLDER."
            )
        for split in ("train", "valid"):
            find_shards(Path(path), split)
