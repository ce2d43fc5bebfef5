"""The search space: every shape of a job's devices and batch, and whether it fits.

A shape is cut by balanced cost; where a rank then overflows, by balanced cost among the cuts that fit. Stage
memory rises with the number of layers, so the most layers each stage can hold are found by bisection. (It is not
linear: with few layers the head's working set hides the update's, with many it does not.)
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import inf

from slipstream.errors import UserError
from slipstream.plan.layout import Job
from slipstream.plan.memory import (
    AT_ONCE_BYTES,
    Held,
    StageMemory,
    held_together,
    peak_activation_bytes,
    weights_memory,
)
from slipstream.plan.partition import partition
from slipstream.plan.parts import LOSS_SCRATCH_MOST, build_model, stage_parts, stage_seconds
from slipstream.plan.throughput import Shape, StageTimes, rank_of, stage_times
from slipstream.schedule.cutover import default_cutover
from slipstream.schedule.generate import build, canonical

SCHEDULES = ("pipedream_2bw", "1f1b", "gpipe", "interleaved_1f1b", "zb_h1", "zbv", "dualpipev")
MICROBATCH_SIZES = (1, 2, 4, 8, 16, 32)
TIE_BLOCKS = 4  # as in pipeline/ties.py, which a test compares: planning imports no torch
OCCUPANCY_MICROBATCHES = 4  # times P: by then every schedule but gpipe holds its most activations
# By which the allocator's blocks exceed what is in them, for each layer and microbatch (docs/notes/memory.md).
BLOCKS_BYTES = 3 << 20

Cut = tuple[range, ...]


def shapes(job: Job) -> Iterator[Shape]:
    """Every layout of the job's devices and batch that its schedule can run, fitting or not."""
    devices = job.cluster.devices
    names = (canonical(job.schedule),) if job.schedule else SCHEDULES
    if not set(names) <= set(SCHEDULES):  # their delay grows with P, and no penalty has been measured at that
        raise UserError(f"The planner does not rank '{names[0]}'. Choose from: {', '.join(SCHEDULES)}.")
    for stages in _divisors(devices):
        if job.stages not in (None, stages) or stages > job.config.layers:
            continue
        data_ranks = devices // stages
        for size in _sizes(job, data_ranks):
            microbatches, rest = divmod(job.sequences, data_ranks * size)
            if rest or microbatches < 1 or job.microbatches not in (None, microbatches):
                continue
            for name in names:
                yield from _variants(name, stages, data_ranks, microbatches, size, job.config.layers)


def _sizes(job: Job, data_ranks: int) -> tuple[int, ...]:
    """Sequences of a microbatch on one data rank; a size that was asked for is that of all of them together."""
    if job.microbatch_size is None:
        return MICROBATCH_SIZES
    size, rest = divmod(job.microbatch_size, data_ranks)
    return (size,) if size and not rest else ()


def _variants(
    name: str, stages: int, data_ranks: int, microbatches: int, size: int, layers: int
) -> Iterator[Shape]:
    base = Shape(name, stages, data_ranks, microbatches, size)
    if not _runnable(base, layers):
        return
    depths: list[int | None] = [None]
    if base.asynchronous and stages > 1 and microbatches >= 2 * stages:
        depths.append(2 * stages - 1)  # hides link latency, at the price of activations
    for checkpointing in (False, True):
        for shard in (False, True) if data_ranks > 1 else (False,):
            for inside in (True, False) if stages > 1 and data_ranks > 1 else (True,):
                for depth in depths:
                    yield replace(
                        base, checkpointing=checkpointing, shard_optimizer=shard, pipeline_inside=inside,
                        in_flight=depth,
                    )  # fmt: skip


def _runnable(shape: Shape, layers: int) -> bool:
    """The laws of each schedule; a single stage is plain gradient accumulation, called 1f1b here."""
    p, m = shape.stages, shape.microbatches
    if p == 1:
        return shape.schedule == "1f1b"
    if shape.model_stages > layers:
        return False
    if shape.schedule == "interleaved_1f1b":
        return m % p == 0
    if shape.schedule == "dualpipev":
        return m >= 2 * p
    return m >= p


def _divisors(number: int) -> list[int]:
    return [candidate for candidate in range(1, number + 1) if number % candidate == 0]


