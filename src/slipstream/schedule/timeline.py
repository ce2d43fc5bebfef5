"""When every action ran, predicted by the simulator or measured in a run, and what follows from it.

Time per update and bubble are those of the steady state: measured per rank between the ends of two groups,

    time per update = (end of group b - end of group a) / (b - a)
    bubble          = 1 - busy time in between / (end of group b - end of group a)

with b the last group but one (the last drains, so it is not typical) and a halfway before it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf
from operator import sub
from typing import NamedTuple

from slipstream.errors import UserError
from slipstream.schedule import occupancy
from slipstream.schedule.actions import Action


class Span(NamedTuple):
    """One action on the clock, in seconds."""

    rank: int
    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """`ranks[r][i]` ran from `starts[r][i]` to `ends[r][i]`."""

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
        for rank, row in enumerate(rows):
            if not row:
                raise UserError(f"The timeline has spans of rank {len(rows) - 1} but none of rank {rank}.")
        return cls(
            ranks=tuple(tuple(span.action for span in row) for row in rows),
            starts=tuple([span.start for span in row] for row in rows),
            ends=tuple([span.end for span in row] for row in rows),
        )

    @cached_property
    def spans(self) -> tuple[Span, ...]:
        rows = zip(self.ranks, self.starts, self.ends, strict=True)
        return tuple(Span(rank, *entry) for rank, row in enumerate(rows) for entry in zip(*row, strict=True))

    @property
    def begin(self) -> float:
        return min(row[0] for row in self.starts)

    @property
    def makespan(self) -> float:
        """From the first start to the last end."""
        return max(row[-1] for row in self.ends) - self.begin

    @property
    def idle_fraction(self) -> tuple[float, ...]:
        """The share of the whole finite run that each rank idles, filling and draining included."""
        return tuple(_idle(self.makespan, self._busy(rank, 0, None)) for rank in range(len(self.ranks)))

    @property
    def time_per_update(self) -> float:
        """Seconds per group in the steady state (the whole run when there is one group only)."""
        return max(window.length / window.groups for window in self._windows)

    @property
    def bubble_fraction(self) -> tuple[float, ...]:
        """The share of the steady state that each rank idles."""
        return tuple(_idle(window.length, window.busy) for window in self._windows)

    @cached_property
    def peak_activations(self) -> tuple[int, ...]:
        """The most microbatches in flight, per model stage."""
        return occupancy.peak_activations(self.ranks, self._model_stages)

    @cached_property
    def banks(self) -> tuple[int, ...]:
        """The most weight versions alive, per model stage."""
        return occupancy.banks(self.ranks, self._model_stages)

    @cached_property
    def _groups(self) -> list[int]:
        """The groups that every rank has begun (a measurement may stop anywhere)."""
        return sorted(set.intersection(*({action.group for action in actions} for actions in self.ranks)))

    @property
    def _model_stages(self) -> int:
        return 1 + max(action.stage for actions in self.ranks for action in actions)

    def time_of_span(self, count: int) -> float:
        """How long the run lasts until `count` actions have begun: where a picture may have to stop."""
        if sum(map(len, self.ranks)) <= count:
            return inf
        return sorted(start for row in self.starts for start in row)[count] - self.begin

    def settled(self, tolerance: float) -> bool:
        """Whether the last two periods before the drain agree, on every rank and between ranks."""
        groups = self._groups
        periods = []
        for actions, ends in zip(self.ranks, self.ends, strict=True):
            final = {action.group: end for action, end in zip(actions, ends, strict=True)}
            a, b, c = (final[group] for group in groups[-4:-1])
            periods += [b - a, c - b]
        return max(periods) - min(periods) <= tolerance * max(periods)

    @cached_property
    def _windows(self) -> tuple[_Window, ...]:
        """What the steady state is measured on, per rank."""
        groups = self._groups
        if len(groups) < 2:
            return tuple(
                _Window(self.makespan, 1, self._busy(rank, 0, None)) for rank in range(len(self.ranks))
            )
        last = max(len(groups) - 2, 1)
        first = last // 2
        windows = []
        for rank, actions in enumerate(self.ranks):
            final = {action.group: position for position, action in enumerate(actions)}
            a, b = final[groups[first]], final[groups[last]]
            length = self.ends[rank][b] - self.ends[rank][a]
            windows.append(_Window(length, last - first, self._busy(rank, a + 1, b + 1)))
        return tuple(windows)

    def _busy(self, rank: int, begin: int, end: int | None) -> float:
        # Difference first: measured clocks are large numbers, and their sums would drown a microsecond.
        return sum(map(sub, self.ends[rank][begin:end], self.starts[rank][begin:end]))


class _Window(NamedTuple):
    length: float
    groups: int
    busy: float


def _idle(whole: float, busy: float) -> float:
    return max(0.0, 1.0 - busy / whole) if whole else 0.0
