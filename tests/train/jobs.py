"""What a rank does in place of `run_rank` when something is to go wrong inside it."""

from __future__ import annotations

import gc
import os
import signal
from typing import Any

import torch

from slipstream.distributed import World
from slipstream.distributed.groups import Groups
from slipstream.errors import HealthError
from slipstream.train import assemble, batches, build, health, session, trainer

MARK = -1  # in the targets' last column: this group goes wrong


def poison(patch: Any, groups: dict[int, str]) -> None:
    """Data groups that give a loss that is not finite ("nan") or far too large ("spike").

    A marker rides in their token counts; `patch(module, name, value)` is how a function is replaced.
    """
    load = batches.load

    def marked(dataset, group, place):
        batch = load(dataset, group, place)
        if group in groups and dataset.shuffle and batch.targets is not None:
            batch.targets[:, -1] = MARK - (groups[group] == "spike")
        return batch

    patch(batches, "load", marked)
    loss_function = build.loss_function

    def loss(config):
        inner = loss_function(config)
        factor = {MARK: float("nan"), MARK - 1: 40.0}

        def wrong(logits, targets):
            mark = int(targets[0, -1])
            if mark >= 0:
                return inner(logits, targets)
            whole = targets.clone()
            whole[:, -1] = config.tokens_per_step
            return inner(logits, whole) * factor[mark]

        return wrong

    patch(build, "loss_function", loss)


def killed_rank(world: World, tree: dict[str, Any], rank: int, group: int) -> dict[str, Any]:
    """`rank` is killed when it takes up data group `group`."""
    original = batches.load

    def load(dataset, index, place):
        if (world.rank, index) == (rank, group) and dataset.shuffle:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(dataset, index, place)

    batches.load = load
    try:
        return session.run_rank(world, tree)
    finally:
        batches.load = original


def poisoned_rank(world: World, tree: dict[str, Any], groups: dict[int, str]) -> dict[str, Any]:
    kept = [(batches, "load", batches.load), (build, "loss_function", build.loss_function)]
    poison(setattr, groups)
    try:
        return session.run_rank(world, tree)
    finally:
        for module, name, value in kept:
            setattr(module, name, value)


def tidy_rank(world: World, tree: dict[str, Any], groups: dict[int, str]) -> list[int]:
    """How many schedules' process groups were open whenever an engine was about to be made, and at the end."""
    found, made = [], assemble.engine_of

    def engine(*arguments):
        found.append(len(Groups.open))
        return made(*arguments)

    assemble.engine_of = engine
    gc.disable()  # else a collection might happen to come in time
    before = len(Groups.open)
    try:
        poisoned_rank(world, tree, groups)
        found.append(len(Groups.open))
    finally:
        gc.enable()
        assemble.engine_of = made
    return [count - before for count in found]


def diverged_rank(world: World, tree: dict[str, Any], rank: int, what: str, name: str) -> dict[str, Any]:
    """One bit of one rank's `master` or newest bank is wrong when it is hashed."""
    original = health.fingerprint

    def flipped(state, tied, **ages):
        held = state["master"] if what == "master" else state["banks"]["next"]
        if world.rank == rank:
            held[name].view(torch.int32).view(-1)[0] ^= 1
        return original(state, tied, **ages)

    health.fingerprint = flipped
    try:
        return session.run_rank(world, tree)
    finally:
        health.fingerprint = original


def damage(patch: Any, name: str, step: int) -> None:
    """After `step` updates the master's `name` holds a number that is not finite, wherever it is kept."""
    submit = trainer.submit

    def damaged(parts, at, batch):
        if at == step:
            parts.engine.drain()
            master = parts.engine.capture()["master"]
            if name in master:
                master[name].view(-1)[0] = float("nan")
        submit(parts, at, batch)

    patch(trainer, "submit", damaged)


def damaged_told(world: World, tree: dict[str, Any], name: str) -> str:
    """What each rank says of a run whose weight `name` is damaged."""
    kept = trainer.submit
    damage(setattr, name, 4)
    try:
        session.run_rank(world, tree)
    except HealthError as error:
        return str(error)
    finally:
        trainer.submit = kept
    return "no error"
