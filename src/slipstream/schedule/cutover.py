"""The cutover c: how many microbatches of a group must be old.

Stage 0 ends group g-1's last backward right after it has run the first w_0 forwards of group g, so only those (and a
few more while the update runs) have to read the bank b_{g-1}. The others can read z_g, the newest weights:

    c = m    PipeDream-2BW: the whole group is one update old
    c = 0    synchronous training: the group waits for the update before it
    between  c of m microbatches are old: a delay of c/m of an update

Invariant: a cutover is a function of the group alone, so all stages agree on it without a word.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from slipstream.errors import UserError

Predicate = Callable[[int], bool]
GivenCutover = int | Callable[[int], int] | None
FELT = 1.01  # an update that waiting at the cutover makes so many times as long is worth a figure


def free_cutover(stages: int, microbatches: int, in_flight: int | None = None, slack: int = 1) -> int:
    """The least cutover at which no stage waits, c = w_0 + `slack`: with the least warm-up, and a pair of slack, P.

    `slack` is the number of forward/backward pairs an update takes, from stage 0's last backward to the weights,
    rounded up: one that took no time at all would do with none.
    """
    warm_up = (stages if in_flight is None else in_flight) - 1
    return min(microbatches, warm_up + slack)


def default_cutover(stages: int, microbatches: int, on_host: bool = False) -> int:
    """What a schedule takes unless told: a pair more than is free by the clockwork, P + 1.

    At c = P an update has to be done in no time. Measured on four parts of a GPU that costs 3 % of an update, and one
    pair of slack brings most of it back (docs/notes/cutover.md).

    On processors messages take a tenth of a pair and cores are late. 2P - 1 in flight hide both (`pipeline/depth.py`).
    With so many nothing waits from c = w_0 = 2P - 2 on, and one less costs two links an update, once. Up to four stages
    that is no more than P + 1.
    """
    if stages == 1:
        return 1
    return min(microbatches, max(stages + 1, 2 * stages - 3 if on_host else 0))


@dataclass(frozen=True)
class Cutover:
    """c by group: `given`, or 0 for a group that is flushed (`synchronous`) or follows one that is."""

    microbatches: int
    given: int | Callable[[int], int]
    synchronous: Predicate

    def __post_init__(self) -> None:
        if not callable(self.given):
            self._check(self.given, "")

    def __call__(self, group: int) -> int:
        if self.synchronous(group) or (group > 0 and self.synchronous(group - 1)):
            return 0
        if not callable(self.given):
            return self.given
        found = self.given(group)
        self._check(found, f" of group {group}")
        return found

    @property
    def most(self) -> int:
        """No group has more of its microbatches old; 0 where none ever is."""
        return self.microbatches if callable(self.given) else self.given

    @property
    def mixed(self) -> bool:
        """Whether a group may have an old part and a fresh one."""
        return callable(self.given) or 0 < self.given < self.microbatches

    def _check(self, value: object, where: str) -> None:
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= self.microbatches:
            raise UserError(
                f"The cutover{where} is {value!r}: give how many of the {self.microbatches} microbatches read the "
                f"bank, from 0 (synchronous) to {self.microbatches} (PipeDream-2BW)."
            )


def never(group: int) -> bool:
    return False


def always(group: int) -> bool:
    return True
