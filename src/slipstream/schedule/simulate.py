"""Schedule + Costs -> Timeline: when each action runs.

An action starts when its rank is free, its input has arrived and the weights it reads are published:

    start = max(rank free, arrival of F from stage-1 or of the gradient from stage+1, publication)

Sends never block and receives are posted ahead, so a link costs time only to the one who waits for it. Where
receives are posted on demand (`Costs.on_demand`) the message sets out when its receiver is free, too.
Invariant: a start depends on earlier actions alone, so a finite run has the times of the infinite schedule up
to its drain: for every group but the last.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterable

from slipstream.schedule.actions import Kind, Schedule
from slipstream.schedule.costs import Costs, StageCosts, spread
from slipstream.schedule.timeline import Span, Timeline

__all__ = ["Costs", "Deadlock", "Span", "Timeline", "simulate"]


class Deadlock(Exception):
    """Every rank that is not done waits for something no one will send: `stuck[rank]` is its position."""

    def __init__(self, stuck: dict[int, int]) -> None:
        super().__init__(f"ranks {sorted(stuck)} wait for ever")
        self.stuck = stuck


def simulate(schedule: Schedule, costs: Costs | None = None) -> Timeline:
    """Run the schedule on the clock. Raises `Deadlock` for an order that cannot be run."""
    costs = costs or Costs()
    per_stage = spread(costs, schedule)
    starts, ends = _run(schedule, _durations(schedule, costs, per_stage), per_stage, costs)
    return Timeline(schedule.ranks, starts, ends)


def _durations(schedule: Schedule, costs: Costs, per_stage: StageCosts) -> list[list[float]]:
    table = per_stage.duration
    durations = [[table[action[0]][action[1]] for action in actions] for actions in schedule.ranks]
    draw = random.Random(costs.seed).gauss
    if costs.jitter:
        durations = [[d * max(0.0, 1.0 + draw(0.0, costs.jitter)) for d in row] for row in durations]
    if costs.drift:
        for row, actions in zip(durations, schedule.ranks, strict=True):
            factors: defaultdict[int, float] = defaultdict(lambda: max(0.0, 1.0 + draw(0.0, costs.drift)))
            row[:] = [duration * factors[action.group] for duration, action in zip(row, actions, strict=True)]
    return durations


def _run(
    schedule: Schedule, durations: list[list[float]], per_stage: StageCosts, costs: Costs
) -> tuple[tuple[list[float], ...], tuple[list[float], ...]]:
    """The event loop: run a rank until it lacks something, and take it up again when that is there.

    A box holds, per microbatch, the time its input arrives at a stage (on demand: is sent to it), or None
    while that is not known, or the tuple of ranks that wait for it: whoever makes it known wakes them.
    """
    forward, weight, update = Kind.FORWARD, Kind.BACKWARD_WEIGHT, Kind.UPDATE
    m, last = schedule.microbatches, schedule.model_stages - 1
    latency, transfer = per_stage.latency, per_stage.transfer
    activations: list[list] = [[None] * (m * schedule.groups) for _ in range(last + 1)]
    gradients: list[list] = [[None] * (m * schedule.groups) for _ in range(last + 1)]
    link_up, link_down = [0.0] * last, [0.0] * last  # when the edge from stage e to e+1, or back, is free
    published = _Publications(schedule, costs.update_latency)
    on_demand = costs.on_demand

    starts: tuple[list[float], ...] = tuple([0.0] * len(row) for row in schedule.ranks)
    ends: tuple[list[float], ...] = tuple([0.0] * len(row) for row in schedule.ranks)
    position = [0] * len(schedule.ranks)
    runnable = list(range(len(schedule.ranks)))[::-1]
    while runnable:
        rank = runnable.pop()
        actions, rank_durations = schedule.ranks[rank], durations[rank]
        rank_starts, rank_ends = starts[rank], ends[rank]
        i = position[rank]
        clock = rank_ends[i - 1] if i else 0.0
        while i < len(actions):
            kind, stage, microbatch, group, version = actions[i]
            k = group * m + (microbatch or 0)
            if kind is not update:
                known = published.times[stage].get(version, ())
                if type(known) is tuple:
                    published.times[stage][version] = (*known, rank)
                    break
                if known > clock:
                    clock = known
                if kind is forward:
                    box = activations[stage] if stage else None
                else:
                    box = gradients[stage] if stage != last and kind is not weight else None
                if box is not None:
                    arrival = box[k]
                    if arrival is None:
                        box[k] = (rank,)
                        break
                    if arrival > clock:
                        clock = arrival
                    if on_demand:
                        edge = stage - 1 if kind is forward else stage
                        clock += transfer[edge] + latency[edge]
            rank_starts[i] = clock
            clock += rank_durations[i]
            rank_ends[i] = clock
            i += 1
            if kind is forward:
                if stage == last:
                    continue
                box, link, edge = activations[stage + 1], link_up, stage
            elif kind is update:
                runnable.extend(published.add(stage, version, clock))
                continue
            elif kind is weight or stage == 0:
                continue
            else:
                box, link, edge = gradients[stage - 1], link_down, stage - 1
            if box[k] is not None:
                runnable.extend(box[k])
            if on_demand:
                box[k] = clock
            else:
                link[edge] = max(clock, link[edge]) + transfer[edge]
                box[k] = link[edge] + latency[edge]
        position[rank] = i
    stuck = {rank: i for rank, i in enumerate(position) if i < len(schedule.ranks[rank])}
    if stuck:
        raise Deadlock(stuck)
    return starts, ends


class _Publications:
    """When each stage's weight versions become readable. Stages that share updates publish together."""

    def __init__(self, schedule: Schedule, update_latency: float) -> None:
        stages = range(schedule.model_stages)
        # stage -> version -> time, or the ranks that wait for it
        self.times: list[dict] = [{None: 0.0, 0: 0.0} for _ in stages]
        self._latency = update_latency
        self._shared = schedule.shared_update
        self._done: dict[int, list[float]] = {}

    def add(self, stage: int, version: int | None, end: float) -> list[int]:
        """Note an update's end; return the ranks that can go on."""
        if not self._shared:
            return self._publish([stage], version, end)
        ends = self._done.setdefault(version or 0, [])
        ends.append(end)
        return (
            self._publish(range(len(self.times)), version, max(ends)) if len(ends) == len(self.times) else []
        )

    def _publish(self, stages: Iterable[int], version: int | None, end: float) -> list[int]:
        woken: list[int] = []
        for stage in stages:
            woken.extend(self.times[stage].get(version, ()))
            self.times[stage][version] = end + self._latency
        return woken
