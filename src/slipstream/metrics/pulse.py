"""Is a run well? One line and an exit code, for a person, a cron job or a batch script; nothing is written.

Read from what the run writes anyway: its lock, which goes with the process that holds it, and its events.
"""

from __future__ import annotations

import fcntl
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

from slipstream.metrics.events import Event, Run, values

WELL, STALLED, FAILED, TO_RESUME = 0, 1, 2, 75
LEAST_SECONDS = 60.0  # without a step before a run counts as stalled, however quick its steps are
MANY_STEPS = 20  # a run that takes this many of its usual steps' time for one is stalled


@dataclass(frozen=True)
class Pulse:
    words: str
    code: int


def is_held(lock: Path) -> bool:
    """Whether a process has the run open."""
    try:
        with lock.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False


def pulse(run: Run, held: bool, now: float) -> Pulse:
    """How the run is, at the time `now`."""
    steps = run.surviving("step")
    step = steps[-1]["step"] if steps else 0
    saved = max((event["step"] for event in run.surviving("checkpoint")), default=None)
    kept = "no checkpoint yet" if saved is None else f"newest checkpoint at step {saved}"
    if run.status == "finished":
        return Pulse(f"finished at step {step}", WELL)
    if not held:
        if run.status == "failed":
            why = (str(run.last("error").get("message") or "").splitlines() or [""])[0]
            return Pulse(f"failed at step {step}, {kept}: {why}", FAILED)
        return Pulse(f"not running, not finished: step {step}, {kept}", TO_RESUME)
    times = values(run.events, "time")
    silent = now - times[-1] if times else 0.0
    limit = max(LEAST_SECONDS, MANY_STEPS * _usual_seconds(steps))
    if silent > limit:
        return Pulse(f"running, but nothing was written for {silent:.0f} s: step {step}, {kept}", STALLED)
    return Pulse(f"running: step {step}, {kept}, last written {silent:.0f} s ago", WELL)


def _usual_seconds(steps: list[Event]) -> float:
    gaps = [after - before for before, after in pairwise(values(steps[-50:], "time"))]
    return median(gaps) if gaps else 0.0
