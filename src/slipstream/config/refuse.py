"""What cannot work, in sentences: a setting that cannot take effect, or settings that contradict each other.

Invariant: nothing here depends on the machine. `given` is the run as it was asked for, `config` as it was derived.
"""

from __future__ import annotations

from collections.abc import Iterator

from slipstream.config.refuse_schedule import refused_schedule
from slipstream.config.settings import Config, ModelSettings, updates
from slipstream.models.cut import rising
from slipstream.models.sizes import FP8_SIDE, ModelConfig
from slipstream.optimizers import CORRECTION_NAMES, OPTIMIZERS, unknown


def refused(given: Config, config: Config, model: ModelConfig | None, world: int | None) -> Iterator[str]:
    """Every problem of a run; `model` is None where it is not ours, or could not be made."""
    yield from _ranks(config, world)
    yield from _without_checkpoints(given)
    yield from _restarts(given, config)
    yield from _optim(config)
    if model is not None:
        yield from _layers(config, model)
    elif config.own_model:
        yield from _own_model(given)
    yield from refused_schedule(config)
    yield from _train(config)
    if config.train.fp8 is not None:
        yield from _fp8(config, model)


def _ranks(config: Config, world: int | None) -> Iterator[str]:
    pipeline = config.pipeline
    exact = world is not None and pipeline.schedule != "emulate" and not pipeline.elastic
    if exact and config.ranks != world:
        yield (
            f"{config.stages} stages x {pipeline.data_ranks} data ranks need {config.ranks} ranks, and torchrun "
            f"started {world}. Set pipeline.stages x pipeline.data_ranks = {world}, or nproc."
        )


def _without_checkpoints(given: Config) -> Iterator[str]:
    """With checkpoint.keep = 0 nothing is saved, so nothing that needs a saved state may be asked for."""
    asked = {
        "checkpoint.every": (given.checkpoint, "every"),
        "checkpoint.memory_every": (given.checkpoint, "memory_every"),
        "checkpoint.best": (given.checkpoint, "best"),
        "train.sample_tokens": (given.train, "sample_tokens"),
    }
    for key, (section, name) in asked.items():
        value = getattr(section, name) if name in section.model_fields_set else None
        if value and not given.checkpoint.keep:
            yield (
                f"{key} = {value} cannot take effect: checkpoint.keep = 0 writes no checkpoint. Set {key}=0, or "
                "checkpoint.keep=1."
            )


def _restarts(given: Config, config: Config) -> Iterator[str]:
    pipeline, restarts = config.pipeline, given.train.restarts
    if pipeline.schedule == "emulate" and (pipeline.elastic or restarts):
        yield (
            "pipeline.elastic and train.restarts cannot take effect with pipeline.schedule=emulate, which runs in one "
            "process. Drop them."
        )
    if not pipeline.elastic:
        if "least_stages" in pipeline.model_fields_set and pipeline.least_stages > 1:
            yield "pipeline.least_stages cannot take effect without pipeline.elastic=true."
        return
    if pipeline.boundaries is not None:
        yield (
            f"pipeline.elastic changes the number of stages, and pipeline.boundaries = {pipeline.boundaries} fixes it. "
            "Drop one of them."
        )
    if restarts == 0:
        yield "pipeline.elastic cannot take effect with train.restarts = 0. Set train.restarts=3, say."
    if pipeline.least_stages > config.stages:
        yield f"pipeline.least_stages = {pipeline.least_stages} is more than pipeline.stages = {config.stages}."


