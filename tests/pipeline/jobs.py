"""Jobs for worker processes: the engine on real ranks, over the tiny models."""

import torch
from pipeline import tiny
from torch.distributed.pipelining import PipelineStage

from slipstream import Schedule2BW

M = 4


def build(world, optimizer="adamw", tied=True, m=M, **options):
    """A schedule over this rank's stage of the tiny model."""
    first, last = tiny.cut(world.rank, world.size)
    module = tiny.Model(first, last, tied=tied)
    stage = PipelineStage(module, world.rank, world.size, torch.device("cpu"))
    if tied and world.size > 1:
        names = {0: "embedding.weight", world.size - 1: "head.weight"}
        options["tied"] = {"embedding": names[world.rank]} if world.rank in names else {}
    make = tiny.OPTIMIZERS[optimizer] if isinstance(optimizer, str) else optimizer
    return Schedule2BW(stage, m, tiny.loss_fn, make, timeout=20, **options)


def step(world, schedule, group, **batch_options):
    """One group through this rank; the losses on the last stage, else an empty list."""
    x, y = tiny.batch(group, **batch_options)
    losses = []
    args = (x,) if world.rank == 0 else ()
    last = world.rank == world.size - 1
    schedule.step(*args, **({"target": y, "losses": losses} if last else {}))
    return [loss.item() for loss in losses]


def weights(schedule):
    return {name: p.detach().clone() for name, p in schedule.master.named_parameters()}


def train(world, groups, drains=(), evaluations=(), state=None, decay=False, **options):
    """Train over `groups`; returns losses, final weights, evaluation losses, the state at the end."""
    schedule = build(world, **options)
    if state is not None:
        schedule.load_state_dict(state)
    scheduler = (
        torch.optim.lr_scheduler.LambdaLR(schedule.optimizer, lambda g: 1 / (1 + 0.1 * g)) if decay else None
    )
    losses, evaluated = [], []
    for group in groups:
        losses += step(world, schedule, group)
        if scheduler is not None:
            scheduler.step()
        if group in drains:
            schedule.drain()
        if group in evaluations:
            x, y = tiny.batch(10_000, rows=4)
            found = []
            last = world.rank == world.size - 1
            schedule.eval(
                *((x,) if world.rank == 0 else ()), **({"target": y, "losses": found} if last else {})
            )
            evaluated += [loss.item() for loss in found]
    state = schedule.state_dict()
    return {
        "losses": losses,
        "weights": weights(schedule),
        "evaluated": evaluated,
        "state": state,
        "norms": dict(schedule.grad_norms),
        "skipped": schedule.skipped,
    }
