"""The flushed schedules that split the backward: I (input gradient) travels on at once, W (weight gradient)
has no one waiting for it and fills what would be a bubble.

`zbv` and `dualpipev` fold the model into a V: rank r holds stage r (slice `a`) on the way down and stage
2P-1-r (slice `z`) on the way up, so rank 0 holds both the first stage and the last. Each is written as
phases: a pattern of actions and how often it is repeated. The orders are those that torch's schedule
classes execute (a test compares them).
"""

from __future__ import annotations

from collections import Counter

from slipstream.errors import UserError
from slipstream.schedule.actions import Kind
from slipstream.schedule.synchronous import Step, warm_up_then_alternate


def zb_h1(stages: int, microbatches: int) -> list[list[Step]]:
    """1F1B with W delayed by r microbatches on rank r: a third of the bubble at 1F1B's peak memory."""
    orders = []
    for rank in range(stages):
        forwards = [(Kind.FORWARD, rank, k) for k in range(microbatches)]
        inputs = [(Kind.BACKWARD_INPUT, rank, k) for k in range(microbatches)]
        order: list[Step] = []
        for step in warm_up_then_alternate(forwards, inputs, stages - 1 - rank):
            order.append(step)
            if step[0] is Kind.BACKWARD_INPUT and step[2] >= rank:
                order.append((Kind.BACKWARD_WEIGHT, rank, step[2] - rank))
        late = range(max(microbatches - rank, 0), microbatches)
        orders.append(order + [(Kind.BACKWARD_WEIGHT, rank, k) for k in late])
    return orders


def zbv(stages: int, microbatches: int) -> list[list[Step]]:
    """ZB-V: bubble (P-1)/(6m+P-1) when F, I and W cost the same, at 1F1B's peak memory on every rank."""
    # The phases need 2P-1 microbatches; with fewer, the surplus is struck out at the end.
    total = max(2 * stages - 1, microbatches)
    orders = []
    for rank in range(stages):
        steady = total - 2 * stages + 1 + rank
        tape = _Tape(a=rank, z=2 * stages - 1 - rank)
        tape.repeat("Fa", 2 * (stages - rank) - 1)
        tape.repeat("Fz Fa", rank)
        tape.repeat("Fz Iz Wz", stages - rank)
        tape.repeat("Fa Ia Wa Fz Iz Wz", steady)
        tape.repeat("Ia Wa Fz Iz Wz", stages - 1 - rank)
        tape.repeat("Ia Iz", rank)
        tape.repeat("Ia Wa", stages - rank)
        tape.repeat("Wz", rank)
        tape.repeat("Wa", rank)
        orders.append([step for step in tape.steps if step[2] < microbatches])
    return orders


def dualpipev(stages: int, microbatches: int) -> list[list[Step]]:
    """DualPipeV: F of one microbatch beside B of another; split backwards only while filling and draining."""
    if microbatches < 2 * stages:
        raise UserError(
            f"dualpipev needs two microbatches per stage: {microbatches} are too few for {stages} stages. "
            f"Set the microbatches to {2 * stages} or more."
        )
    orders = []
    for rank in range(stages):
        after = stages - 1 - rank  # ranks further down
        half = (rank + 1) // 2
        tape = _Tape(a=rank, z=2 * stages - 1 - rank)
        tape.repeat("Fa", 2 * after)
        tape.repeat("Fa Fz", rank + 1)
        tape.repeat("Iz W Fz", after)
        tape.repeat("Fa Bz Fz Ba", microbatches - 2 * stages + rank + 1)
        tape.repeat("Bz Fz Ba", after)
        tape.repeat("Bz Ba", half)
        tape.repeat("Bz Ia", 1 - rank % 2)
        tape.repeat("Iz Ia", half)
        tape.repeat("W Ia", after)
        tape.repeat("W", rank + 1)
        orders.append(tape.steps)
    return orders


class _Tape:
    """Writes one rank's order: each slice counts its own microbatches, W takes the oldest I still open."""

    def __init__(self, a: int, z: int) -> None:
        self.steps: list[Step] = []
        self._stage = {"a": a, "z": z}
        self._next: Counter[tuple[bool, int]] = Counter()  # (forward?, stage) -> microbatch
        self._open: list[tuple[int, int]] = []

    def repeat(self, pattern: str, times: int) -> None:
        """`pattern` is words like "Fa" (kind, slice); a bare "W" takes the oldest open I of either slice."""
        for word in pattern.split() * times:
            kind = Kind(word[0])
            if kind is Kind.BACKWARD_WEIGHT:
                wanted = {self._stage[word[1]]} if len(word) == 2 else set(self._stage.values())
                oldest = next(entry for entry in self._open if entry[0] in wanted)
                self._open.remove(oldest)
                self.steps.append((kind, *oldest))
                continue
            stage = self._stage[word[1]]
            key = (kind is Kind.FORWARD, stage)
            self.steps.append((kind, stage, self._next[key]))
            if kind is Kind.BACKWARD_INPUT:
                self._open.append((stage, self._next[key]))
            self._next[key] += 1
