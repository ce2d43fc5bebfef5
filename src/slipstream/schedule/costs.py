"""What each action costs: one frozen value, checked and spread over the stages of a schedule in one place."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from math import inf, isnan
from statistics import median
from typing import Any, NamedTuple

from slipstream.errors import UserError
from slipstream.schedule.actions import Kind, Schedule
from slipstream.schedule.timeline import Span

PerStage = float | Sequence[float]


MOST = 1e15  # of a cost: sums of larger ones overflow


@dataclass(frozen=True)
class Costs:
    """Seconds (or any unit) of each action: one number for all stages, or one per stage.

    A stage here is what one rank holds; a schedule with v chunks per rank splits each cost in v, unless a
    cost is given for every model stage. A split backward costs half of `backward` for each half unless told.
    `latency` may be given per link (P-1 numbers); a message also takes message_bytes / bandwidth, one at a
    time per link and direction. Receives are posted ahead, unless `on_demand`: then a message sets out only
    when both ends are there, and its receiver waits for all of it. `overhead` is what the runtime takes of
    the rank for every forward, backward or half of one, beside the computation. `update` occupies the rank;
    `update_latency` is what must still happen between the last stage's update and the publication of the
    weights (reductions, the global norm) and occupies no one. `jitter` is the relative standard deviation of
    every duration, drawn from `seed`; `drift` that of a rank's whole group, for a rank that is slow for longer
    than an action: depth hides the first, and much less of the second.
    """

    forward: PerStage = 1.0
    backward: PerStage = 2.0
    backward_input: PerStage | None = None
    backward_weight: PerStage | None = None
    update: PerStage = 0.0
    update_latency: float = 0.0
    latency: PerStage = 0.0
    message_bytes: float = 0.0
    bandwidth: float = inf  # bytes per second
    on_demand: bool = False
    overhead: float = 0.0
    jitter: float = 0.0
    drift: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            numbers = value if isinstance(value, Sequence) else () if value is None else (value,)
            if any(isnan(number) or number < 0 for number in numbers):
                raise UserError(f"The cost {field.name} must be 0 or more, not {value}.")
            if field.name != "bandwidth" and any(number > MOST for number in numbers):
                raise UserError(f"The cost {field.name} must be at most {MOST:g}, but it is {value}.")
        if self.bandwidth == 0:
            raise UserError("The bandwidth must be above 0 bytes per second. Leave it out for no limit.")


def measured_costs(spans: Iterable[Span]) -> dict[str, Any]:
    """What a run's actions typically took, by model stage: the arguments of `Costs` that predict the same schedule."""
    times: dict[tuple[Kind, int], list[float]] = {}
    for span in spans:
        times.setdefault((span.action.kind, span.action.stage), []).append(span.end - span.start)
    stages = range(1 + max(stage for _, stage in times))

    def typical(kind: Kind) -> list[float]:
        return [median(times.get((kind, stage), (0.0,))) for stage in stages]

    found = {"forward": typical(Kind.FORWARD), "update": typical(Kind.UPDATE)}
    if any(kind is Kind.BACKWARD_WEIGHT for kind, _ in times):
        halves = {"backward_input": Kind.BACKWARD_INPUT, "backward_weight": Kind.BACKWARD_WEIGHT}
        return found | {name: typical(kind) for name, kind in halves.items()}
    return found | {"backward": typical(Kind.BACKWARD)}


class StageCosts(NamedTuple):
    """`Costs` spread over the model stages of one schedule."""

    duration: dict[Kind, list[float]]  # by kind, then model stage
    latency: list[float]  # edge e joins model stages e and e+1; free within a rank
    transfer: list[float]  # seconds one message holds its edge


def spread(costs: Costs, schedule: Schedule) -> StageCosts:
    """One number per model stage and per edge between model stages."""
    forward = _per_stage("forward", costs.forward, schedule)
    half_input, half_weight = costs.backward_input, costs.backward_weight
    backward = _per_stage("backward", costs.backward, schedule)
    if half_input is not None and half_weight is not None:
        inputs = _per_stage("backward_input", half_input, schedule)
        weights = _per_stage("backward_weight", half_weight, schedule)
        backward = [i + w for i, w in zip(inputs, weights, strict=True)]
    elif half_input is None and half_weight is None:
        inputs = weights = [b / 2 for b in backward]
    else:
        raise UserError("Give both backward_input and backward_weight, or neither (each is then half).")
    latency, transfer = _per_edge(costs, schedule)
    return StageCosts(
        duration={
            Kind.FORWARD: [seconds + costs.overhead for seconds in forward],
            Kind.BACKWARD: [seconds + costs.overhead for seconds in backward],
            Kind.BACKWARD_INPUT: [seconds + costs.overhead for seconds in inputs],
            Kind.BACKWARD_WEIGHT: [seconds + costs.overhead for seconds in weights],
            Kind.UPDATE: _per_stage("update", costs.update, schedule),
        },
        latency=latency,
        transfer=transfer,
    )


def _per_stage(name: str, value: PerStage, schedule: Schedule) -> list[float]:
    chunks, total = schedule.chunks, schedule.model_stages
    if not isinstance(value, Sequence):
        return [value / chunks] * total
    if len(value) == total:
        return list(map(float, value))
    if len(value) == schedule.stages:
        placement = schedule.placement()
        return [value[placement[stage]] / chunks for stage in range(total)]
    raise UserError(
        f"{len(value)} values of {name} do not fit {schedule.stages} stages: give 1 or {schedule.stages}."
    )


def _per_edge(costs: Costs, schedule: Schedule) -> tuple[list[float], list[float]]:
    links, per_link = schedule.stages - 1, costs.latency
    if not isinstance(per_link, Sequence):
        per_link = [per_link] * links
    elif len(per_link) != links:
        raise UserError(f"{len(per_link)} latencies do not fit {links} links: give 1 or {links}.")
    placement = schedule.placement()
    latency, transfer = [], []
    for stage in range(schedule.model_stages - 1):
        low, high = sorted((placement[stage], placement[stage + 1]))
        # An interleaved schedule wraps from the last rank to the first: over the slowest link there is.
        latency.append(0.0 if low == high else per_link[low] if high == low + 1 else max(per_link))
        transfer.append(0.0 if low == high else costs.message_bytes / costs.bandwidth)
    return latency, transfer
