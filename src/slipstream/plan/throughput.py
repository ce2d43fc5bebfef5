"""Seconds per update of a layout: stage costs, links, reductions and the update -> `schedule.simulate`.

What differs between synchronous and asynchronous running is where the reduction over data ranks may hide:

    synchronous   it overlaps with the last microbatch's backward only, what is left delays the barrier
    2BW           it has the slack of m - w_s microbatches before the new bank is first read

The simulator is given the rest: `update` occupies the rank, `update_latency` delays the publication.
`estimate` is the closed form of the same figures, for choosing what to simulate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil, inf, log2

from slipstream.models.cut import Layers
from slipstream.plan.devices import FREE, Device, Runtime
from slipstream.plan.memory import NEWTON_SCHULZ, Precision
from slipstream.plan.parts import Model, Part, stage_parts, stage_seconds
from slipstream.schedule.actions import Schedule
from slipstream.schedule.costs import Costs
from slipstream.schedule.cutover import default_cutover, free_cutover
from slipstream.schedule.generate import GENERATORS, build
from slipstream.schedule.simulate import simulate

# Memory traffic of a step per parameter: gradient, master, state, bank.
UPDATE_BYTES = {"muon": 34, "adamw": 38}
SOON = 0.1  # of a pair: an update that is known so soon asks for no further old microbatch on processors
MOST_ACTIONS = 40_000  # simulated at once: about a tenth of a second
BUBBLE = {  # fill and drain in units of the sum over the other stages' forward and backward
    "gpipe": 1.0, "1f1b": 1.0, "interleaved_1f1b": 0.5, "zb_h1": 1 / 3, "zbv": 1 / 6, "dualpipev": 1 / 6,
}  # fmt: skip


@dataclass(frozen=True)
class Network:
    """Where stages and data ranks sit: `stages_per_node` neighbours share a node."""

    link_latency: tuple[float, ...]  # P-1 links between stages
    link_bandwidth: float  # of the slowest of them
    data_bandwidth: float
    data_latency: float


def place(device: Device, stages: int, data_ranks: int, pipeline_inside: bool) -> Network:
    """Pack the stages of one pipeline into a node, or the data ranks of one stage."""
    per_node = device.per_node
    if pipeline_inside:
        together = min(stages, per_node)
    else:
        together = max(1, per_node // min(data_ranks, per_node))
    beside = max(1, per_node // together)  # data ranks of a stage in one node
    inside = [(link + 1) % together != 0 for link in range(stages - 1)]
    if pipeline_inside and per_node % together and stages * data_ranks > per_node:
        # Ranks are neighbours, pipeline after pipeline, so one that a node has no room for has a link between nodes,
        # and the others wait for it at the update.
        inside[-1] = False
    crosses = data_ranks > beside
    return Network(
        link_latency=tuple(device.intra_latency if near else device.inter_latency for near in inside),
        link_bandwidth=device.intra_bandwidth if all(inside) else device.inter_bandwidth,
        data_bandwidth=min(device.intra_bandwidth, beside * device.inter_bandwidth if crosses else inf),
        data_latency=device.inter_latency if crosses else device.intra_latency,
    )


@dataclass(frozen=True)
class Shape:
    """The part of a layout that decides its speed."""

    schedule: str
    stages: int
    data_ranks: int
    microbatches: int
    microbatch_size: int  # sequences per data rank
    checkpointing: bool = False
    shard_optimizer: bool = False
    pipeline_inside: bool = True
    in_flight: int | None = None
    cutover: int | None = None  # microbatches that read old weights; None: all

    @property
    def old(self) -> float:
        """The share of an update's microbatches that are one update late."""
        if not self.asynchronous:
            return 0.0
        return 1.0 if self.cutover is None else self.cutover / self.microbatches

    @property
    def asynchronous(self) -> bool:
        return not GENERATORS[self.schedule].synchronous

    @property
    def shards(self) -> int:
        """Ranks that share the optimizer's work."""
        return self.data_ranks if self.shard_optimizer else 1

    @property
    def chunks(self) -> int:
        return GENERATORS[self.schedule].default_chunks

    @property
    def model_stages(self) -> int:
        return self.stages * self.chunks


@dataclass(frozen=True)
class StageTimes:
    """Seconds per model stage, and of the chain that ends an update."""

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    update: tuple[float, ...]
    reduction: tuple[float, ...]  # over data ranks, before any overlap
    norm: float  # the tied embedding's sum and the global norm
    message_bytes: float
    network: Network
    runtime: Runtime = FREE
    on_host: bool = False  # stages work on processors


