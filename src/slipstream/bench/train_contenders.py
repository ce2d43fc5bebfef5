"""One process of `slipstream bench train`: one contender is built, warmed up, timed and thrown away.

*ours* is the trainer, all of it but checkpoints and validation, put together by the functions of `slipstream train`.
A *rival* is a Llama of another library (`rivals.py`) as people train it, with torch's fused AdamW, gradients
accumulated over the same sequences; no clipping and no log, which we have and it is spared.
"""

from __future__ import annotations

import gc
import json
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from slipstream.bench.race import NO_DELAY
from slipstream.bench.rivals import Rival, torchtitan_llama, transformers_llama
from slipstream.config import Config, load, resolve
from slipstream.config.resolve import model_config
from slipstream.data.tokens import TokenDataset
from slipstream.errors import UserError
from slipstream.metrics import kernels
from slipstream.metrics.breakdown import Sizes, breakdown
from slipstream.models.attention import attention_kernel
from slipstream.models.sizes import ModelConfig
from slipstream.pipeline.graphs import PLAIN_GROUPS
from slipstream.train import batches, fine
from slipstream.train import folder as folders
from slipstream.train.assemble import assemble, position_of
from slipstream.train.board import Board
from slipstream.train.reporter import memory_bytes
from slipstream.train.timeline import recorder, sizes_of, written
from slipstream.train.trainer import submit

RIVALS: dict[str, tuple[Callable[..., AbstractContextManager[Rival]], bool]] = {  # and whether it is compiled
    "hf_compiled": (transformers_llama, True),
    "hf_eager": (transformers_llama, False),
    "hf_bf16": (partial(transformers_llama, narrow=True), True),
    "titan_compiled": (torchtitan_llama, True),
}


@dataclass(frozen=True)
class Setting:
    """One comparison. `rows` sequences make a microbatch, `microbatches` of them an update."""

    model: str = "smollm2-360m"
    sequence: int = 1024
    microbatches: int = 4
    rows: int = 32
    device: str = "cuda"
    compiled: bool = True
    steps: int = 10
    warmup: int = 3
    rival_rows: int | None = None  # sequences in a rival's microbatch, of the same update; None: `rows`
    overrides: tuple[str, ...] = ()  # of our trainer's config
    profile: int = 0  # updates recorded after the timed ones

    @property
    def tokens_per_step(self) -> int:
        return self.sequence * self.microbatches * self.rows


@dataclass(frozen=True)
class Measured:
    """What one process saw."""

    step_seconds: float
    setup_seconds: float  # building, compiling, warming up
    peak_memory_bytes: int
    rows: int
    microbatches: int
    parts: dict[str, tuple[float, float]] | None = None  # seconds of an update: forward, backward
    kernels: list[dict[str, Any]] | None = None  # the longest of an update (`metrics/kernels.py`)
    gaps: dict[str, Any] | None = None  # in which it ran none


def timed(
    step: Callable[[int], None], settle: Callable[[], None], setting: Setting, began: float, sizes: Sizes
) -> Measured:
    """`settle` waits until all that was asked is done."""
    for index in range(setting.warmup):
        step(index)
    settle()
    start = time.perf_counter()
    for index in range(setting.warmup, setting.warmup + setting.steps):
        step(index)
    settle()
    seconds = (time.perf_counter() - start) / setting.steps
    memory = memory_bytes()
    found = Measured(seconds, start - began, memory, setting.rows, setting.microbatches)
    return _profiled(found, step, settle, setting, sizes) if setting.profile else found


def _profiled(
    found: Measured, step: Callable[[int], None], settle: Callable[[], None], setting: Setting, sizes: Sizes
) -> Measured:
    """The same, and where the time of an update goes."""
    done = setting.warmup + setting.steps
    with recorder() as recorded:
        for index in range(done, done + setting.profile):
            step(index)
        settle()
    with tempfile.TemporaryDirectory(prefix="slipstream-profile-") as folder:
        trace = written(recorded, Path(folder) / "trace.json")
    # A CPU's operations are recorded by the CPU itself, so there the recorded time is what is shared out.
    seconds = found.step_seconds if setting.device == "cuda" else None
    ran = kernels.pieces(trace)
    return replace(
        found,
        parts=breakdown(trace, sizes).per_update(setting.profile, seconds).parts,
        kernels=kernels.longest(ran, setting.profile),
        gaps=kernels.gaps(ran, setting.profile),
    )


