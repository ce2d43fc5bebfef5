"""What delay costs a job in tokens: the nearest entry of the table, and how much of that a start leaves.

    with a start    1 + left (penalty - 1),    left = its own excess over that of none where both were measured

A start was measured at few places. At another one it is taken to leave the same share of what delay costs there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from slipstream.errors import UserError
from slipstream.plan.penalty import Penalty, find_penalty, penalty_at, same_sizes
from slipstream.plan.start import split


@dataclass(frozen=True)
class Price:
    table: tuple[Penalty, ...]
    plain: Penalty | None  # None: the table has this correction with a start alone
    started: Penalty | None = None  # None: no start was asked for

    def at(self, old: float, start: bool = False) -> float | None:
        """The penalty where a share `old` of each update is late; None where the table has none without a start."""
        if start and self.started and (self.plain is None or self._beside is None):
            return penalty_at(self.table, self.started, old)
        if self.plain is None:
            return None
        return 1 + (self.left(old) if start else 1.0) * (penalty_at(self.table, self.plain, old) - 1)

    def left(self, old: float = 1.0) -> float:
        """The share of what delay costs that is there with a start too."""
        if self.started is None or self._beside is None:
            return 1.0
        without = penalty_at(self.table, self._beside, old) - 1
        return min(1.0, (penalty_at(self.table, self.started, old) - 1) / without) if without > 0 else 1.0

    def entries(self, start: bool) -> list[Penalty]:
        """Those that the figure is made of."""
        if not (start and self.started):
            return [self.plain] if self.plain else []
        if self.plain is None or self._beside is None or same_sizes(self.started, self.plain):
            return [self.started]
        return [self.plain, self.started]

    @property
    def _beside(self) -> Penalty | None:
        """The entry without a start where the one with it was measured."""
        if self.plain is None or self.started is None:
            return None
        wanted = (self.plain.optimizer, self.plain.correction, 1.0)
        return next(
            (
                entry
                for entry in self.table
                if (entry.optimizer, entry.correction, entry.old) == wanted
                and same_sizes(entry, self.started)
            ),
            None,
        )


def find_price(
    table: Sequence[Penalty], optimizer: str, correction: str, batch_tokens: float, parameters: float
) -> Price:
    """An optimizer or correction without an entry is an error, not a guess."""

    def nearest(name: str) -> Penalty:
        return find_penalty(table, optimizer, name, batch_tokens, parameters)

    always, start = split(correction)
    if not start:
        return Price(tuple(table), nearest(correction))
    started = nearest(correction)
    try:
        plain = nearest(always)
    except UserError:  # a table of one's own may have the start alone
        plain = None
    return Price(tuple(table), plain, started)
