"""The search space: every shape of a job's devices and batch, and whether it fits.

A shape is cut by balanced cost; where a rank then overflows, by balanced cost among the cuts that fit. As in the
trainer, layers are cut in two where that is worth it, but only for the schedules that it runs. Stage
memory rises with the number of layers, so the most each stage can hold is found by bisection. (It is not
linear: with few layers the head's working set hides the update's, with many it does not.)
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise
from math import inf

from slipstream.errors import UserError
from slipstream.models.cut import WORTH_CUTTING_A_LAYER, Layers, at_half
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
from slipstream.plan.throughput import Shape, StageTimes, rank_of, rank_sums, stage_times
from slipstream.schedule.cutover import default_cutover
from slipstream.schedule.generate import GENERATORS, build, canonical

SCHEDULES = ("pipedream_2bw", "1f1b", "gpipe", "interleaved_1f1b", "zb_h1", "zbv", "dualpipev")
MICROBATCH_SIZES = (1, 2, 4, 8, 16, 32)
TIE_BLOCKS = 4  # as in pipeline/ties.py, which a test compares: planning imports no torch
OCCUPANCY_MICROBATCHES = 4  # times P: by then every schedule but gpipe holds its most activations
# By which the allocator's blocks exceed what is in them, for each layer and microbatch (docs/notes/memory.md).
BLOCKS_BYTES = 3 << 20

MOST_MICROBATCHES = 4096  # unless more are forced: a bubble is as good as none, and simulating takes minutes
Cut = tuple[Layers, ...]
Most = tuple[
    tuple[int, int], ...
]  # halves of layers on each stage, if it begins with an attention or with an MLP


def shapes(job: Job) -> Iterator[Shape]:
    """Every layout of the job's devices and batch that its schedule can run, fitting or not."""
    devices = job.cluster.devices
    names = (canonical(job.schedule),) if job.schedule else SCHEDULES
    if not set(names) <= set(SCHEDULES):  # their delay grows with P, and no penalty has been measured at that
        raise UserError(f"The planner does not rank '{names[0]}'. Choose from: {', '.join(SCHEDULES)}.")
    for stages in range(1, min(devices, job.config.layers) + 1):
        if devices % stages or job.stages not in (None, stages):
            continue
        data_ranks = devices // stages
        for size in _sizes(job, data_ranks):
            microbatches, rest = divmod(job.sequences, data_ranks * size)
            if rest or not 1 <= microbatches <= (job.microbatches or MOST_MICROBATCHES):
                continue
            if job.microbatches not in (None, microbatches):
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


