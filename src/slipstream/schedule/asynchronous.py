"""The schedules that never flush: stage s runs w_s forwards once, then F_k, B_{k-w_s} for ever.

They differ in the weights they read and in when they step, not in this order:

    pipedream      steps after every backward, stashes a forward's weights:  delay P-1-s, P-s versions
    pipedream_2bw  steps once per group, reads the bank of the group before: delay 1, two banks
    paci           steps every `every` backwards, stashes nothing: forward and backward may differ by
                   up to ceil((P-1)/every) updates
"""

from __future__ import annotations

from collections import deque

from slipstream.errors import UserError
from slipstream.schedule.actions import Action, Kind


def pipedream(stages: int, microbatches: int, groups: int) -> list[list[Action]]:
    """PipeDream with weight stashing: every microbatch is an update of its own."""
    return [_rank(stage, microbatches, groups, stages - 1 - stage, every=1) for stage in range(stages)]


def paci(stages: int, microbatches: int, groups: int, every: int | None = None) -> list[list[Action]]:
    """PACI: one copy of the weights, a step every `every` local backwards (by default once per group)."""
    every = microbatches if every is None else every
    return [_rank(stage, microbatches, groups, stages - 1 - stage, every) for stage in range(stages)]


def pipedream_2bw(
    stages: int, microbatches: int, groups: int, in_flight: int | None = None, cutover: int | None = None
) -> list[list[Action]]:
    """PipeDream-2BW with `in_flight` microbatches on stage 0 (P by default; more hides link latency).

    `cutover`: microbatches from this one on read the newest weights. Before the first of them a stage lets the
    backwards of the group before go first, which is a part of a flush where the cutover is below the warm-up.
    """
    warm_ups = warm_up_2bw(stages, microbatches, in_flight)
    old = microbatches if cutover is None else cutover
    return [_rank_2bw(stage, microbatches, groups, warm_up, old) for stage, warm_up in enumerate(warm_ups)]


def warm_up_2bw(stages: int, microbatches: int, in_flight: int | None = None) -> list[int]:
    """w_s = ceil((K-1)(P-1-s)/(P-1)) for K in flight on stage 0: P-1-s at the least, and w_0 <= m."""
    if microbatches < stages:
        raise UserError(
            f"pipedream_2bw needs at least as many microbatches as stages: {microbatches} < {stages}. "
            f"Set the microbatches to {stages} or more, or use fewer stages."
        )
    in_flight = stages if in_flight is None else in_flight
    if not stages <= in_flight <= microbatches + 1:
        raise UserError(
            f"pipedream_2bw cannot keep {in_flight} microbatches in flight on stage 0. With {stages} stages "
            f"and {microbatches} microbatches, set in_flight from {stages} (the least that fills the "
            f"pipeline) to {microbatches + 1} (the most that two banks allow)."
        )
    if stages == 1:
        return [in_flight - 1]
    return [-(-(in_flight - 1) * (stages - 1 - s) // (stages - 1)) for s in range(stages)]


def _rank_2bw(stage: int, microbatches: int, groups: int, warm_up: int, cutover: int) -> list[Action]:
    """One stage's order, as the engine runs it: backwards are due when more than the warm-up are in flight, or when the
    next forward reads the weights that they make."""
    order: list[Action] = []
    flight: deque[tuple[int, int]] = deque()

    def backward() -> None:
        group, microbatch = flight.popleft()
        order.append(Action(Kind.BACKWARD, stage, microbatch, group))
        if microbatch + 1 == microbatches:
            order.append(Action(Kind.UPDATE, stage, None, group))

    for group in range(groups):
        for microbatch in range(microbatches):
            while microbatch == cutover and flight and flight[0][0] < group:
                backward()
            order.append(Action(Kind.FORWARD, stage, microbatch, group))
            flight.append((group, microbatch))
            if len(flight) > warm_up:
                backward()
    while flight:
        backward()
    return order


def _rank(stage: int, microbatches: int, groups: int, warm_up: int, every: int) -> list[Action]:
    """One stage's order over all groups; the backwards left at the end of the run make a last update."""
    total = microbatches * groups
    order: list[Action] = []
    for k in range(total + warm_up):
        if k < total:
            order.append(Action(Kind.FORWARD, stage, k % microbatches, k // microbatches))
        done = k - warm_up
        if 0 <= done < total:
            group = done // microbatches
            order.append(Action(Kind.BACKWARD, stage, done % microbatches, group))
            if (done + 1) % every == 0 or done + 1 == total:
                order.append(Action(Kind.UPDATE, stage, None, group))
    return order