def config_of(setting: Setting, data: Path, folder: Path, *, delayed: bool) -> Config:
    overrides = [
        f"run.dir={folder / 'run'}",
        f"model.preset={setting.model}",
        f"data.path={data}",
        f"data.sequence={setting.sequence}",
        "pipeline.schedule=emulate",
        f"pipeline.delay={int(delayed)}",
        f"pipeline.microbatches={setting.microbatches}",
        f"pipeline.microbatch_size={setting.rows}",
        f"train.device={setting.device}",
        f"train.dtype={'bfloat16' if setting.device == 'cuda' else 'float32'}",
        f"train.compile={str(setting.compiled).lower()}",
        f"train.steps={setting.warmup + setting.steps + setting.profile}",
    ]
    config = resolve(load(None, [*overrides, *setting.overrides, *(() if delayed else NO_DELAY)]))
    # Starts are of the first updates, and these are timed for all that come after them.
    after = fine.stretch(config, config.train.steps)
    return after.changed(
        pipeline={"fine_start": 0.0, "fine_microbatches": None}, optim={"sync_start": 0.0, "sync_finish": 0.0}
    )


def shape_of(setting: Setting) -> ModelConfig | None:
    """The model that is trained, overrides included; None: one whose shape is not known."""
    config = config_of(setting, Path("data"), Path("run"), delayed=True)
    return None if config.own_model else model_config(config.model)


def measure_ours(setting: Setting, data: Path, folder: Path, *, delayed: bool) -> Measured:
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

        def step(index: int) -> None:
            submit(parts, index, loader.get(index))

        found = timed(step, settle, setting, began, sizes_of(parts.model, config))
        parts.reporter.poll(finish=True)
    return found


def measure_rival(name: str, setting: Setting, data: Path, *, rehearsed: bool = False) -> Measured:
    """A microbatch that does not fit into memory is halved, and there are twice as many.

    `rehearsed`: nothing is compiled.
    """
    began = time.perf_counter()
    if setting.rival_rows is not None:
        sequences = setting.rows * setting.microbatches
        setting = replace(setting, rows=setting.rival_rows, microbatches=sequences // setting.rival_rows)
    while True:
        try:
            return _measure(name, setting, data, began, rehearsed)
        except torch.OutOfMemoryError:
            if setting.rows % 2:
                raise
        setting = replace(setting, rows=setting.rows // 2, microbatches=setting.microbatches * 2)
        forget()


def forget() -> None:
    """Leave nothing of an attempt that did not fit: neither its memory, nor its peak, nor its graphs, whose other
    shapes would make the next ones dynamic."""
    torch.compiler.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def _measure(name: str, setting: Setting, data: Path, began: float, rehearsed: bool) -> Measured:
    build, compiled = RIVALS[name]
    device = torch.device(setting.device)
    shape = shape_of(setting)
    assert shape is not None, setting  # `bench.train.check` says so
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.set_float32_matmul_precision("high")
    dataset = TokenDataset(data, "train", setting.sequence, setting.rows * setting.microbatches)

    def settle() -> None:
        if on_gpu:
            torch.cuda.synchronize()

    with (
        build(shape, setting.sequence, device, compiled and not rehearsed) as rival,
        batches.ahead(dataset, batches.Share(setting.microbatches, pin=on_gpu), 0) as loader,
    ):
        optimizer = torch.optim.AdamW(
            rival.module.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True
        )

        def step(index: int) -> None:
            inputs = loader.get(index).to(device).inputs
            assert inputs is not None
            for tokens in inputs.split(setting.rows):
                (rival.loss(tokens) / setting.microbatches).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        return timed(step, settle, setting, began, Sizes.of(shape, setting.rows * setting.sequence))


def perform(contender: str, setting: Setting, data: Path, folder: Path) -> dict[str, Any]:
    try:
        if contender.startswith("ours"):
            return asdict(measure_ours(setting, data, folder, delayed=contender == "ours"))
        # The rival gets the attention kernel that our trainer is given.
        with attention_kernel(config_of(setting, data, folder, delayed=True).train.attention):
            return asdict(measure_rival(contender, setting, data))
    except UserError as error:
        return {"error": str(error)}
    except torch.OutOfMemoryError as error:
        return {"error": f"out of memory with {setting.rows} rows: {str(error).splitlines()[0]}"}


if __name__ == "__main__":
    contender, setting, data, folder = json.loads(sys.argv[1])
    given = Setting(**setting | {"overrides": tuple(setting["overrides"])})
    answer = perform(contender, given, Path(data), Path(folder))
    (Path(folder) / "answer.json").write_text(json.dumps(answer))
