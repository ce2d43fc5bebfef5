"""Which of some depths has the shortest updates: each is had for a while, and timed by stage 0's clock.

A depth that is reckoned from the times of single actions rests on what they are taken to mean. On four parts of one
GPU, where a stage is faster while its neighbours wait, their spread passed for slow links, and twice as many were kept
in flight as were good (docs/notes/engine.md). So on a GPU, where nothing else runs beside, depths are tried.

Invariant: a trial is a function of what all ranks have heard, so all of them have the same depth in the same group.
"""

from __future__ import annotations

from collections.abc import Sequence

WINDOW = 8  # updates that are timed for each depth
GROUPS_OF_A_TRIAL = 4 * (WINDOW + 6)  # of four depths, with what passes until a group is heard of
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
        self._groups = 0  # for which the present one has been tried
        self.pause(group)

    @property
    def depth(self) -> int:
        """The one to have now: the best, when all have been tried, and the least of those that are as good."""
        if self._left:
            return self._left[0]
        best = min(self._seconds.values(), default=0.0)
        return min(depth for depth, taken in self._seconds.items() if taken <= best * (1 + WORTH))

    @property
    def over(self) -> bool:
        return not self._left

    def pause(self, group: int) -> None:
        """What came before `group` does not count, nor `group` itself, with which the pipeline fills again."""
        self._from = group + 1
        self._first: tuple[float, float] | None = None

    def hear(self, group: int, update: float, at: float) -> None:
        """Before `group` enters: stage 0 had done `update` at the time `at` of its clock, and no later one."""
        self._groups += 1
        if self._groups > MOST_GROUPS:
            self._next(group, give_up=True)
        elif update < self._from:
            return
        elif self._first is None:
            self._first = (update, at)
        elif update - self._first[0] >= WINDOW:
            self._seconds[self._left[0]] = (at - self._first[1]) / (update - self._first[0])
            self._next(group)

    def _next(self, group: int, give_up: bool = False) -> None:
        if give_up:
            self._seconds = self._seconds or {self._left[0]: 0.0}
            self._left.clear()
            return
        self._left.pop(0)
        self._groups = 0
        self.pause(group)
