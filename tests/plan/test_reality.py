"""Prediction against reality on two processes: profile the bench's own stages, predict, measure, compare.

The two are taken in turn on the same warm ranks, because what else the machine does changes both.
"""

from __future__ import annotations

from functools import partial
from statistics import median
from typing import Any

import pytest
import torch

from slipstream.bench.measure import ENGINE, measure
from slipstream.bench.work import Work, build_module, build_optimizer, group_input, group_target, loss_fn
from slipstream.distributed import RankPool
from slipstream.plan.profile import StageSeconds, link, ping_pong, time_stage
from slipstream.schedule.costs import Costs
from slipstream.schedule.generate import build
from slipstream.schedule.simulate import simulate

CONTENDERS = {"torch_1f1b": "1f1b", "torch_gpipe": "gpipe", ENGINE: "pipedream_2bw"}
ROUNDS = 9
GROUPS = 40  # simulated: with jitter a few would be a lottery


def profile_stage(world: Any, work: Work) -> StageSeconds:
    """On every rank at once, as in a run: the ranks share caches and memory bandwidth."""
    module = build_module(work, world.rank, work.stages)
    inputs = group_input(work)[: work.batch]
    last = world.rank == work.stages - 1
    loss = partial(loss_fn, target=group_target(work)[: work.batch]) if last else None
    torch.distributed.barrier()
    return time_stage(
        module, inputs, build_optimizer(module), loss, repeats=40, first=world.rank == 0,
        in_flight=work.stages - world.rank,
    )  # fmt: skip


def predict(work: Work, stages: list[StageSeconds], points: dict[float, float]) -> dict[str, float]:
    found = link(points)
    costs = Costs(
        forward=[stage.forward for stage in stages],
        backward=[stage.backward for stage in stages],
        update=[stage.update for stage in stages],
        latency=found.latency,
        message_bytes=4.0 * work.batch * work.tokens * work.dim,
        bandwidth=found.bandwidth,
        jitter=max(stage.jitter for stage in stages),
    )
    return {
        name: simulate(build(schedule, work.stages, work.microbatches, GROUPS), costs).time_per_update
        for name, schedule in CONTENDERS.items()
    }


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("microbatches", [2, 4, 8])
def test_predicted_time_per_update_is_within_ten_percent_of_the_bench(microbatches):
    work = Work(stages=2, microbatches=microbatches)
    ratios: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    with RankPool(2) as pool:
        points = pool.run(ping_pong)[0]
        for _ in range(ROUNDS):
            before = predict(work, pool.run(profile_stage, work), points)
            result = measure(pool, work, list(CONTENDERS), rounds=1, updates=16, timeout_seconds=120)
            after = predict(work, pool.run(profile_stage, work), points)
            for name in CONTENDERS:
                measured = result.samples[name][0].period_seconds
                ratios[name].append((before[name] + after[name]) / 2 / measured)
    print({name: round(median(values), 3) for name, values in ratios.items()})
    for name, values in ratios.items():
        assert median(values) == pytest.approx(1.0, abs=0.10), (name, values)
