"""Which of some depths has the shortest updates: each is had for a while, and timed on stage 0.

A depth that is reckoned from the times of single actions rests on what they are taken to mean. On four parts of one
GPU, where a stage is faster while its neighbours wait, their spread passed for slow links, and twice as many were kept
in flight as were good (docs/notes/engine.md). So on a GPU, where nothing else runs beside, depths are tried.

Invariant: a trial is a function of the group and of what all ranks have heard, so all of them have the same depth in
the same group. Stages that did not would wait for each other for ever.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

WINDOW = 6  # updates that are timed for each depth: an even number, as they may take turns at being long
GROUPS_OF_A_TRIAL = 4 * (WINDOW + 5)  # of four depths, with what passes until a group is heard of
MOST_GROUPS = 60  # that one depth is tried for; a run that pauses all the time has nothing to gain
WORTH = 0.01  # a longer time below this share is not worth the activations of a deeper pipeline


def depths_to_try(stages: int, cutover: int, wanted: int) -> list[int]:
    """From the least, P, to the most that links and jitter may ask for: what the cutover allows without a flush, and
    one pair ahead for each link, in between."""
    return sorted({stages, min(max(stages, cutover), wanted), min(2 * stages - 1, wanted), wanted})


class Trial:
    """Of `depths`, in their order; `group` is the first that enters with the first of them."""

    def __init__(self, depths: Sequence[int], group: int) -> None:
        self._left = list(depths)
        self._seconds: dict[int, float] = {}  # an update, by depth
        self._heard = -1.0  # the last update that was told
        self._begin(group)

    def _begin(self, group: int) -> None:
        self._taken: list[float] = []
        self._groups = 0
        self.skip(group)

    @property
    def depth(self) -> int:
        """The one to have now: the best, when all have been tried, and the least of those that are as good."""
        if self._left:
            return self._left[0]
        best = min(self._seconds.values())
        return min(depth for depth, taken in self._seconds.items() if taken <= best * (1 + WORTH))

    @property
    def over(self) -> bool:
        return not self._left

    def skip(self, group: int) -> None:
        """Nothing that is still to be heard of counts up to `group` and the next one, which begins as it ends."""
        self._from = group + 2

    def hear(self, group: int, update: float, seconds: float) -> None:
        """Before `group` enters: `update` is the last that stage 0 has done, `seconds` after the one before it."""
        self._groups += 1
        if update >= self._from and update > self._heard and seconds > 0:
            self._taken.append(seconds)
        self._heard = update
        if len(self._taken) == WINDOW:
            self._seconds[self._left.pop(0)] = median(self._taken)
            self._begin(group)
        elif self._groups > MOST_GROUPS:
            self._seconds = self._seconds or {self._left[0]: 0.0}
            self._left.clear()