def stage_times(
    model: Model, cut: Sequence[Layers], shape: Shape, device: Device, optimizer: str, precision: Precision
) -> StageTimes:
    """What each model stage of `cut` takes in this layout."""
    network = place(device, shape.stages, shape.data_ranks, shape.pipeline_inside)
    parts = [stage_parts(model, layers) for layers in cut]
    seconds = [stage_seconds(stage, shape.microbatch_size, shape.checkpointing) for stage in parts]
    runtime = device.engine if shape.asynchronous else device.torch_engine
    return StageTimes(
        forward=tuple(forward for forward, _ in seconds),
        backward=tuple(backward for _, backward in seconds),
        update=tuple(
            update_seconds(stage, device, optimizer, shape.shards) + runtime.update / shape.chunks
            for stage in parts
        ),
        reduction=tuple(reduction_seconds(stage, shape, network, precision) for stage in parts),
        norm=_exchange_seconds(model, shape, device, network, precision),
        message_bytes=model.boundary_bytes * shape.microbatch_size,
        network=network,
        runtime=runtime,
        on_host=device.processor,
    )


def _exchange_seconds(
    model: Model, shape: Shape, device: Device, network: Network, precision: Precision
) -> float:
    """The tied embedding's gradients between the end stages, then the global norm over all ranks."""
    ranks = shape.stages * shape.data_ranks
    norm = 2 * ceil(log2(ranks)) * device.inter_latency if ranks > 1 else 0.0
    tied = precision.gradient * model.tied_parameters / network.link_bandwidth if shape.stages > 1 else 0.0
    return norm + tied


def update_seconds(parts: Sequence[Part], device: Device, optimizer: str, shards: int) -> float:
    """The optimizer's own step: memory traffic, and Newton-Schulz where the optimizer has it."""
    measured = [part.timing.update for part in parts]
    if all(seconds is not None for seconds in measured):
        return sum(seconds for seconds in measured if seconds is not None) / shards
    traffic = UPDATE_BYTES.get(optimizer, UPDATE_BYTES["adamw"]) * sum(part.parameters for part in parts)
    flops = sum(part.update_flops for part in parts) if optimizer in NEWTON_SCHULZ else 0.0
    return (traffic / device.memory_bandwidth + flops / (device.peak_flops * device.efficiency)) / shards


def reduction_seconds(parts: Sequence[Part], shape: Shape, network: Network, precision: Precision) -> float:
    """Gradients over the data ranks: all-reduce, or reduce to owners and gather the published weights."""
    d = shape.data_ranks
    if d == 1:
        return 0.0
    per_parameter = precision.gradient + (precision.bank if shape.shard_optimizer else precision.gradient)
    sent = (d - 1) / d * per_parameter * sum(part.parameters for part in parts)
    return sent / network.data_bandwidth + 2 * (d - 1) * network.data_latency


def costs(times: StageTimes, shape: Shape, jitter: float = 0.0) -> Costs:
    """The simulator's input. A recomputing backward splits into I = recompute + F and W = F."""
    reduction = times.reduction
    if not shape.asynchronous:  # overlapped with the last backward
        reduction = [max(0.0, r - b) for r, b in zip(reduction, times.backward, strict=True)]
    weight = [f if shape.checkpointing else b / 2 for f, b in zip(times.forward, times.backward, strict=True)]
    return Costs(
        forward=times.forward,
        backward=times.backward,
        backward_input=tuple(b - w for b, w in zip(times.backward, weight, strict=True)),
        backward_weight=tuple(weight),
        update=times.update,
        update_latency=max(reduction) + times.norm,
        latency=times.network.link_latency if shape.stages > 1 else 0.0,
        message_bytes=times.message_bytes,
        bandwidth=times.network.link_bandwidth,
        jitter=jitter,
        on_demand=times.runtime.on_demand,
        overhead=times.runtime.action,
    )


@dataclass(frozen=True)
class Speed:
    """`seconds` per update; `idle` is the share of device time in which nothing is computed."""

    seconds: float
    idle: float


def simulated(times: StageTimes, shape: Shape, jitter: float = 0.0) -> Speed:
    """Steady state of the schedule under these times, from the simulator."""
    given = costs(times, shape, jitter)
    busy = [
        shape.microbatches * pair + update
        for pair, update in zip(rank_pairs(times, shape), rank_sums(times.update, shape), strict=True)
    ]
    if _actions(shape, shape.microbatches) <= MOST_ACTIONS:
        seconds = _period(shape, shape.microbatches, given)
    else:
        seconds = max(max(busy), _extrapolated(shape, given))
    return Speed(seconds, max(0.0, 1.0 - sum(busy) / shape.stages / seconds))


