"""What the training loop drives: `Emulator`, `Schedule2BW`, or torch's synchronous schedules (`synchronous.py`).

Invariant of all three: `after_update(g)` is called when update g is done on this rank and before a later one is, so
that a `capture` inside it is the state at that boundary: live tensors, good until the next step (`hold` makes later
updates wait, on the device, for whoever copies them). `stopping` gives the same answer at the same group on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from slipstream.config import Config
from slipstream.distributed import World
from slipstream.errors import UserError
from slipstream.models.sizes import ModelConfig
from slipstream.pipeline.emulator import Emulator
from slipstream.pipeline.graphs import CudaGraphs
from slipstream.torch_private import spare_compiler
from slipstream.train import build
from slipstream.train.batches import Batch
from slipstream.train.own_model import OwnModel

if TYPE_CHECKING:  # torch's pipelines load its compiler, which takes seconds
    from slipstream.pipeline.runtime import Schedule2BW
    from slipstream.train.synchronous import Synchronous

RunEngine: TypeAlias = "Emulator | Schedule2BW | Synchronous"


def engine_of(config: Config, model: build.Model, world: World | None, device: torch.device) -> RunEngine:
    """One rank of a run."""
    if not config.train.compile:
        spare_compiler()
    if config.train.cuda_graphs and device.type != "cuda":
        raise UserError("train.cuda_graphs needs a GPU, and torch sees none. Drop it.")
    if world is None:
        return _emulated(config, model, device)
    if config.synchronous:
        from slipstream.train.synchronous import Synchronous

        return Synchronous(config, model, world, device)
    return _pipelined(config, model, world, device)


def losses_of(call: Callable[..., Any], batch: Batch) -> list[Tensor]:
    """Hand a group to an engine's `step` or `eval`; the losses of its microbatches on a rank that has them."""
    losses: list[Tensor] = []
    inputs = () if batch.inputs is None else (batch.inputs,)
    targets = {} if batch.targets is None else {"target": batch.targets, "losses": losses}
    call(*inputs, **targets, return_outputs=False)  # a group's logits would fill a GPU
    return losses


def _options(config: Config) -> dict[str, Any]:
    """What the emulator and the pipeline are told alike."""
    return {
        "n_microbatches": config.pipeline.microbatches,
        "loss_fn": build.loss_function(config),
        "optimizer": build.optimizer_factory(config),
        "correction": build.correction(config),
        "max_grad_norm": config.optim.max_grad_norm or None,
        "synchronous": build.flushed(config),
        "cutover": config.pipeline.cutover,
        "bank_dtype": torch.bfloat16 if config.train.dtype == "bfloat16" else None,
        "gradient_dtype": torch.bfloat16 if config.train.gradient_dtype == "bfloat16" else None,
        "prepare": build.preparation(config),
    }


def _emulated(config: Config, model: build.Model, device: torch.device) -> Emulator:
    """One process for the whole model."""
    delay, cutover = config.pipeline.delay, config.pipeline.cutover
    count = max(len(of) if isinstance(of, list) else 1 for of in (delay, cutover))
    modules = build.stage_modules(config, model, count, list(range(count)), device)
    if isinstance(model, ModelConfig) and model.tied:
        _share_embedding(modules)
    return Emulator(
        modules[0] if count == 1 else None,
        **_options(config),
        delay=delay,
        stages=modules if count > 1 else None,
        mismatch=config.pipeline.mismatch,
        recorder=CudaGraphs() if config.train.cuda_graphs else None,
        fuse=config.train.fuse,
    )


def _pipelined(config: Config, model: build.Model, world: World, device: torch.device) -> Schedule2BW:
    """One stage on one rank of a pipeline x data mesh."""
    from slipstream.pipeline.runtime import Schedule2BW
    from slipstream.pipeline.torch_stage import Route, StageInfo

    pipeline, stages = config.pipeline, config.stages
    index, _ = world.mesh(stages)
    (module,) = build.stage_modules(config, model, stages, [index], device)
    group, data_group = mesh_groups(world, stages)
    return Schedule2BW(
        StageInfo(module, index, stages, device, group, Route()),
        **_options(config),
        in_flight=pipeline.in_flight,
        tied=tied_names(model, module),
        data_group=data_group,
        shard_optimizer=pipeline.shard_optimizer,
        compact_master=None,
        timeout=config.train.timeout_seconds,
    )


def mesh_groups(world: World, stages: int) -> tuple[dist.ProcessGroup, dist.ProcessGroup | None]:
    """(this pipeline, this stage's data ranks). Groups are made by all ranks in one order."""
    pipelines = [list(range(first, first + stages)) for first in range(0, world.size, stages)]
    pipeline, _ = dist.new_subgroups_by_enumeration(pipelines)
    data = None
    if world.size > stages:
        data_ranks = [list(range(stage, world.size, stages)) for stage in range(stages)]
        data, _ = dist.new_subgroups_by_enumeration(data_ranks)
    assert isinstance(pipeline, dist.ProcessGroup)
    return pipeline, data if isinstance(data, dist.ProcessGroup) else None


def tied_names(model: build.Model, module: Any) -> dict[str, str | Sequence[str]]:
    """The tied weight this stage holds, by the name the other holder also gives it."""
    if isinstance(model, OwnModel):
        return dict(model.ties_between([module]))
    if not model.tied:
        return {}
    if module.embedding is not None and module.head is not None:
        _share_embedding([module])
        return {}
    if module.embedding is not None:
        return {"embedding": "embedding.weight"}
    return {"embedding": "head.weight"} if module.head is not None else {}


def _share_embedding(modules: list[Any]) -> None:
    """One Parameter for embedding and head where one process holds both: the engine then ties them."""
    modules[-1].head.weight = modules[0].embedding.weight
