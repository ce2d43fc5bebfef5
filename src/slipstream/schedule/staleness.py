"""Which weights each microbatch reads and which update it feeds: the only definition of delay.

The rule of 2BW (`reads`), with z_g the master before update g and b_g the bank published with it:

    group g reads z_g           if g or g-1 is synchronous (group -1 is)
    group g reads b_max(g-d, 0) otherwise, d = 1 in the pipeline

The delay of a microbatch is u - v: it was computed on version v and is applied to version u, where a
version counts the stage's updates. Mismatch is the backward's version minus the forward's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple


class Read(NamedTuple):
    """The weights a group reads: the master z_index or the bank b_index."""

    kind: Literal["master", "bank"]
    index: int


def reads(group: int, synchronous: Callable[[int], bool], delay: int = 1) -> Read:
    """What group `group` reads, when `synchronous(g)` says which groups are flushed."""
    if group == 0 or synchronous(group) or synchronous(group - 1):
        return Read("master", group)
    return Read("bank", max(group - delay, 0))
