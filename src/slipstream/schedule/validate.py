"""The laws of a schedule; a broken one is an error that shows its grid with the spot marked.

complete      every microbatch of every group exactly once on every stage, and every update
order         no deadlock when receives block: each action's inputs exist before it is reached
versions      each read is of a version the stage has published, by the rule the schedule names;
              flushed: delay 0; 2BW: from group 1 on and on every stage delay exactly 1 up to the cutover and 0 from
              there, and at most two versions alive
communicator  per direction and pair of ranks, messages are received in the order they are sent, so
              that one NCCL communicator per direction, matching by order alone, cannot cross them
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import NoReturn

from slipstream.errors import UserError
from slipstream.schedule import occupancy
from slipstream.schedule.actions import Action, Kind, Schedule, Weights
from slipstream.schedule.simulate import Deadlock, simulate
from slipstream.schedule.staleness import Gradient, gradients, with_versions


class ScheduleError(UserError):
    """A schedule that breaks a law. The message ends with the grid, the spot marked `>like this<`."""


def check(schedule: Schedule) -> None:
    """Raise `ScheduleError` unless the schedule obeys every law."""
    _check_complete(schedule)
    _check_local_order(schedule)
    _check_versions(schedule)
    _check_no_deadlock(schedule)
    _check_communicators(schedule)


def grid(schedule: Schedule, marks: dict[int, int], around: int = 6) -> str:
    """One line per rank, cut to the neighbourhood of the marked positions (rank -> position)."""
    centre = min(marks.values(), default=0)
    lines = []
    for rank, actions in enumerate(schedule.ranks):
        middle = marks.get(rank, centre)
        low, high = max(0, middle - around), middle + around + 1
        cells = [
            f">{action}<" if marks.get(rank) == position else f" {action} "
            for position, action in enumerate(actions[low:high], start=low)
        ]
        if marks.get(rank) == len(actions):
            cells.append(">end<")
        left, right = "..." if low else "   ", "..." if high < len(actions) else ""
        lines.append(f"  rank {rank:>2} {left}{''.join(cells)}{right}")
    return "\n".join(lines)


def _fail(schedule: Schedule, problem: str, marks: dict[int, int]) -> NoReturn:
    raise ScheduleError(f"The schedule '{schedule.name}' is broken: {problem}\n{grid(schedule, marks)}")


def _check_complete(schedule: Schedule) -> None:
    if len(schedule.ranks) != schedule.stages:
        _fail(schedule, f"it has {len(schedule.ranks)} ranks for {schedule.stages} stages.", {})
    home: dict[int, int] = {}
    seen: Counter[tuple] = Counter()
    for rank, actions in enumerate(schedule.ranks):
        for position, action in enumerate(actions):
            here = {rank: position}
            kind, stage, microbatch, group, version = action
            if not (0 <= stage < schedule.model_stages and 0 <= group < schedule.groups):
                _fail(schedule, f"{action} has no such stage or group.", here)
            if home.setdefault(stage, rank) != rank:
                _fail(schedule, f"stage {stage} is on rank {home[stage]} and on rank {rank}.", here)
            if kind is Kind.UPDATE:
                if microbatch is not None:
                    _fail(schedule, f"{action} has a microbatch, and an update is of a whole group.", here)
                continue
            if microbatch is None or not 0 <= microbatch < schedule.microbatches:
                _fail(schedule, f"{action} has no such microbatch.", here)
            if version is None:
                _fail(schedule, f"{action} does not say which weights it reads.", here)
            key = (kind, stage, group, microbatch)
            seen[key] += 1
            if seen[key] > 1:
                _fail(schedule, f"{action} comes twice.", here)
    for stage in range(schedule.model_stages):
        for group in range(schedule.groups):
            for k in range(schedule.microbatches):
                counts = {kind: seen[kind, stage, group, k] for kind in Kind}
                whole = counts[Kind.BACKWARD]
                split = counts[Kind.BACKWARD_INPUT], counts[Kind.BACKWARD_WEIGHT]
                if counts[Kind.FORWARD] != 1 or (whole, *split) not in ((1, 0, 0), (0, 1, 1)):
                    what = f"microbatch {k} of group {group} on stage {stage}"
                    _fail(schedule, f"{what} needs one forward and one backward.", {home.get(stage, 0): 0})


def _check_local_order(schedule: Schedule) -> None:
    """A backward follows its forward, W follows I, and an update follows what it applies."""
    needs = {
        Kind.BACKWARD: Kind.FORWARD,
        Kind.BACKWARD_INPUT: Kind.FORWARD,
        Kind.BACKWARD_WEIGHT: Kind.BACKWARD_INPUT,
    }
    for rank, actions in enumerate(schedule.ranks):
        done: set[tuple] = set()
        updates: Counter[int] = Counter()
        open_backwards: Counter[int] = Counter()
        for position, action in enumerate(actions):
            kind, stage, microbatch, group, version = action
            if kind in needs and (needs[kind], stage, group, microbatch) not in done:
                _fail(schedule, f"{action} comes before its {needs[kind].name.lower()}.", {rank: position})
            done.add((kind, stage, group, microbatch))
            if kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT):
                open_backwards[stage] += 1
            elif kind is Kind.UPDATE:
                updates[stage] += 1
                if version != updates[stage] or not open_backwards.pop(stage, 0):
                    _fail(schedule, f"{action} is out of turn or has nothing to apply.", {rank: position})
        left = [stage for stage, count in open_backwards.items() if count]
        if left:
            _fail(schedule, f"gradients of stage {left[0]} reach no update.", {rank: len(actions)})


def _check_versions(schedule: Schedule) -> None:
    for gradient in gradients(schedule):
        problem = ""
        if schedule.shared_update and gradient.update != gradient.group:
            problem = f"feeds update {gradient.update}"
        elif schedule.synchronous and gradient.delay > 0:
            problem = f"has delay {gradient.delay}, where every group should end at a barrier"
        elif schedule.weights is not Weights.NEWEST and gradient.mismatch:
            problem = "has a forward and a backward on different weights"
        elif schedule.weights is Weights.BANKS and gradient.delay != _lawful_delay(schedule, gradient):
            problem = f"has delay {gradient.delay}"
        if problem:
            _mark_gradient(schedule, gradient, problem)
    lawful = with_versions(schedule)
    for rank, (actions, expected) in enumerate(zip(schedule.ranks, lawful.ranks, strict=True)):
        published: Counter[int] = Counter()
        last: dict[int, int] = {}  # stage -> the group of its last backward
        for position, (action, right) in enumerate(zip(actions, expected, strict=True)):
            here = {rank: position}
            if action.kind is Kind.UPDATE:
                published[action.stage] += 1
                if action.group != last[action.stage]:
                    _fail(schedule, f"{action} ends with a gradient of group {last[action.stage]}.", here)
                continue
            if action.kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT):
                last[action.stage] = action.group
            if (action.version or 0) > published[action.stage]:
                _fail(schedule, f"{action} reads weights its stage has not published yet.", here)
            elif action.version != right.version:
                rule = f"'{schedule.weights.value}' says version {right.version}"
                _fail(schedule, f"{action} reads the wrong weights: the rule {rule}.", here)
    if schedule.weights is Weights.BANKS:
        alive = occupancy.banks(schedule.ranks, schedule.model_stages)
        assert max(alive) <= 2, f"delay 1 with {alive} banks alive per stage"


def _lawful_delay(schedule: Schedule, gradient: Gradient) -> int:
    return int(gradient.group > 0 and gradient.microbatch < schedule.old_part(gradient.group))


def _mark_gradient(schedule: Schedule, gradient: Gradient, problem: str) -> NoReturn:
    where = stage, microbatch, group = gradient.stage, gradient.microbatch, gradient.group
    rank = schedule.placement()[stage]
    spot = next(i for i, action in enumerate(schedule.ranks[rank]) if action[1:4] == where)
    _fail(schedule, f"microbatch {microbatch} of group {group} on stage {stage} {problem}.", {rank: spot})


def _check_no_deadlock(schedule: Schedule) -> None:
    try:
        simulate(schedule)
    except Deadlock as deadlock:
        waits = ", ".join(
            f"rank {rank} at {schedule.ranks[rank][position]}" for rank, position in deadlock.stuck.items()
        )
        _fail(schedule, f"it deadlocks ({waits}).", deadlock.stuck)


Channel = tuple[str, int, int]  # direction, sending rank, receiving rank


def messages(schedule: Schedule) -> dict[Channel, tuple[list[Action], list[Action]]]:
    """Per channel, the forwards or backwards in the order sent and the same messages in the order received.

    Both lists hold the sender's action, so they are equal when the ends agree.
    """
    placement, last = schedule.placement(), schedule.model_stages - 1
    channels: defaultdict[Channel, tuple[list[Action], list[Action]]] = defaultdict(lambda: ([], []))
    # What travels is known by its kind of direction: I and B send the same gradient.
    for rank, actions in enumerate(schedule.ranks):
        for kind, stage, microbatch, group, _ in actions:
            if kind in (Kind.UPDATE, Kind.BACKWARD_WEIGHT):
                continue
            direction, step = ("forward", 1) if kind is Kind.FORWARD else ("backward", -1)
            sent_by = Kind.FORWARD if step == 1 else Kind.BACKWARD
            to, source = stage + step, stage - step
            if 0 <= to <= last and placement[to] != rank:
                sent = Action(sent_by, stage, microbatch, group)
                channels[direction, rank, placement[to]][0].append(sent)
            if 0 <= source <= last and placement[source] != rank:
                received = Action(sent_by, source, microbatch, group)
                channels[direction, placement[source], rank][1].append(received)
    return dict(channels)


def _check_communicators(schedule: Schedule) -> None:
    for (direction, sender, receiver), (sent, received) in messages(schedule).items():
        for index, (out, into) in enumerate(zip(sent, received, strict=True)):
            if out != into:
                problem = (
                    f"message {index} of the {direction} channel from rank {sender} to rank {receiver} "
                    f"is sent by {out} but received as the output of {into}."
                )
                _fail(schedule, problem, {sender: _position(schedule, sender, out)})


def _position(schedule: Schedule, rank: int, sent: Action) -> int:
    wanted = (sent.stage, sent.microbatch, sent.group, sent.kind is Kind.FORWARD)
    return next(
        i
        for i, a in enumerate(schedule.ranks[rank])
        if (a.stage, a.microbatch, a.group, a.kind is Kind.FORWARD) == wanted
    )
