"""Prediction against reality on two processes: profile the bench's stages and runtimes, predict, measure, compare.

Profile and measurement are taken in turn on the same warm ranks, because what else the machine does changes both.
What else it does is watched: a round in which other programs took more than a few percent of the cores is taken
again, whatever it showed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import TypeVar

import pytest

from slipstream.bench.measure import measure
from slipstream.bench.profile import SCHEDULES, costs_of, measure_runtime, predict, profile_stage
from slipstream.bench.work import Work
from slipstream.distributed import RankPool, World
from slipstream.plan.devices import Runtime
from slipstream.plan.profile import Link, link, ping_pong

T = TypeVar("T")
ROUNDS = 15
OTHERS = 0.06  # share of the cores that other programs may take in a round
PATIENCE_SECONDS = 800.0


class Quiet:
    """Takes measurements on a pool until nobody else has disturbed them."""

    def __init__(self, pool: RankPool) -> None:
        self.pool, self.deadline = pool, time.monotonic() + PATIENCE_SECONDS
        self.repeated = 0

    def take(self, measurement: Callable[[], T]) -> T:
        while time.monotonic() < self.deadline:
            own, busy, began = self._own_seconds(), _busy_seconds(), time.monotonic()
            found = measurement()
            cores = (os.cpu_count() or 1) * (time.monotonic() - began)
            others = (_busy_seconds() - busy) - (self._own_seconds() - own)
            if others / cores <= OTHERS:
                return found
            self.repeated += 1
            time.sleep(0.5)
        pytest.fail(
            f"other programs kept the cores busy for {PATIENCE_SECONDS:g} s: run this on an idle machine"
        )

    def _own_seconds(self) -> float:
        return time.process_time() + sum(self.pool.run(processor_seconds))


def processor_seconds(world: World) -> float:
    return time.process_time()


def _busy_seconds() -> float:
    """Of all cores since boot, with what the hypervisor took."""
    user, nice, system, _, _, interrupts, soft, steal = map(
        int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
    )
    return (user + nice + system + interrupts + soft + steal) / os.sysconf("SC_CLK_TCK")


def profile_runtimes(quiet: Quiet) -> tuple[Link, dict[str, Runtime]]:
    """Medians: one sample of a tenth of a millisecond says little."""
    links = [quiet.take(lambda: link(quiet.pool.run(ping_pong)[0])) for _ in range(5)]
    found = Link(median(one.latency for one in links), median(one.bandwidth for one in links))
    runtimes = {}
    for name in SCHEDULES:
        taken = [
            quiet.take(lambda name=name: measure_runtime(quiet.pool, name, Work(), found)) for _ in range(5)
        ]
        runtimes[name] = Runtime(
            median(one.action for one in taken), median(one.update for one in taken), taken[0].on_demand
        )
    return found, runtimes


def predicted_over_measured(pool: RankPool, name: str, work: Work, found: Link, runtime: Runtime) -> float:
    groups, updates = max(10, 40 // work.microbatches), max(10, 64 // work.microbatches)
    before = pool.run(profile_stage, name, work, groups)
    sample = measure(pool, work, [name], rounds=1, updates=updates, timeout_seconds=120).samples[name][0]
    after = pool.run(profile_stage, name, work, groups)
    times = [predict(name, work, costs_of(name, work, stages, found, runtime)) for stages in (before, after)]
    return sum(times) / 2 / sample.period_seconds


@pytest.mark.bench
@pytest.mark.timeout(1200)
@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="what others do is read from /proc")
@pytest.mark.parametrize("microbatches", [2, 4, 8])
def test_predicted_time_per_update_is_within_ten_percent_of_the_bench(microbatches):
    # Predicted and measured is the same layout, as the planner names it; left open, the engine would choose.
    work = Work(stages=2, microbatches=microbatches, in_flight=min(microbatches, 3))
    ratios: dict[str, list[float]] = {name: [] for name in SCHEDULES}
    with RankPool(2) as pool:
        quiet = Quiet(pool)
        found, runtimes = profile_runtimes(quiet)
        for _ in range(ROUNDS):
            for name, taken in ratios.items():
                taken.append(
                    quiet.take(
                        lambda name=name: predicted_over_measured(pool, name, work, found, runtimes[name])
                    )
                )
    print(f"m={microbatches}", found, runtimes, f"repeated {quiet.repeated}", sep="\n")
    print({name: round(median(values), 3) for name, values in ratios.items()})
    for name, values in ratios.items():
        assert median(values) == pytest.approx(1.0, abs=0.10), (name, values)
