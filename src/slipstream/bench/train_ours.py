"""One process of `slipstream bench train`: our trainer, all of it but checkpoints and validation.

Engine, data loading, reports and events are those of `slipstream train`, put together by the same function and
driven through the same `submit`, so what is measured here is what a run gets.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import torch

from slipstream.bench.train_setting import Measured, Setting, timed
from slipstream.config import Config, load, resolve
from slipstream.errors import UserError
from slipstream.pipeline.graphs import PLAIN_GROUPS
from slipstream.train import batches
from slipstream.train import folder as folders
from slipstream.train.assemble import assemble, position_of
from slipstream.train.board import Board
from slipstream.train.reporter import memory_bytes
from slipstream.train.trainer import submit


def config_of(setting: Setting, data: Path, folder: Path, *, delayed: bool) -> Config:
    on_gpu = setting.device == "cuda"
    return resolve(
        load(
            None,
            [
                f"run.dir={folder / 'run'}",
                f"model.preset={setting.model}",
                f"data.path={data}",
                f"data.sequence={setting.sequence}",
                "pipeline.schedule=emulate",
                f"pipeline.delay={int(delayed)}",
                f"pipeline.microbatches={setting.microbatches}",
                f"pipeline.microbatch_size={setting.rows}",
                f"train.device={setting.device}",
                f"train.dtype={'bfloat16' if on_gpu else 'float32'}",
                f"train.compile={str(setting.compiled).lower()}",
                f"train.steps={setting.warmup + setting.steps}",
                *setting.overrides,
            ],
        )
    )


def measure(setting: Setting, data: Path, folder: Path, *, delayed: bool) -> Measured:
    """Time the updates of one run that is then thrown away."""
    began = time.perf_counter()
    config = config_of(setting, data, folder, delayed=delayed)
    if config.train.cuda_graphs:  # each replica is recorded before anything is timed
        least = (PLAIN_GROUPS + 1) * (1 + int(delayed)) + 1
        setting = replace(setting, warmup=max(setting.warmup, least))
        config = config_of(setting, data, folder, delayed=delayed)
    if config.pipeline.schedule != "emulate":
        raise UserError("`bench train` measures one device. Leave pipeline.schedule at emulate.")
    torch.set_num_threads(1)
    run = Path(config.run.dir)
    run.mkdir(parents=True)
    plan = folders.plan(run, config, data_fingerprint="synthetic")
    with (
        assemble(config, None, position_of(config, None), data, plan, Board()) as parts,
        batches.ahead(parts.train_data, parts.share, 0) as loader,
    ):
        parts.reporter.start(0)

        def settle() -> None:
            parts.engine.drain()
            if parts.device.type == "cuda":
                torch.cuda.synchronize()

        seconds, setup = timed(lambda step: submit(parts, step, loader.get(step)), settle, setting, began)
        parts.reporter.poll(finish=True)
    return Measured(seconds, setup, memory_bytes(), setting.rows, setting.microbatches)
