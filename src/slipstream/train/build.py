"""From a resolved config to the parts of a run: data, modules, optimizer, learning rate, loss.

Invariant: nothing here depends on P except which layers a rank holds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from slipstream.config import Config
from slipstream.config.resolve import model_config
from slipstream.config.settings import updates
from slipstream.data.shards import read_meta
from slipstream.distributed.world import device_for
from slipstream.errors import UserError
from slipstream.models.cut import Layers, split
from slipstream.models.loss import TokenLoss
from slipstream.models.sizes import ModelConfig
from slipstream.models.stages import Stage, build_stage
from slipstream.optim import build as build_optimizer
from slipstream.optim.corrections import Correction, build_correction, synchronous_groups
from slipstream.optim.lr import schedule as lr_schedule
from slipstream.pipeline.stage_graphs import stage_graphs
from slipstream.schedule.cutover import Cutover
from slipstream.train.export import read_weights
from slipstream.train.fp8 import check_fp8, in_fp8
from slipstream.train.own_model import OwnModel, TransformersModel

Model = ModelConfig | OwnModel
DEEP = 12  # layers of a stage beyond which train.compile=true compiles them one by one


def shape(config: Config, folder: Path | None) -> Model:
    """The model's shape, with the data's end-of-document token where documents are masked; or the user's own."""
    if config.model.module is not None:
        return OwnModel(config)
    if config.model.hf is not None:
        return TransformersModel(config)
    model = model_config(config.model)
    if not config.data.mask_documents or folder is None:
        return model
    return dataclasses.replace(
        model, document_mask=True, end_of_document=read_meta(folder)["end_of_document"]
    )


def device(config: Config, local_rank: int = 0) -> torch.device:
    """This rank's device as `train.device` asks for it; what it cannot do is refused."""
    available = torch.cuda.is_available()
    if config.train.device == "cuda" and not available:
        raise UserError("train.device = 'cuda', and torch sees no GPU. Set train.device=cpu.")
    if config.train.device == "cpu" or not available:
        if config.train.dtype != "float32":
            raise UserError(
                f"train.dtype = '{config.train.dtype}' needs a GPU: bfloat16 on a CPU is unusably slow. "
                "Set train.dtype=float32."
            )
        where = torch.device("cpu")
    else:
        where = device_for(local_rank)
    if config.train.fp8:
        check_fp8(where)
    return where


def stage_modules(
    config: Config, model: Model, count: int, indices: list[int], where: torch.device
) -> list[Stage] | list[nn.Module]:
    """The stage modules `indices` of a model cut into `count`."""
    if isinstance(model, OwnModel):
        return model.stages(config, count, indices, where)
    layers = cut(config, model, count)
    # A routed layer adds its losses in its own backward, scaled as the engine scales a microbatch's loss.
    weight = 1.0 / config.pipeline.microbatches
    built = []
    for index in indices:
        stage = build_stage(
            model,
            layers[index].start,
            layers[index].stop,
            embedding=index == 0,
            head=index == count - 1,
            seed=config.train.seed,
            device=where,
        )
        stage.auxiliary_weight = weight
        stage.activation_checkpointing = config.train.activation_checkpointing
        stage.chunked_loss = config.train.chunked_loss
        built.append(stage)
    if config.model.init_from is not None:
        weights = read_weights(Path(config.model.init_from), model)
        for stage in built:
            stage.load_state_dict(
                {name: weights[name] for name, _ in stage.named_parameters(remove_duplicate=False)}
            )
    return built


def cut(config: Config, model: ModelConfig, count: int) -> list[Layers]:
    """The layers of each of `count` stages. The emulator's are whole: its delays may differ by stage, and then the cut
    decides what is trained."""
    pipeline = config.pipeline
    return split(
        model, count, pipeline.boundaries, config.data.sequence, whole_layers=pipeline.schedule == "emulate"
    )


def optimizer_factory(config: Config) -> Callable[[nn.Module], Optimizer]:
    return lambda module: build_optimizer(config.optim.name, module, **config.optim.given)


def correction(config: Config) -> Correction:
    optim = config.optim
    assert optim.correction is not None
    options: dict[str, Any] = {}
    if optim.correction == "lr_scaling":
        options = {
            "steps": config.train.steps,
            "start": updates(optim.sync_start, config.train.steps),
            "delay": _mean_delay(config),
        }
    if optim.correction_lambda is not None:
        options["lam"] = optim.correction_lambda
    return build_correction(optim.correction, **options)


