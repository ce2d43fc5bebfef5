"""The lowest validation loss so far: which state to keep, and when to stop waiting for a better one."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass
class Best:
    """Every rank sees the same losses at the same steps, so all of them agree."""

    step: int | None = None
    loss: float = math.inf
    since: int = 0  # validations after the best one

    @classmethod
    def after(cls, validations: Iterable[tuple[int, float]]) -> Best:
        best = cls()
        for step, loss in validations:
            best.see(step, loss)
        return best

    def see(self, step: int, loss: float) -> bool:
        """Take note of a validation; whether it is the best so far."""
        if loss < self.loss:
            self.step, self.loss, self.since = step, loss, 0
            return True
        self.since += 1
        return False
