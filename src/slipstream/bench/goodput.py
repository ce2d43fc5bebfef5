"""Goodput: the share of all time in which a run got further, with a fault every so often. A simulated clock, no chance.

    python -m slipstream.bench.goodput RUN [--stages P] [--checkpoint-every SECONDS] [--away SECONDS]

reads how long the restarts of a run took and prints what that means for faults every 10, 30, 60 and 240 minutes.

A fault takes back what was trained since the last checkpoint, and the time to train again. While a rank is away an
elastic run goes on with the stages that are left, a plain one waits for it:

    plain     every fault costs   rank away + restart + lost work
    elastic   every fault costs   restart + lost work + restart (to grow), and goes on at `share` of the speed meanwhile

`share` is the speed with a stage less, (P-1)/P where all stages are alike.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from slipstream.errors import UserError
from slipstream.metrics.events import number, read_run


@dataclass(frozen=True)
class Faults:
    """What was measured, in seconds."""

    every: float  # from one fault to the next, on average
    checkpoint_every: float  # between two checkpoints; half of it is lost, on average
    restart: float  # from the fault, or the request to grow, to the first update after it
    away: float = 0.0  # how long a rank that was lost stays away
    notice: float = 0.0  # from the fault to the moment somebody knows of it


def goodput(faults: Faults, share: float | None = None) -> float:
    """Useful time over all time; `share`: of the speed that an elastic run keeps meanwhile, None for one that waits."""
    if faults.every <= 0:
        raise ValueError(f"faults come every {faults.every} s: more than 0 is needed")
    lost = faults.notice + min(faults.checkpoint_every, faults.every) / 2 + faults.restart
    if share is None:
        lost += faults.away
    else:
        # The restart that lets the rank in again saves first: it takes nothing back.
        lost += (1 - share) * max(0.0, faults.away - faults.restart) + (
            faults.restart if faults.away else 0.0
        )
    return max(0.0, 1.0 - lost / faults.every)


def table(faults: Faults, minutes: tuple[float, ...], stages: int) -> list[tuple[float, float, float]]:
    """(minutes between faults, goodput of a run that waits, of an elastic one) for equal stages."""
    rows = []
    for each in minutes:
        now = Faults(60 * each, faults.checkpoint_every, faults.restart, faults.away, faults.notice)
        rows.append((each, goodput(now), goodput(now, (stages - 1) / stages)))
    return rows


def measured(times: list[tuple[str, float]]) -> tuple[float, float] | None:
    """(seconds a restart took, useful share of the time so far) from the (kind, time) of a run's events, where it was
    started more than once: from the last event before a start to the first step after it."""
    restarts: list[float] = []
    lost, last, began = 0.0, None, None
    waiting = False
    for kind, at in times:
        began = at if began is None else began
        if kind == "start" and last is not None:
            waiting = True
        elif kind == "step" and waiting and last is not None:
            restarts.append(at - last)
            lost += at - last
            waiting = False
        if not waiting:
            last = at
    if not restarts or began is None or last is None or last <= began:
        return None
    return sum(restarts) / len(restarts), 1.0 - lost / (last - began)


def main() -> None:
    parser = argparse.ArgumentParser(description="Goodput from the restarts of a run.")
    parser.add_argument("run")
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--checkpoint-every", type=float, default=300.0)
    parser.add_argument("--away", type=float, default=600.0)
    given = parser.parse_args()
    events = read_run(given.run).events
    times = [(event["event"], at) for event in events if (at := number(event.get("time"))) is not None]
    found = measured(times)
    if found is None:
        raise UserError(f"{given.run} was never started again: there is nothing to measure.")
    restart, useful = found
    print(f"From the last state to the first update after it: {restart:.1f} s. Useful so far: {useful:.1%}.")
    print("a fault every   waits for the rank   elastic")
    costs = Faults(60.0, given.checkpoint_every, restart, given.away)
    for minutes, plain, elastic in table(costs, (10, 30, 60, 240), given.stages):
        print(f"{minutes:>6g} minutes   {plain:>18.1%}   {elastic:>7.1%}")


if __name__ == "__main__":
    main()
