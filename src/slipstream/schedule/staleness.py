"""Which weights each microbatch reads and which update it feeds: the only definition of delay.

The rule (`reads`), with z_g the master before update g, b_g the bank published with it, and c_g the group's cutover
(`cutover.py`: m is 2BW, 0 is synchronous):

    microbatch k of group g reads b_max(g-d, 0)  if k < c_g, d = 1 in the pipeline   (the old part)
                                  z_g            otherwise                           (the fresh part)

b_0 is z_0, so group 0 reads z_0 whatever its cutover.

The delay of a microbatch is u - v: it was computed on version v and is applied to version u, where a
version counts the stage's updates. Mismatch is the backward's version minus the forward's.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from slipstream.schedule.actions import Action, Kind, Schedule, Weights


@dataclass(frozen=True, slots=True)
class Read:
    """The weights a microbatch reads: the master z_index or the bank b_index."""

    kind: Literal["master", "bank"]
    index: int


def reads(group: int, microbatch: int, cutover: Callable[[int], int], delay: int = 1) -> Read:
    """What microbatch `microbatch` of group `group` reads, when `cutover(g)` of each group are old."""
    if group == 0 or microbatch >= cutover(group):
        return Read("master", group)
    return Read("bank", max(group - delay, 0))


class Gradient(NamedTuple):
    """What one microbatch's gradient on one stage was made of: versions count the stage's updates."""

    stage: int
    group: int
    microbatch: int
    forward: int  # the version its forward read
    backward: int  # the version its backward read
    update: int  # the update it feeds, which is also the version it is applied to

    @property
    def delay(self) -> int:
        return self.update - self.forward

    @property
    def mismatch(self) -> int:
        return self.backward - self.forward


def with_versions(schedule: Schedule) -> Schedule:
    """The schedule with each action's version filled in by the rule its `weights` names."""
    banks, stashed = schedule.weights is Weights.BANKS, schedule.weights is Weights.STASH
    last = schedule.microbatches - 1
    parts = [schedule.old_part(group) for group in range(schedule.groups)]
    old = [reads(group, 0, schedule.old_part).index for group in range(schedule.groups)]
    fresh = [reads(group, last, schedule.old_part).index for group in range(schedule.groups)]
    ranks = []
    make: Any = tuple.__new__  # without the call between: there may be a million of them
    update = Kind.UPDATE
    for actions in schedule.ranks:
        updates: defaultdict[int, int] = defaultdict(int)  # stage -> updates done
        stash: dict[tuple[int, int, int | None], int] = {}
        row = []
        for kind, stage, microbatch, group, _ in actions:
            if kind is update:
                updates[stage] += 1
                version = updates[stage]
            elif banks:
                version = old[group] if (microbatch or 0) < parts[group] else fresh[group]
            elif stashed:
                version = stash.setdefault((stage, group, microbatch), updates[stage])
            else:
                version = updates[stage]
            row.append(make(Action, (kind, stage, microbatch, group, version)))
        ranks.append(tuple(row))
    return replace(schedule, ranks=tuple(ranks))


def gradients(schedule: Schedule) -> list[Gradient]:
    """Every gradient that reaches an update: the two versions it was computed on and the update it feeds."""
    found = []
    for actions in schedule.ranks:
        forwards: dict[tuple[int, int, int | None], int] = {}
        waiting: defaultdict[int, list[Action]] = defaultdict(list)
        for action in actions:
            kind, stage, microbatch, group, version = action
            if kind is Kind.FORWARD:
                forwards[stage, group, microbatch] = version or 0
            elif kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT):
                waiting[stage].append(action)
            elif kind is Kind.UPDATE:
                applied_to = (version or 0) - 1
                for backward in waiting.pop(stage, ()):
                    key = (stage, backward.group, backward.microbatch)
                    found.append(
                        Gradient(
                            stage,
                            backward.group,
                            backward.microbatch or 0,
                            forwards[key],
                            backward.version or 0,
                            applied_to,
                        )
                    )
    return found


class Staleness(NamedTuple):
    """The worst of each model stage over the whole schedule."""

    delay: tuple[int, ...]  # 0 when flushed, 1 for 2BW, P-1-s for PipeDream
    mismatch: tuple[int, ...]  # 0 wherever the forward's weights are kept for its backward


def staleness(schedule: Schedule) -> Staleness:
    """The largest delay and the largest forward/backward mismatch of each model stage."""
    delay = [0] * schedule.model_stages
    mismatch = [0] * schedule.model_stages
    for stage, _, _, forward, backward, update in gradients(schedule):
        if update - forward > delay[stage]:
            delay[stage] = update - forward
        if backward - forward > mismatch[stage]:
            mismatch[stage] = backward - forward
    return Staleness(tuple(delay), tuple(mismatch))
