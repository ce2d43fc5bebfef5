"""The first updates of a run that are trained otherwise than the rest: what of it a plan counts, and for how long.

    error_feedback+sync_start   flushed, in 1F1B's order: nothing is old
    error_feedback+fine_start   in four times as many microbatches: as many of them are old, a quarter of the part

The lengths are those that token penalties were measured with.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from slipstream.plan.throughput import Shape, StageTimes

SYNC_START, FINE_START = 0.1, 0.2  # of the updates
FINE_PARTS = 4


@dataclass(frozen=True)
class Start:
    """`seconds` per update of it."""

    key: str  # in the config of a run
    share: float
    shape: Shape
    times: StageTimes
    seconds: float


def mean_seconds(start: Start | None, rest: float) -> float:
    """Per update of the whole run, where one after the start takes `rest`."""
    return start.share * start.seconds + (1 - start.share) * rest if start else rest


def split(correction: str) -> tuple[str, str]:
    """What is done about delay all the time, and the name of the start."""
    always, _, start = correction.partition("+")
    return always, start


def start_shape(shape: Shape, name: str) -> tuple[str, float, Shape] | None:
    """Key, share and shape of the first updates; None where there is no such start, or a layout cannot have it."""
    if not shape.asynchronous:
        return None
    if name == "sync_start":
        return "optim.sync_start", SYNC_START, replace(shape, schedule="1f1b", in_flight=None, cutover=None)
    size, rest = divmod(shape.microbatch_size, FINE_PARTS)
    if name != "fine_start" or rest:
        return None
    finer = replace(shape, microbatches=FINE_PARTS * shape.microbatches, microbatch_size=size)
    return "pipeline.fine_start", FINE_START, finer
