"""The flushed schedules: the compute order of one group on each rank, delay 0.

Each generator returns `order[rank]`, a list of (kind, model stage, microbatch); `generate.build` repeats it
per group and ends every group with an update and a barrier. With F forwards run ahead of the first backward
(the warm-up), 1F1B on rank r of P is

    F x (P-1-r),  then F B F B ...,  then the backwards left over.

The orders are those that torch's schedule classes execute (a test compares them).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

from slipstream.errors import UserError
from slipstream.schedule.actions import Kind

Step = tuple[Kind, int, int]  # kind, model stage, microbatch


def warm_up_then_alternate(forwards: Sequence[Step], backwards: Sequence[Step], warm_up: int) -> list[Step]:
    """`warm_up` forwards, then one forward and one backward in turn, then the backwards left over."""
    order = list(forwards[:warm_up])
    for forward, backward in zip(forwards[warm_up:], backwards, strict=False):
        order += (forward, backward)
    return order + list(backwards[max(len(forwards) - warm_up, 0) :])


def gpipe(stages: int, microbatches: int) -> list[list[Step]]:
    """All forwards, then all backwards in the same order of microbatches."""
    return [
        [(kind, rank, k) for kind in (Kind.FORWARD, Kind.BACKWARD) for k in range(microbatches)]
        for rank in range(stages)
    ]


def one_f_one_b(stages: int, microbatches: int) -> list[list[Step]]:
    """1F1B: at most P - r activations on rank r instead of GPipe's m, at the same bubble."""
    orders = []
    for rank in range(stages):
        forwards = [(Kind.FORWARD, rank, k) for k in range(microbatches)]
        backwards = [(Kind.BACKWARD, rank, k) for k in range(microbatches)]
        orders.append(warm_up_then_alternate(forwards, backwards, stages - 1 - rank))
    return orders


def interleaved_1f1b(stages: int, microbatches: int, chunks: int = 2) -> list[list[Step]]:
    """1F1B over `chunks` slices per rank (rank r holds stages r, r+P, ...): about 1/chunks of the bubble.

    Microbatches go in rounds: a whole round passes one slice before the rank turns to its next slice.
    """
    if chunks < 2:
        raise UserError("interleaved_1f1b needs at least 2 chunks per rank. With 1, use 1f1b.")
    rounds = max(1, microbatches // stages)
    if microbatches % rounds:
        raise UserError(
            f"interleaved_1f1b cannot cut {microbatches} microbatches into {rounds} equal rounds "
            f"(one per {stages} stages). Set the microbatches to a multiple of {stages}."
        )
    per_round = microbatches // rounds
    orders = []
    for rank in range(stages):
        slots = [
            (chunk, start + k)
            for start, chunk, k in product(range(0, microbatches, per_round), range(chunks), range(per_round))
        ]
        forwards = [(Kind.FORWARD, chunk * stages + rank, k) for chunk, k in slots]
        backwards = [(Kind.BACKWARD, (chunks - 1 - chunk) * stages + rank, k) for chunk, k in slots]
        warm_up = (chunks - 1) * per_round + 2 * (stages - 1 - rank)
        orders.append(warm_up_then_alternate(forwards, backwards, warm_up))
    return orders