def _optim(config: Config) -> Iterator[str]:
    optim, pipeline, correction = config.optim, config.pipeline, config.optim.correction
    assert correction is not None
    if optim.name not in OPTIMIZERS:
        yield "optim.name: " + unknown("optimizer", optim.name, OPTIMIZERS)
    if correction not in CORRECTION_NAMES and ":" not in correction:  # with a colon: the place of a class
        yield "optim.correction: " + unknown("correction", correction, CORRECTION_NAMES)
    # The delay of 2bw is looked at elsewhere.
    if not config.late and correction != "none" and pipeline.schedule != "2bw":
        other = "pipeline.schedule=2bw" if config.synchronous else "pipeline.delay=1"
        yield (
            f"optim.correction = '{correction}' cannot take effect: pipeline.schedule = '{pipeline.schedule}' "
            f"with delay {0 if config.synchronous else pipeline.delay} has no delay to correct. Set "
            f"optim.correction=none, or {other}."
        )
    if not config.late and (optim.sync_start or optim.sync_finish):
        yield (
            f"optim.sync_start = {optim.sync_start} and optim.sync_finish = {optim.sync_finish} cannot take "
            f"effect: every update of pipeline.schedule = '{pipeline.schedule}' is flushed. Set them to 0."
        )
    if correction in ("none", "lr_scaling") and optim.correction_lambda is not None:
        without = "without a correction" if correction == "none" else "with optim.correction=lr_scaling"
        yield (
            f"optim.correction_lambda = {optim.correction_lambda} cannot take effect {without}. "
            "Set optim.correction=error_feedback, or drop it."
        )
    if config.model.init_from is not None and "name" not in optim.model_fields_set:
        yield (
            "model.init_from needs optim.name named explicitly: Muon on weights pretrained with Adam is known to "
            "degrade them. Set optim.name=adamw (safest) or optim.name=muon to insist."
        )
    for name in sorted(set(optim.options) & set(type(optim).model_fields)):
        yield f"optim.options.{name} has a key of its own: set optim.{name} instead."
    if optim.betas is not None and not all(0 <= beta < 1 for beta in optim.betas):
        yield f"optim.betas = {optim.betas}: every rate must lie in [0, 1)."
    if optim.floor and optim.schedule == "constant":
        yield f"optim.floor = {optim.floor} cannot take effect with optim.schedule=constant. Drop it."


def _own_model(config: Config) -> Iterator[str]:
    """Of a model that is the user's own, or transformers', nothing but the vocabulary is ours to set."""
    hf, module = config.model.hf, config.model.module
    if hf is not None and module is not None:
        yield (f"model.hf = '{hf}' and model.module = '{module}' both name the model. Drop one of them.")
    ours = ("module", "vocab") if hf is None else ("hf", "module", "vocab", "init_from")
    shape = [name for name in ModelSettings.model_fields if name not in ours]
    given = [
        f"model.{name}"
        for name in shape
        if name in config.model.model_fields_set and getattr(config.model, name) not in (None, "cpu-default")
    ]
    if config.train.activation_checkpointing and hf is None:
        given.append("train.activation_checkpointing")
    if config.data.mask_documents:
        given.append("data.mask_documents")
    if given and hf is not None:
        yield (
            f"{', '.join(given)} cannot take effect: model.hf = '{hf}' is a model of transformers. Drop what is set "
            "here; the shape is changed in its config.json."
        )
    elif given:
        yield (
            f"{', '.join(given)} cannot take effect: model.module = '{module}' is your own model. Drop "
            "what is set here, and do it in your model."
        )


def _layers(config: Config, model: ModelConfig) -> Iterator[str]:
    pipeline = config.pipeline
    modules = config.stages * config.chunks
    if pipeline.boundaries is not None:
        bounds = pipeline.boundaries
        if len(bounds) != modules - 1:
            yield (
                f"pipeline.boundaries = {bounds} names {len(bounds)} boundaries; {modules} stage modules need "
                f"{modules - 1}. List the first layer of each stage but the first, or write pipeline.boundaries= "
                "for an even cut."
            )
        elif not rising([0, *bounds, model.layers]):
            yield (
                f"pipeline.boundaries = {bounds} must rise strictly between 0 and {model.layers} (the layers), in "
                "whole or half layers: 2.5 is inside layer 2, behind its attention."
            )
    elif modules > model.layers:
        yield (
            f"{model.layers} layers cannot fill {modules} stage modules ({pipeline.stages} stages, {config.chunks} "
            f"per rank). Set pipeline.stages to at most {model.layers // config.chunks}."
        )