class Fitter:
    """Cuts and memory of one job's shapes, remembering what many shapes share."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.model = build_model(job.config, job.sequence, job.cluster.device, job.precision, job.timings)
        self._cuts: dict[tuple, Cut | None] = {}
        self._seconds: dict[tuple[int, bool], dict[tuple[int, int], float]] = {}
        self._held_together: dict[tuple, Held] = {}

    def fit(self, shape: Shape, room: float) -> tuple[Cut, tuple[StageMemory, ...], StageTimes] | None:
        """The best cut that leaves no rank with more than `room` bytes; None where there is none."""
        cut = self.cut(shape)
        if cut is None:
            return None
        memory = self.memory(shape, cut)
        if max(rank.total for rank in memory) > room:
            if shape.chunks > 1 or sum(rank.total for rank in memory) > shape.stages * room:
                return None
            cut = self.cut(shape, self._most_layers(shape, room))
            if cut is None:
                return None
            memory = self.memory(shape, cut)
        job = self.job
        times = stage_times(self.model, cut, shape, job.cluster.device, job.optimizer, job.precision)
        return cut, memory, times

    def cut(self, shape: Shape, most: tuple[int, ...] | None = None) -> Cut | None:
        """Balanced cost, with at most `most[s]` layers on stage s."""
        key = (shape.model_stages, shape.microbatch_size, shape.checkpointing, most)
        if key not in self._cuts:
            known = self._seconds.setdefault((shape.microbatch_size, shape.checkpointing), {})

            def cost(stage: int, first: int, last: int) -> float:
                if first >= last or (most is not None and last - first > most[stage]):
                    return inf
                if (first, last) not in known:
                    parts = stage_parts(self.model, range(first, last))
                    seconds = stage_seconds(parts, shape.microbatch_size, shape.checkpointing)
                    known[first, last] = sum(seconds)
                return known[first, last]

            found = partition(len(self.model.layers), shape.model_stages, cost)
            self._cuts[key] = tuple(found) if found else None
        return self._cuts[key]

    def memory(self, shape: Shape, cut: Cut) -> tuple[StageMemory, ...]:
        """Memory of every rank, its chunks together."""
        held = [self._held(layers, shape) for layers in cut]
        activations = peak_activation_bytes(self._held_by_schedule(shape), held)
        ranks: list[list[range]] = [[] for _ in range(shape.stages)]
        for stage, layers in enumerate(cut):
            ranks[rank_of(stage, shape)].append(layers)
        return tuple(self._rank(shape, mine, activations[rank]) for rank, mine in enumerate(ranks))

    def _rank(self, shape: Shape, chunks: Sequence[range], activations: float) -> StageMemory:
        job, model = self.job, self.model
        parts = [part for layers in chunks for part in stage_parts(model, layers)]
        cutover = shape.cutover
        if cutover is None:  # what a run takes
            cutover = default_cutover(shape.stages, shape.microbatches)
        weights = weights_memory(
            sum(part.matrices for part in parts),
            sum(part.others for part in parts),
            largest=max((part.largest for part in parts), default=0),
            asynchronous=shape.asynchronous,
            optimizer=job.optimizer,
            correction=job.correction.split("+")[0],
            precision=job.precision,
            shards=shape.shards,
            waiting=shape.stages * shape.data_ranks > 1,
            fresh=shape.asynchronous and cutover < shape.microbatches,
        )
        size = shape.microbatch_size
        head = layer = 0.0
        for part in parts:
            if part is model.head:
                pieces = size * part.working_bytes
                head = pieces + max(pieces, min(size * part.scratch_bytes, LOSS_SCRATCH_MOST))
            else:
                again = part.working_bytes if shape.checkpointing else 0.0
                layer = max(layer, size * (again + part.backward_bytes))
        # Three moments compete: a backward begins (counted so far); it ends, its activations gone but all its
        # gradients there in the banks' precision; an update runs, when no microbatch is half done.
        working = max(head, layer)
        narrow = job.precision.bank if job.precision.bank != job.precision.gradient else 0
        most = AT_ONCE_BYTES if shape.asynchronous else inf
        backward_ends = max(
            min(most, narrow * sum(part.parameters for part in stage_parts(model, layers)))
            - self._held(layers, shape)
            for layers in chunks
        )
        update_runs = weights.transient - min(self._held(layers, shape) for layers in chunks)
        links = 0 if shape.stages == 1 else 4  # one in use and one posted ahead, forward and backward
        return replace(
            weights,
            activations=activations,
            working=working + job.cluster.device.workspace_bytes,
            transient=max(0.0, backward_ends - working, update_runs - working),
            buffers=links * model.boundary_bytes * size,
            communicators=self._communicators(shape, chunks),
        )

    def _communicators(self, shape: Shape, chunks: Sequence[range]) -> float:
        """Of a stage in the middle: one for each direction of its links, and one with the other data ranks. The first
        and the last stage of a tied model share one more."""
        device, model = self.job.cluster.device, self.model
        blocks = 2 * min(2, shape.stages - 1)  # a link has one
        ends = any(layers.start == 0 or layers.stop == len(model.layers) for layers in chunks)
        if ends and model.tied_parameters and shape.stages > 1:
            blocks += TIE_BLOCKS
        return blocks * device.link_bytes + (device.group_bytes if shape.data_ranks > 1 else 0.0)

    def _held(self, layers: range, shape: Shape) -> float:
        """Bytes one microbatch keeps on a stage between its forward and its backward."""
        parts = stage_parts(self.model, layers)
        kept = sum(
            part.checkpointed_bytes if shape.checkpointing else part.activation_bytes for part in parts
        )
        return kept * shape.microbatch_size + len(layers) * BLOCKS_BYTES

    def _most_layers(self, shape: Shape, room: float) -> tuple[int, ...]:
        """The most layers each stage can hold (schedules of one chunk)."""
        count = len(self.model.layers)
        most = []
        in_flight_of = peak_activation_bytes(self._held_by_schedule(shape), [1.0] * shape.stages)
        for stage, in_flight in enumerate(in_flight_of):

            def held(layers: int, stage: int = stage, in_flight: float = in_flight) -> float:
                first = 0 if stage == 0 else count - layers if stage == shape.stages - 1 else 1
                segment = range(first, first + layers)
                return self._rank(shape, [segment], in_flight * self._held(segment, shape)).total

            choices = range(1, count - shape.stages + 2)  # every other stage has a layer at least
            most.append(bisect_right(choices, room, key=held))
        return tuple(most)

    def _held_by_schedule(self, shape: Shape) -> Held:
        """Of a schedule long enough to show the most activations it ever holds."""
        most = shape.microbatches if shape.schedule == "gpipe" else OCCUPANCY_MICROBATCHES * shape.stages
        microbatches = min(shape.microbatches, most)
        if shape.schedule == "interleaved_1f1b":
            microbatches -= microbatches % shape.stages
        key = (shape.schedule, shape.stages, microbatches, shape.in_flight)
        if key not in self._held_together:
            groups = 2 if shape.asynchronous else 1
            schedule = build(shape.schedule, shape.stages, microbatches, groups, in_flight=shape.in_flight)
            self._held_together[key] = held_together(schedule)
        return self._held_together[key]