class Fitter:
    """Cuts and memory of one job's shapes, remembering what many shapes share."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.model = build_model(job.config, job.sequence, job.cluster.device, job.precision, job.timings)
        self._cuts: dict[tuple, Cut | None] = {}
        self._segments: dict[tuple, Callable[[int, int], float]] = {}

    def fit(self, shape: Shape, room: float) -> tuple[Cut, tuple[StageMemory, ...], StageTimes] | None:
        """The best cut that leaves no rank with more than `room` bytes; None where there is none."""
        cut = self.cut(shape)
        if cut is None:
            return None
        memory = self.memory(shape, cut)
        if max(rank.total for rank in memory) > room:
            whole = self.cut(shape, whole_layers=True)
            if whole is not None and whole != cut:
                cut, memory = whole, self.memory(shape, whole)
            if shape.chunks == 1 and sum(rank.total for rank in memory) <= shape.stages * room:
                cut = self.cut(shape, self._most_halves(shape, room))
                if cut is None:
                    return None
                memory = self.memory(shape, cut)
            if max(rank.total for rank in memory) > room:
                return None
        return cut, memory, self.times(shape, cut)

    @property
    def all_old(self) -> bool:
        """Whether the correction needs all of an update's gradients taken at one bank."""
        return "delay_compensation" in self.job.correction

    def usual_cutover(self, shape: Shape) -> int:
        """What a run takes whose correction does not ask for all of them."""
        return default_cutover(shape.stages, shape.microbatches, self.job.cluster.device.processor)

    def times(self, shape: Shape, cut: Cut) -> StageTimes:
        job = self.job
        return stage_times(self.model, cut, shape, job.cluster.device, job.optimizer, job.precision)

    def cut(self, shape: Shape, most: Most | None = None, whole_layers: bool = False) -> Cut | None:
        """Balanced cost, with at most `most` on each stage."""
        by_layer = self._balanced(shape, most, whole_layers=True)
        if whole_layers or self.job.model.whole_layers:
            return by_layer
        by_half = self._balanced(shape, most, whole_layers=False)
        if by_half is None or by_layer is None or shape.chunks == 1:
            return by_half or by_layer
        # A rank has to gain, by its chunks together.
        new, old = (max(rank_sums(self._stages_seconds(shape, cut), shape)) for cut in (by_half, by_layer))
        return by_half if new <= (1 - WORTH_CUTTING_A_LAYER) * old else by_layer

    def _balanced(self, shape: Shape, most: Most | None, whole_layers: bool) -> Cut | None:
        """Of stages that may begin inside a layer: a cut by which the slowest is enough faster than by whole layers."""
        key = (shape.model_stages, shape.microbatch_size, shape.checkpointing, most, whole_layers)
        if key not in self._cuts:
            seconds, end = self._seconds(shape), 2 * len(self.model.layers)
            step = 2 if whole_layers else 1
            even = seconds(0, end) / shape.model_stages
            limits = [2 * even, inf]  # what is found within the first takes less time to find
            if not whole_layers and (by_layer := self._balanced(shape, most, whole_layers=True)):
                worth = (1 - WORTH_CUTTING_A_LAYER) * max(self._stages_seconds(shape, by_layer))
                limits = [worth] if worth >= even else []

            def cost(stage: int, first: int, last: int) -> float:
                first, last = step * first, step * last
                if most is not None and last - first > most[stage][first % 2]:
                    return inf
                return seconds(first, last)

            tried = (partition(end // step, shape.model_stages, cost, limit) for limit in limits)
            found = next((units for units in tried if units), None)
            self._cuts[key] = None
            if found is not None:
                edges = [at_half(step * units.stop) for units in found]
                self._cuts[key] = tuple(Layers(*pair) for pair in pairwise([0, *edges]))
        return self._cuts[key]

    def _seconds(self, shape: Shape) -> Callable[[int, int], float]:
        """What a microbatch's forward and backward take on a stage, by its edges in halves of layers."""
        key = (shape.microbatch_size, shape.checkpointing)
        if key not in self._segments:
            self._segments[key] = self._segment_seconds(shape)
        return self._segments[key]

    def _segment_seconds(self, shape: Shape) -> Callable[[int, int], float]:
        model, end = self.model, 2 * len(self.model.layers)
        embedding, attention, mlp, head = (
            sum(stage_seconds([part], shape.microbatch_size, shape.checkpointing))
            for part in (model.embedding, *model.halves, model.head)
        )

        @cache
        def seconds(first: int, last: int) -> float:
            # Counted, not added up: stages with the same layers are equal to the last bit, and even cuts are found.
            layers = ((last + 1) // 2 - (first + 1) // 2) * attention + (last // 2 - first // 2) * mlp
            return layers + (embedding if first == 0 else 0.0) + (head if last == end else 0.0)

        return seconds

    def _stages_seconds(self, shape: Shape, cut: Cut) -> list[float]:
        seconds = self._seconds(shape)
        return [seconds(int(2 * layers.start), int(2 * layers.stop)) for layers in cut]

    def memory(self, shape: Shape, cut: Cut) -> tuple[StageMemory, ...]:
        """Memory of every rank, its chunks together."""
        held = [self._held(layers, shape) for layers in cut]
        activations = peak_activation_bytes(self._held_by_schedule(shape), held)
        ranks: list[list[Layers]] = [[] for _ in range(shape.stages)]
        for stage, layers in enumerate(cut):
            ranks[rank_of(stage, shape)].append(layers)
        return tuple(self._rank(shape, mine, activations[rank]) for rank, mine in enumerate(ranks))

    def _rank(self, shape: Shape, chunks: Sequence[Layers], activations: float) -> StageMemory:
        job, model = self.job, self.model
        parts = [part for layers in chunks for part in stage_parts(model, layers)]
        cutover = self.usual_cutover(shape) if shape.cutover is None else shape.cutover
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

    def _communicators(self, shape: Shape, chunks: Sequence[Layers]) -> float:
        """Of a stage in the middle: one for each direction of its links, and one with the other data ranks. The first
        and the last stage of a tied model share one more."""
        device, model = self.job.cluster.device, self.model
        blocks = 2 * min(2, shape.stages - 1)  # a link has one
        ends = any(layers.start == 0 or layers.stop == len(model.layers) for layers in chunks)
        if ends and model.tied_parameters and shape.stages > 1:
            blocks += TIE_BLOCKS
        return blocks * device.link_bytes + (device.group_bytes if shape.data_ranks > 1 else 0.0)

    def _held(self, layers: Layers, shape: Shape) -> float:
        """Bytes one microbatch keeps on a stage between its forward and its backward."""
        parts = stage_parts(self.model, layers)
        kept = sum(
            part.checkpointed_bytes if shape.checkpointing else part.activation_bytes for part in parts
        )
        return kept * shape.microbatch_size + (layers.stop - layers.start) * BLOCKS_BYTES

    def _most_halves(self, shape: Shape, room: float) -> Most:
        """The most that each stage can hold (schedules of one chunk)."""
        end = 2 * len(self.model.layers)
        most = []
        in_flight_of = peak_activation_bytes(self._held_by_schedule(shape), [1.0] * shape.stages)
        for stage, in_flight in enumerate(in_flight_of):

            def fitting(first: int | None, choices: range, in_flight: float = in_flight) -> int:
                """Halves from `first` on, or the last ones; one less than the choices where none of them fits."""

                def total(halves: int) -> float:
                    start = end - halves if first is None else first
                    layers = Layers(at_half(start), at_half(start + halves))
                    return self._rank(shape, [layers], in_flight * self._held(layers, shape)).total

                return choices.start - 1 + bisect_right(choices, room, key=total)

            if stage in (0, shape.stages - 1):
                found = fitting(None if stage else 0, range(1, end + 1 - (shape.stages > 1)))
                most.append((found, found))
            else:
                found = fitting(2, range(1, end - 2))
                # From an MLP on as many, or one more or less: each of the two lies in the other and a half.
                most.append((found, fitting(1, range(max(1, found), found + 2))))
        return tuple(most)

    def _held_by_schedule(self, shape: Shape) -> Held:
        """Of a schedule long enough to show the most activations it ever holds."""
        most = shape.microbatches if shape.schedule == "gpipe" else OCCUPANCY_MICROBATCHES * shape.stages
        microbatches = min(shape.microbatches, most)
        if shape.schedule == "interleaved_1f1b":
            microbatches -= microbatches % shape.stages
        return _held_together(shape.schedule, shape.stages, microbatches, shape.in_flight)


@cache  # of many plans as of one: where nothing fits, fewer layers and more devices are looked at
def _held_together(name: str, stages: int, microbatches: int, in_flight: int | None) -> Held:
    groups = 1 if GENERATORS[name].synchronous else 2
    return held_together(build(name, stages, microbatches, groups, in_flight=in_flight))