def flushed(config: Config) -> Callable[[int], bool]:
    """Which groups are synchronous. None after the last: a fork goes on from the banks of a finished run."""
    steps = config.train.steps
    start, finish = updates(config.optim.sync_start, steps), updates(config.optim.sync_finish, steps)
    listed = synchronous_groups(start, finish, steps)
    return lambda group: group < steps and listed(group)


def cutover(config: Config) -> Cutover:
    """How many microbatches of each group read old weights, on the stage that has most of them. None given: all, as a
    run had it before there was a choice."""
    given, m = config.pipeline.cutover, config.pipeline.microbatches
    assert not isinstance(given, float), given  # resolved
    if not config.late:
        return Cutover(m, 0, flushed(config))
    old = m if given is None else max(given) if isinstance(given, list) else given
    # A fine start has more microbatches than the others, and may have more of them old.
    return Cutover(m, min(old, m), flushed(config))


def _mean_delay(config: Config) -> float:
    """Updates by which a gradient is late, over the microbatches of a group and over the stages."""
    pipeline = config.pipeline
    if pipeline.cutover is None:
        return _mean(pipeline.delay)
    assert not isinstance(pipeline.cutover, float), pipeline.cutover  # resolved
    return _mean(pipeline.cutover) / pipeline.microbatches


def _mean(by_stage: int | list[int]) -> float:
    return sum(by_stage) / len(by_stage) if isinstance(by_stage, list) else by_stage


def learning_rate(config: Config) -> Callable[[int], float]:
    """The multiplier of update g."""
    optim, steps = config.optim, config.train.steps
    assert optim.floor is not None
    return lr_schedule(optim.schedule, 1.0, steps, updates(optim.warmup, steps), optim.floor)


def loss_function(config: Config) -> Callable[[Tensor, Tensor], Tensor]:
    """The loss of one microbatch, as a share of the group's mean over tokens."""
    shares = config.pipeline.microbatches * config.pipeline.data_ranks
    rows = config.pipeline.microbatches * config.pipeline.microbatch_size if config.train.fuse else None
    loss = TokenLoss(shares, config.train.z_loss, rows)
    return torch.compile(loss.__call__, dynamic=dynamic(config)) if config.train.compile else loss


def dynamic(config: Config) -> bool | None:
    """Whether compiled code is for any shape. Fused microbatches, and those of a fine start, come in two or three: each
    is compiled for itself."""
    return False if config.train.fuse or config.pipeline.fine_start else None


def preparation(config: Config) -> Callable[[nn.Module], Any] | None:
    """What is applied to each replica and the master: fp8, compilation, autocast if weights are wider, CUDA graphs."""
    train = config.train
    recorded = train.cuda_graphs and config.pipeline.schedule != "emulate"  # which records more than a stage
    if not (train.compile or train.fp8 or recorded) and train.dtype == "float32":
        return None
    graphs = stage_graphs() if recorded else None

    def prepare(module: nn.Module) -> Any:
        if train.fp8:
            in_fp8(module, train.fp8)
        call = _compiled(module, train.compile, dynamic(config)) if train.compile else module
        narrow = all(p.dtype == torch.bfloat16 for p in module.parameters())
        if train.dtype != "float32" and not narrow:
            call = _under_autocast(call)
        return call if graphs is None else graphs.wrap(module, call)

    return prepare


def _under_autocast(call: Callable[..., Any]) -> Callable[..., Any]:
    def autocast(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast("cuda", torch.bfloat16):
            return call(*args, **kwargs)

    return autocast


def _compiled(module: nn.Module, how: bool | str, dynamic: bool | None) -> Any:
    """Layer by layer one graph serves them all, so compiling takes seconds at any depth; as one graph a residual
    is added where the next norm reads it and the host has less to do, which counts in small models."""
    layers: dict[str, nn.Module] = dict(cast(nn.ModuleDict, module.layers).items())
    if isinstance(module, Stage):
        module.prepare_for_compiler()
    if how == "stage" or (how is True and (len(layers) <= DEEP or not isinstance(module, Stage))):
        return torch.compile(module, dynamic=dynamic)
    for part in (*layers.values(), getattr(module, "norm", None)):
        if part is not None:
            part.compile(dynamic=dynamic)
    return module
