"""Schedule + Costs -> Timeline: when each action runs, and what follows from it.

An action starts when its rank is free, its input has arrived and the weights it reads are published:

    start = max(rank free, arrival of F from stage-1 or of B from stage+1, publication of the version)

Sends never block and receives are posted ahead, so a link costs time only to the one who waits for it.
Invariant: times are those of the infinite schedule for every action but the last group's drain.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf
from typing import NamedTuple

from slipstream.errors import UserError
from slipstream.schedule.actions import Action


@dataclass(frozen=True)
class Costs:
    """Seconds (or any unit) of each action: one number for all stages, or one per stage.

    A stage here is what one rank holds; a schedule with v chunks per rank splits each cost in v, unless a
    cost is given for every chunk. The two halves of a split backward default to half of `backward` each.
    `latency` may be given per link (P-1 numbers). `update` occupies the rank; `update_latency` is the
    chain of reductions after it that only delays the publication of the new weights. `jitter` is the
    relative standard deviation of every duration, drawn from `seed`.
    """

    forward: float | Sequence[float] = 1.0
    backward: float | Sequence[float] = 2.0
    backward_input: float | Sequence[float] | None = None
    backward_weight: float | Sequence[float] | None = None
    update: float | Sequence[float] = 0.0
    update_latency: float = 0.0
    latency: float | Sequence[float] = 0.0
    message_bytes: float = 0.0
    bandwidth: float = inf  # bytes per second
    jitter: float = 0.0
    seed: int = 0


class Span(NamedTuple):
    """One action on the clock, predicted or measured, in seconds."""

    rank: int
    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """When every action ran. The simulator and the running system both make one."""

    ranks: tuple[tuple[Action, ...], ...]
    starts: tuple[Sequence[float], ...]
    ends: tuple[Sequence[float], ...]

    @classmethod
    def from_spans(cls, spans: Iterable[Span]) -> Timeline:
        """A timeline of measured spans, in any order."""
        ordered = sorted(spans, key=lambda span: (span.rank, span.start, span.end))
        if not ordered:
            raise UserError("A timeline needs at least one span.")
        rows: list[list[Span]] = [[] for _ in range(ordered[-1].rank + 1)]
        for span in ordered:
            rows[span.rank].append(span)
        return cls(
            ranks=tuple(tuple(span.action for span in row) for row in rows),
            starts=tuple([span.start for span in row] for row in rows),
            ends=tuple([span.end for span in row] for row in rows),
        )

    @cached_property
    def spans(self) -> tuple[Span, ...]:
        rows = zip(self.ranks, self.starts, self.ends, strict=True)
        return tuple(Span(rank, *entry) for rank, row in enumerate(rows) for entry in zip(*row, strict=True))