def _train(config: Config) -> Iterator[str]:
    train, optim = config.train, config.optim
    if train.dtype != "float32" and train.device == "cpu":
        yield f"train.dtype = '{train.dtype}' is unusably slow on a CPU. Set train.dtype=float32."
    if train.gradient_dtype is not None and (train.dtype != "bfloat16" or config.synchronous):
        yield (
            f"train.gradient_dtype = '{train.gradient_dtype}' goes with train.dtype=bfloat16 and the 2bw or emulate "
            "schedule only. Drop it."
        )
    if train.cuda_graphs and train.device == "cpu":
        yield "train.cuda_graphs records what a GPU runs; with train.device = 'cpu' it cannot take effect. Drop it."
    if train.cuda_graphs and config.pipeline.schedule == "zbv":
        yield (
            "train.cuda_graphs records a backward as one, and pipeline.schedule = 'zbv' cuts it in two. Drop it, or "
            "use 2bw, 1f1b, gpipe or interleaved_1f1b."
        )
    if train.compile and config.pipeline.schedule == "zbv":
        yield (
            f"train.compile = {train.compile} does not work with pipeline.schedule=zbv: torch cannot cut the backward "
            "of compiled code in two. Drop it, or use 2bw, 1f1b, gpipe or interleaved_1f1b."
        )
    if train.cuda_graphs and config.pipeline.mismatch not in (0, [0]):
        yield (
            f"train.cuda_graphs records one set of weights, and pipeline.mismatch = {config.pipeline.mismatch} gives "
            "a backward another. Drop one of them."
        )
    if train.deterministic and train.attention == "cudnn":
        yield (
            "train.attention = cudnn cannot take effect with train.deterministic: its backward adds in any order. Drop "
            "one of them."
        )
    if train.chunked_loss and not _can_chunk(config):
        yield (
            "train.chunked_loss is for models of ours on the 2bw or emulate schedule, in float32 or bfloat16, with no "
            "pipeline.mismatch. Drop it."
        )
    if train.fuse and (config.pipeline.schedule != "emulate" or config.model.experts):
        yield (
            "train.fuse computes microbatches of one process together, and needs a loss that is a mean over rows; with "
            f"pipeline.schedule = '{config.pipeline.schedule}' and model.experts = {config.model.experts} it cannot "
            "take effect. Drop it."
        )
    start, finish = updates(optim.sync_start, train.steps), updates(optim.sync_finish, train.steps)
    if start + finish > train.steps:
        yield (
            f"optim.sync_start ({start} updates) and optim.sync_finish ({finish}) exceed train.steps ({train.steps}). "
            "Lower one of them."
        )
    if updates(optim.warmup, train.steps) > train.steps:
        yield (
            f"optim.warmup = {optim.warmup:g} exceeds train.steps = {train.steps}. Set it to at most {train.steps} "
            "updates, or below 1 for a share of the steps."
        )
    if config.health.rollback and config.checkpoint.every == 0:
        yield "health.rollback needs checkpoints to return to. Set checkpoint.every."
    if config.health.rollback and config.checkpoint.keep == 1:
        yield (
            "health.rollback needs a checkpoint from before the failure, and the newest may be from after it. Set "
            "checkpoint.keep=2 or more."
        )


def _fp8(config: Config, model: ModelConfig | None) -> Iterator[str]:
    train = config.train
    if config.own_model:
        yield f"train.fp8 = '{train.fp8}' is for models of ours. Drop it."
    elif train.dtype == "float32" and train.device != "cpu":
        yield (
            f"train.fp8 = '{train.fp8}' goes with train.dtype=bfloat16 or bfloat16_autocast on a GPU: its results are "
            "bfloat16. Set that, or train.device=cpu, where it is emulated in float32."
        )
    if model is not None:
        others = [model.q_dim, model.kv_dim, *([] if model.experts else [model.ffn])]
        if model.dim % FP8_SIDE or all(side % FP8_SIDE for side in others):
            yield (
                f"train.fp8 = '{train.fp8}' is for matrices with sides that are multiples of {FP8_SIDE}, and no layer "
                f"of {model.dim} by {', '.join(map(str, others))} has one. Change model.dim, or drop it."
            )


def _can_chunk(config: Config) -> bool:
    """The loss needs the head's weights as the forward had them, in the dtype that they are multiplied in."""
    narrow = config.train.dtype == "bfloat16_autocast"
    return not (config.own_model or narrow or config.synchronous) and config.pipeline.mismatch in (0, [0])
