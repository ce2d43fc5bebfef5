"""The first updates of a run that are trained otherwise than the rest: what of it a plan counts, and for how long.

    error_feedback+sync_start   flushed, in 1F1B's order: nothing is old
    error_feedback+fine_start   in four times as many microbatches: as many of them are old, a quarter of the part

The lengths are those that token penalties were measured with.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from slipstream.plan.throughput import Shape, StageTimes, with_cutover

SYNC_START, FINE_START = 0.1, 0.2  # of the updates
FINE_PARTS = 4
STARTS = ("sync_start", "fine_start")


@dataclass(frozen=True)
class Start:
    """`seconds` per update of it."""

    key: str  # in the config of a run
    share: float
    shape: Shape
    times: StageTimes
    seconds: float


def mean_of(start: Start, first: float, rest: float) -> float:
    """Over all updates, of what is `first` in the start and `rest` after it."""
    return start.share * first + (1 - start.share) * rest


def mean_seconds(start: Start | None, rest: float) -> float:
    """Per update of the whole run, where one after the start takes `rest`."""
    return mean_of(start, start.seconds, rest) if start else rest


def split(correction: str) -> tuple[str, str]:
    """What is done about delay all the time, and the start, if there is one."""
    always, _, start = correction.rpartition("+")
    return (always, start) if start in STARTS else (correction, "")


def start_shape(shape: Shape, name: str, times: StageTimes) -> tuple[str, float, Shape] | None:
    """Key, share and shape of the first updates; None where there is no such start, or a layout cannot have it.

    `times`: of the rest of the run. A run has one cutover, so the start's is what the rest would have were it not cut
    off at all of its microbatches.
    """
    if not shape.asynchronous or not name:
        return None
    if name == "sync_start":
        return "optim.sync_start", SYNC_START, replace(shape, schedule="1f1b", in_flight=None, cutover=None)
    size, rest = divmod(shape.microbatch_size, FINE_PARTS)
    if rest or shape.cutover is None:  # then all of it would be old, however fine
        return None
    finer = replace(shape, microbatches=FINE_PARTS * shape.microbatches, microbatch_size=size)
    return "pipeline.fine_start", FINE_START, with_cutover(times, finer)
