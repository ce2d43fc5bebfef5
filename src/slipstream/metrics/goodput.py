"""Goodput: the share of all time in which a run got further, with a fault every so often. A simulated clock, no chance.

    python -m slipstream.metrics.goodput RUN [--stages P] [--checkpoint-every SECONDS] [--away SECONDS]

reads how long the restarts of a run took and prints what that means for faults every 10, 30, 60 and 240 minutes.

A fault takes back what was trained since the last checkpoint, and the time to train again. While a rank is away an
elastic run goes on with the stages that are left, a plain one waits for it:

    plain     every fault costs   rank away + restart + lost work
    elastic   every fault costs   restart + lost work + restart (to grow), and goes on at `share` of the speed meanwhile

`share` is the speed with a stage less, (P-1)/P where all stages are alike.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from slipstream.metrics.events import Event, number, read_run

MINUTES = (10, 30, 60, 240)  # from one fault to the next
AWAY_SECONDS = 600.0
USUAL_CHECKPOINT_SECONDS = 300.0  # where the run does not say


@dataclass(frozen=True)
class Faults:
    """What was measured, in seconds."""

    every: float  # from one fault to the next, on average
    checkpoint_every: float  # between two checkpoints; half of it is lost, on average
    restart: float  # from the fault, or the request to grow, to the first update after it
    away: float = 0.0  # how long a rank that was lost stays away


def goodput(faults: Faults, share: float | None = None) -> float:
    """Useful time over all time; `share`: of the speed that an elastic run keeps meanwhile, None for one that waits."""
    if faults.every <= 0:
        raise ValueError(f"faults come every {faults.every} s: more than 0 is needed")
    lost = min(faults.checkpoint_every, faults.every) / 2 + faults.restart
    if share is None:
        lost += faults.away
    else:
        lost += (1 - share) * max(0.0, faults.away - faults.restart)
        # To let the rank in again: it saves first, nothing is lost.
        lost += faults.restart if faults.away else 0.0
    return max(0.0, 1.0 - lost / faults.every)


def table(faults: Faults, minutes: tuple[float, ...], stages: int) -> list[tuple[float, float, float]]:
    """(minutes between faults, goodput of a run that waits, of an elastic one) for equal stages."""
    each = [replace(faults, every=60 * minute) for minute in minutes]
    return [(now.every / 60, goodput(now), goodput(now, (stages - 1) / stages)) for now in each]


@dataclass(frozen=True)
class Restarts:
    """What the log of a run says of the times it was started again."""

    count: int
    restart: float  # seconds from when it was last heard of to its first step, on average
    lost_steps: int  # done twice, in all
    useful: float  # share of all its time in which it got further
    checkpoint_every: float | None  # median seconds between two checkpoints
    stages: int  # the most it had


def measured(events: Sequence[Event]) -> Restarts | None:
    """None for a run that was never started again, or did not get to a step since. A run that a person stopped for a
    while has restarts as well."""
    restarts, lost, lost_steps, stages = [], 0.0, 0, 1
    last = began = None  # times: of the newest event that stands, of the first
    gone: float | None = None  # when the run was last heard of, until a step follows
    for event in events:
        at = number(event.get("time"))
        if at is None:
            continue
        began = at if began is None else began
        if event["event"] == "start" and not event.get("recut"):
            stages = max(stages, int(number(event.get("stages")) or 1))
            if last is not None and gone is None:
                gone = max(last, number(event.get("heard_of")) or last)
                lost += max(0.0, min(gone, at) - last)  # work that was taken back
                lost_steps += int(number(event.get("lost_steps")) or 0)
        elif event["event"] == "step" and gone is not None:
            restarts.append(max(0.0, at - gone))
            gone = None
        if gone is None:
            last = at
    if not restarts or began is None or last is None or last <= began:
        return None
    saved = [at for event in events if event["event"] == "checkpoint" and (at := number(event.get("time")))]
    apart = [later - earlier for earlier, later in pairwise(saved) if later > earlier]
    useful = max(0.0, 1.0 - (lost + sum(restarts)) / (last - began))
    every = statistics.median(apart) if apart else None
    return Restarts(len(restarts), statistics.fmean(restarts), lost_steps, useful, every, stages)


def main() -> None:
    parser = argparse.ArgumentParser(description="Goodput from the restarts of a run.")
    parser.add_argument("run")
    parser.add_argument("--stages", type=int, default=None, help="as the run had, unless given")
    parser.add_argument("--checkpoint-every", type=float, default=None, help="seconds; as the run did")
    parser.add_argument("--away", type=float, default=AWAY_SECONDS)
    given = parser.parse_args()
    found = measured(read_run(given.run).events)
    if found is None:
        raise SystemExit(f"{given.run} was never started again: there is nothing to measure.")
    print(
        f"Started again {found.count} times: {found.restart:.1f} s from the last word to the next update, "
        f"{found.lost_steps} updates done twice. Useful so far: {found.useful:.1%}."
    )
    print("a fault every   waits for the rank   elastic")
    every = given.checkpoint_every or found.checkpoint_every or USUAL_CHECKPOINT_SECONDS
    costs = Faults(60.0, every, found.restart, given.away)
    for minutes, plain, elastic in table(costs, MINUTES, given.stages or found.stages):
        print(f"{minutes:>6g} minutes   {plain:>18.1%}   {elastic:>7.1%}")


if __name__ == "__main__":
    main()