def _actions(shape: Shape, microbatches: int) -> int:
    return 3 * shape.model_stages * microbatches * _groups(shape)


def _groups(shape: Shape) -> int:
    return 6 if shape.asynchronous else 2  # a barrier ends every synchronous group: all are alike


def with_cutover(times: StageTimes, shape: Shape) -> Shape:
    """The shape with the cutover that a run takes, or more where the other ranks are heard of later.

    The optimizer's own step takes a stage's time wherever it stands, so it asks for no pairs. A device has one to
    spare besides. On processors it is in the default already, and each further one costs tokens.
    """
    if not shape.asynchronous:
        return shape
    pairs = costs(times, shape).update_latency / max(rank_pairs(times, shape))
    slack = ceil(pairs - SOON) if times.on_host else max(2, ceil(pairs))
    free = free_cutover(shape.stages, shape.microbatches, shape.in_flight, slack)
    usual = default_cutover(shape.stages, shape.microbatches, times.on_host)
    return replace(shape, cutover=max(free, usual))


def schedule_of(shape: Shape, microbatches: int, groups: int) -> Schedule:
    """The shape's schedule; with fewer microbatches than the shape has, as many are old and in flight as can be."""
    old = None if shape.cutover is None else min(shape.cutover, microbatches)
    in_flight = None if shape.in_flight is None else min(shape.in_flight, microbatches + 1)
    return build(shape.schedule, shape.stages, microbatches, groups, in_flight=in_flight, cutover=old)


def _period(shape: Shape, microbatches: int, given: Costs) -> float:
    return simulate(schedule_of(shape, microbatches, _groups(shape)), given).time_per_update


def _extrapolated(shape: Shape, given: Costs) -> float:
    """Affine in m beyond the m that can be simulated quickly, whose slope no start-up effect bends any more.

    An asynchronous update whose chain is longer than its slack paces short groups but not long ones, so the
    pace without the chain is extrapolated too, and the slower one counts.
    """
    p, m = shape.stages, shape.microbatches
    large = max(MOST_ACTIONS // _actions(shape, 1), 4 * p)
    large -= (large - m) % p  # m - large is a multiple of P: the schedules repeat with that period
    if large >= m:
        return _period(shape, m, given)
    runs = [given, replace(given, update_latency=0.0)] if shape.asynchronous else [given]
    found = []
    for run in runs:
        small, big = (_period(shape, count, run) for count in (large - p, large))
        found.append(big + (m - large) * (big - small) / p)
    return max(found)


def estimate(times: StageTimes, shape: Shape) -> float:
    """Seconds per update in closed form: exact for equal stages and free links, else within a few percent."""
    p, m = shape.stages, shape.microbatches
    pairs = rank_pairs(times, shape)
    slowest = max(pairs)
    hop = sum(times.network.link_latency) / max(1, p - 1) + times.message_bytes / times.network.link_bandwidth
    deep = shape.in_flight is not None and shape.in_flight > p
    waiting = 0.0 if deep or p == 1 else 2 * (p - 1) / p * hop
    if times.runtime.on_demand and p > 1:
        waiting = 2 * hop
    steady_part = m * (slowest + waiting + 2 * shape.chunks * times.runtime.action)
    update = max(rank_sums(times.update, shape))
    latency = costs(times, shape).update_latency
    if shape.asynchronous:
        slack = (m - p + 1) * slowest
        return steady_part + update + max(0.0, latency - slack)
    bubble = BUBBLE[shape.schedule] * (sum(pairs) - slowest) + 2 * (p - 1) * hop
    return steady_part + bubble + update + latency


def rank_pairs(times: StageTimes, shape: Shape) -> list[float]:
    """Seconds of one microbatch's forward and backward on each rank."""
    return rank_sums([f + b for f, b in zip(times.forward, times.backward, strict=True)], shape)


def rank_sums(values: Sequence[float], shape: Shape) -> list[float]:
    """Per-model-stage values added up per rank."""
    sums = [0.0] * shape.stages
    for stage, value in enumerate(values):
        sums[rank_of(stage, shape)] += value
    return sums


def rank_of(stage: int, shape: Shape) -> int:
    """Rank r holds r, r+P, ... or, on a V, r and 2P-1-r."""
    if stage >= shape.stages and shape.schedule in ("zbv", "dualpipev"):
        return 2 * shape.stages - 1 - stage
    return stage % shape.stages
