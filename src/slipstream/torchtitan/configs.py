"""From a config of torchtitan to one that trains with 2BW; and torchtitan's own configs, each made so."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torchtitan.components.loss import ChunkedLossWrapper
from torchtitan.config.override import derive
from torchtitan.tools.logging import logger
from torchtitan.trainer import Trainer

from slipstream.errors import UserError
from slipstream.torchtitan.settings import SCHEDULE, Settings
from slipstream.torchtitan.trainer_2bw import Trainer2BW


def with_2bw(config: Trainer.Config, **settings: Any) -> Trainer2BW.Config:
    """`config`, trained on Schedule2BW. `settings` are those of `Settings`, which torchtitan's command line can still
    change (`--slipstream.cutover 4`).

    Set here is what torchtitan's pipelines need anyway (no CUDA graphs) and what 2BW replaces: the schedule, and a loss
    that is taken in chunks with the head of one set of weights.
    """
    owner = type(config)._owner
    if owner is not Trainer:
        raise UserError(
            f"with_2bw replaces the training step of torchtitan's Trainer, and {getattr(owner, '__name__', owner)} has "
            "its own. Give a Trainer.Config."
        )
    loss = config.loss
    if isinstance(loss, ChunkedLossWrapper.Config):
        logger.warning(
            "slipstream: a loss in chunks runs the head of one set of weights, and 2BW has several. The same loss is "
            "taken in one piece: the logits of a microbatch are in memory at once."
        )
        loss = loss.loss_fn
    return derive(
        config,
        Trainer2BW.Config,
        slipstream=Settings(**settings),
        loss=loss,
        training=replace(config.training, disable_cuda_graphs=True),
        parallelism=replace(config.parallelism, pipeline_parallel_schedule=SCHEDULE),
    )


def configs_of(model: str) -> dict[str, Callable[[], Trainer2BW.Config]]:
    """The configs that torchtitan ships for `model`, by their names there, each through `with_2bw`."""
    registry = importlib.import_module(f"torchtitan.models.{model}.config_registry")
    return {
        name: _wrapped(found)
        for name, found in vars(registry).items()
        if not name.startswith("_")
        and callable(found)
        and getattr(found, "__module__", None) == registry.__name__
        and not isinstance(found, type)
    }


def _wrapped(config: Callable[[], Trainer.Config]) -> Callable[[], Trainer2BW.Config]:
    @functools.wraps(config)
    def wrapped() -> Trainer2BW.Config:
        return with_2bw(config())

    return wrapped
