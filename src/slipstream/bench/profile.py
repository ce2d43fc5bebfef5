"""What the planner needs to know of a contender, measured without running the contender on its work:

    its stage      forwards, backwards and updates of the bench's own stage in the schedule's order, on every rank
                   at once, with no runtime and no messages
    its runtime    the same runtime on almost empty stages whose messages are as large
    the link       a ping-pong

From these `schedule.simulate` predicts the time per update. torch's schedules post a receive when they need it and
wait for it; ours posts receives ahead (`Costs.on_demand`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from math import sqrt
from statistics import fmean, median

import torch
import torch.distributed as dist
from torch import Tensor, nn

from slipstream.bench.contenders import BASELINE, ENGINE
from slipstream.bench.measure import WARM_UP_UPDATES
from slipstream.bench.sample import RankSample, take_sample
from slipstream.bench.work import Work, build_optimizer
from slipstream.distributed import RankPool, World
from slipstream.lists import copy_
from slipstream.plan.devices import Runtime
from slipstream.plan.profile import Link, StageSeconds, fit_runtime, time_stage
from slipstream.schedule.actions import Schedule
from slipstream.schedule.costs import Costs
from slipstream.schedule.generate import build
from slipstream.schedule.simulate import simulate

SCHEDULES = {BASELINE: "1f1b", "torch_gpipe": "gpipe", ENGINE: "pipedream_2bw"}
SIMULATED_GROUPS = 160  # with jitter a few would be a lottery
FEW, MANY = 4, 12  # microbatches of the almost empty runs
EMPTY_UPDATES = 100


def schedule_of(name: str, work: Work, groups: int) -> Schedule:
    """The contender's schedule; how many microbatches ours keeps in flight is part of the layout."""
    in_flight = work.in_flight if name == ENGINE else None
    return build(SCHEDULES[name], work.stages, work.microbatches, groups, in_flight=in_flight)


def profile_stage(
    world: World, name: str, work: Work, groups: int, average: Callable[[Sequence[float]], float] = fmean
) -> StageSeconds:
    """One rank's stage, alone but at the same time as the others: they share caches and memory bandwidth."""
    module = work.module(world.rank, work.stages)
    inputs, target, loss_function = work.inputs()[: work.batch], work.targets()[: work.batch], work.loss()

    def loss(output: Tensor) -> Tensor:
        return loss_function(output, target)

    order = [action.kind for action in schedule_of(name, work, groups).ranks[world.rank]]
    update = (our_update if name == ENGINE else torch_update)(module, work)
    dist.barrier()
    last = world.rank == work.stages - 1
    return time_stage(
        module, inputs, update, loss if last else None, order, first=world.rank == 0, average=average
    )


def torch_update(module: nn.Module, work: Work) -> Callable[[], None]:
    """torch's schedules divide the gradients by m when all are there; then the step."""
    optimizer = build_optimizer(module)

    def update() -> None:
        for parameter in module.parameters():
            assert parameter.grad is not None
            parameter.grad.div_(work.microbatches)
        optimizer.step()
        optimizer.zero_grad()

    return update


def our_update(module: nn.Module, work: Work) -> Callable[[], None]:
    """The norm, the step and the copy into a bank."""
    optimizer = build_optimizer(module)
    parameters = list(module.parameters())
    bank = [parameter.detach().clone() for parameter in parameters]

    def update() -> None:
        nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            copy_(bank, parameters)

    return update


def costs_of(
    name: str, work: Work, stages: Sequence[StageSeconds], link: Link, runtime: Runtime | None = None
) -> Costs:
    runtime = runtime or Runtime(on_demand=name != ENGINE)
    return Costs(
        forward=[stage.forward for stage in stages],
        backward=[stage.backward for stage in stages],
        update=[stage.update + runtime.update for stage in stages],
        latency=link.latency,
        message_bytes=4.0 * work.batch * work.tokens * work.dim,
        bandwidth=link.bandwidth,
        jitter=_rms(stage.jitter for stage in stages),
        drift=_rms(stage.drift for stage in stages),
        on_demand=runtime.on_demand,
        overhead=runtime.action,
    )


def _rms(values: Iterable[float]) -> float:
    return sqrt(fmean(value * value for value in values))


def measure_runtime(pool: RankPool, name: str, work: Work, link: Link) -> Runtime:
    """The runtime `name` on almost empty stages, with messages of `work`'s size.

    Medians over actions and updates: beside a tenth of a millisecond a single interruption is large.
    """
    bare: dict[int, Costs] = {}
    periods: dict[int, float] = {}
    for microbatches in (FEW, MANY):
        # In flight as simulated: with nothing to compute the engine would choose by latency alone.
        empty = replace(work, kind="empty", microbatches=microbatches, in_flight=work.stages)
        stages = pool.run(profile_stage, name, empty, 20, median, ranks=work.stages)
        bare[microbatches] = replace(costs_of(name, empty, stages, link), jitter=0.0, drift=0.0)
        samples: list[RankSample] = pool.run(
            take_sample, name, empty, WARM_UP_UPDATES, EMPTY_UPDATES, ranks=work.stages
        )
        periods[microbatches] = fmean(
            median(end - start for start, end in pairwise(sample.ends)) for sample in samples
        )
    return fit_runtime(SCHEDULES[name], work.stages, bare, periods)


def predict(name: str, work: Work, costs: Costs) -> float:
    """Seconds per update."""
    return simulate(schedule_of(name, work, SIMULATED_GROUPS), costs).time_per_update
