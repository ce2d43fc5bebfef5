"""Derive what can be derived and refuse what cannot work. Invariant: nothing here depends on the machine.

m is a setting, never derived from the stages: the trajectory must not depend on how many stages compute it.
"""

from __future__ import annotations

import dataclasses
import difflib
from typing import Any

from slipstream.config.needs import restarts, without_checkpoints
from slipstream.config.settings import Config, ModelSettings
from slipstream.errors import ConfigError
from slipstream.models.sizes import PRESETS, ModelConfig
from slipstream.optimizers import CORRECTION_NAMES, OPTIMIZERS, default_correction, unknown

# Learning rates found by sweeps on the embedded corpus; elsewhere the optimizer's own default holds.
TUNED_LR = {("cpu-default", "muon"): 0.01}


def resolve(config: Config, *, world: int | None = None) -> Config:
    """Fill in the derived keys (`world`: torchrun's ranks, if it started us) and check the whole."""
    problems: list[str] = []
    own = config.model.module is not None or config.model.hf is not None
    model = None if own else _model(config.model, problems)
    pipeline = _pipeline(config, world, problems)
    config = config.model_copy(update={"pipeline": config.pipeline.model_copy(update=pipeline)})
    config = without_checkpoints(config, problems)
    config = restarts(config, problems)
    optim = _optim(config, problems)
    config = config.model_copy(update={"optim": config.optim.model_copy(update=optim)})
    if model is not None:
        filled: dict[str, Any] = {name: getattr(model, name) for name in _overridable(model)}
        config = config.model_copy(update={"model": config.model.model_copy(update=filled)})
        _check_layers(config, model, problems)
    elif own:
        _own_model(config, problems)
        vocab = config.model.vocab or PRESETS["cpu-default"].vocab
        config = config.model_copy(update={"model": config.model.model_copy(update={"vocab": vocab})})
    _check_pipeline(config, problems)
    _check_train(config, problems)
    if problems:
        raise ConfigError(problems)
    return config


def model_config(settings: ModelSettings) -> ModelConfig:
    """The model's own settings: the preset with single values replaced."""
    preset = PRESETS[settings.preset]
    given = {name: value for name in _overridable(preset) if (value := getattr(settings, name)) is not None}
    return dataclasses.replace(preset, **given)


def updates(value: float, steps: int) -> int:
    """A number of updates: below 1 it is a share of the steps."""
    return round(value * steps) if value < 1 else int(value)


def _overridable(model: ModelConfig) -> list[str]:
    return [field.name for field in dataclasses.fields(model) if field.name in ModelSettings.model_fields]


def _model(settings: ModelSettings, problems: list[str]) -> ModelConfig | None:
    if settings.preset not in PRESETS:
        near = difflib.get_close_matches(settings.preset, PRESETS, n=1)
        hint = f" Did you mean '{near[0]}'?" if near else ""
        problems.append(f"model.preset = '{settings.preset}' is not one of {', '.join(PRESETS)}.{hint}")
        return None
    try:
        return model_config(settings)
    except ConfigError as error:  # the model's own settings explain themselves
        problems.extend(error.problems)
        return None


def _own_model(config: Config, problems: list[str]) -> None:
    """Of a model that is the user's own, or transformers', nothing but the vocabulary is ours to set."""
    hf, module = config.model.hf, config.model.module
    if hf is not None and module is not None:
        problems.append(
            f"model.hf = '{hf}' and model.module = '{module}' both name the model. Drop one of them."
        )
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
        problems.append(
            f"{', '.join(given)} cannot take effect: model.hf = '{hf}' is a model of transformers. Drop what is set "
            "here; the shape is changed in its config.json."
        )
    elif given:
        problems.append(
            f"{', '.join(given)} cannot take effect: model.module = '{module}' is your own model. Drop "
            "what is set here, and do it in your model."
        )


def _pipeline(config: Config, world: int | None, problems: list[str]) -> dict[str, Any]:
    pipeline = config.pipeline
    stages = pipeline.stages
    if stages is None:
        if pipeline.schedule == "emulate":
            stages = 1
        elif world is not None:
            stages = max(1, world // pipeline.data_ranks)
        else:
            stages = 2
    exact = world is not None and pipeline.schedule != "emulate" and not pipeline.elastic
    if exact and stages * pipeline.data_ranks != world:
        problems.append(
            f"{stages} stages x {pipeline.data_ranks} data ranks need {stages * pipeline.data_ranks} "
            "ranks, and "
            f"torchrun started {world}. Set pipeline.stages x pipeline.data_ranks = {world}, or nproc."
        )
    return {"stages": stages, "cutover": _cutover(config, problems)}


def _cutover(config: Config, problems: list[str]) -> int | list[int] | None:
    """In microbatches; None: it is decided when the run is made, and kept with it."""
    given, m = config.pipeline.cutover, config.pipeline.microbatches
    if given is None or isinstance(given, list):
        return given
    share = 0 < given < 1
    count = given * m if share else given
    if abs(count - round(count)) > 1e-9 or not 0 <= count <= m:
        which = f"{given:g} of pipeline.microbatches = {m} is {count:g}" if share else f"it is {given:g}"
        problems.append(
            f"pipeline.cutover: {which}, and must be a whole number of microbatches, from 0 (synchronous) to {m} "
            "(all of them old, PipeDream-2BW)."
        )
        return None
    return None if count == m and config.pipeline.schedule == "emulate" else round(count)


def _optim(config: Config, problems: list[str]) -> dict[str, Any]:
    optim, pipeline = config.optim, config.pipeline
    delayed = not config.synchronous and pipeline.delay not in (0, [0])
    correction = optim.correction
    if correction is None:
        correction = default_correction(optim.name) if delayed else "none"
    if optim.name not in OPTIMIZERS:
        problems.append("optim.name: " + unknown("optimizer", optim.name, OPTIMIZERS))
    if correction not in CORRECTION_NAMES and ":" not in correction:  # with a colon: the place of a class
        problems.append("optim.correction: " + unknown("correction", correction, CORRECTION_NAMES))
    if not delayed:
        if correction != "none":
            problems.append(
                f"optim.correction = '{correction}' cannot take effect: pipeline.schedule = '{pipeline.schedule}' "
                f"with delay {0 if config.synchronous else pipeline.delay} has no delay to correct. Set "
                "optim.correction=none, or pipeline.schedule=2bw."
            )
        if optim.sync_start or optim.sync_finish:
            problems.append(
                f"optim.sync_start = {optim.sync_start} and optim.sync_finish = {optim.sync_finish} cannot take "
                f"effect: every update of pipeline.schedule = '{pipeline.schedule}' is flushed. Set them to 0."
            )
    if correction in ("none", "lr_scaling") and optim.correction_lambda is not None:
        without = "without a correction" if correction == "none" else "with optim.correction=lr_scaling"
        problems.append(
            f"optim.correction_lambda = {optim.correction_lambda} cannot take effect {without}. "
            "Set optim.correction=error_feedback, or drop it."
        )
    if config.model.init_from is not None and "name" not in optim.model_fields_set:
        problems.append(
            "model.init_from needs optim.name named explicitly: Muon on weights pretrained with Adam is known to "
            "degrade them. Set optim.name=adamw (safest) or optim.name=muon to insist."
        )
    if optim.betas is not None and not all(0 <= beta < 1 for beta in optim.betas):
        problems.append(f"optim.betas = {optim.betas}: every rate must lie in [0, 1).")
    if optim.floor and optim.schedule == "constant":
        problems.append(
            f"optim.floor = {optim.floor} cannot take effect with optim.schedule=constant. Drop it."
        )
    floor = optim.floor if optim.floor is not None else 0.0 if optim.schedule == "constant" else 0.1
    tuned = None if config.model.hf is not None else TUNED_LR.get((config.model.preset, optim.name))
    lr = optim.lr if optim.lr is not None else tuned
    return {"correction": correction, "floor": floor, "lr": lr}


def _check_layers(config: Config, model: ModelConfig, problems: list[str]) -> None:
    pipeline = config.pipeline
    assert pipeline.stages is not None
    modules = pipeline.stages * config.chunks
    if pipeline.boundaries is not None:
        bounds = pipeline.boundaries
        if len(bounds) != modules - 1:
            problems.append(
                f"pipeline.boundaries = {bounds} names {len(bounds)} boundaries; {modules} stage modules "
                "need "
                f"{modules - 1}. List the first layer of each stage but the first."
            )
        elif any(a >= b for a, b in zip([0, *bounds], [*bounds, model.layers], strict=True)):
            problems.append(
                f"pipeline.boundaries = {bounds} must rise strictly between 0 and {model.layers} (the "
                "layers)."
            )
    elif modules > model.layers:
        problems.append(
            f"{model.layers} layers cannot fill {modules} stage modules "
            f"({pipeline.stages} stages, {config.chunks} per rank). Set pipeline.stages to at most "
            f"{model.layers // config.chunks}."
        )


def _check_pipeline(config: Config, problems: list[str]) -> None:
    pipeline = config.pipeline
    stages, m = pipeline.stages, pipeline.microbatches
    assert stages is not None
    if pipeline.schedule == "emulate":
        if stages != 1 or pipeline.data_ranks != 1:
            problems.append(
                f"pipeline.schedule = 'emulate' runs in one process; pipeline.stages = {stages} and "
                f"pipeline.data_ranks = {pipeline.data_ranks} cannot take effect. Set both to 1."
            )
        delays = pipeline.delay if isinstance(pipeline.delay, list) else [pipeline.delay]
        if not delays or min(delays) < 0:
            problems.append(f"pipeline.delay = {pipeline.delay} must not be negative or empty.")
        elif pipeline.mismatch not in (0, [0]):
            _check_mismatch(config, delays, problems)
        if config.model.layers is not None and len(delays) > config.model.layers:
            problems.append(
                f"pipeline.delay = {pipeline.delay} names {len(delays)} stages, and {config.model.layers} layers "
                f"cannot fill them. List at most {config.model.layers} delays."
            )
    elif m < stages:
        problems.append(
            f"pipeline.microbatches = {m} is less than pipeline.stages = {stages}. Set "
            f"pipeline.microbatches to at least {stages}, or use fewer stages."
        )
    if pipeline.schedule != "emulate" and pipeline.delay != 1:
        problems.append(
            f"pipeline.delay = {pipeline.delay} cannot take effect: pipeline.schedule = "
            f"'{pipeline.schedule}' has "
            f"a delay of {0 if config.synchronous else 1}. Set pipeline.schedule=emulate for other delays."
        )
    _check_cutover(config, problems)
    if pipeline.schedule != "emulate" and pipeline.mismatch != 0:
        problems.append(
            f"pipeline.mismatch = {pipeline.mismatch} cannot take effect: pipeline.schedule = "
            f"'{pipeline.schedule}' keeps a forward's weights for its backward. Set pipeline.schedule=emulate."
        )
    if pipeline.schedule != "2bw":
        if pipeline.in_flight is not None:
            problems.append("pipeline.in_flight takes effect with pipeline.schedule=2bw only. Drop it.")
        if pipeline.shard_optimizer:
            problems.append("pipeline.shard_optimizer takes effect with pipeline.schedule=2bw only. Drop it.")
    elif pipeline.in_flight is not None and not stages <= pipeline.in_flight <= m + 1:
        problems.append(
            f"pipeline.in_flight = {pipeline.in_flight} must lie between the stages ({stages}) and "
            f"microbatches + 1 ({m + 1})."
        )
    if config.chunks == 2 and m % stages:
        problems.append(
            f"pipeline.schedule = '{pipeline.schedule}' needs pipeline.microbatches ({m}) divisible by "
            f"pipeline.stages ({stages})."
        )
    if pipeline.schedule == "zbv" and config.data.mask_documents:
        problems.append("data.mask_documents does not work with pipeline.schedule=zbv. Use 2bw or 1f1b.")
    if pipeline.schedule == "zbv" and config.model.experts:
        problems.append(
            f"model.experts = {config.model.experts} does not work with pipeline.schedule=zbv: torch cannot cut the "
            "backward of a routed layer in two. Use 2bw, 1f1b or interleaved_1f1b."
        )
    if pipeline.shard_optimizer and pipeline.data_ranks == 1:
        problems.append("pipeline.shard_optimizer needs pipeline.data_ranks of 2 or more to take effect.")
    if pipeline.partitions and (pipeline.schedule == "emulate" or config.train.device == "cpu"):
        problems.append(
            f"pipeline.partitions cuts one GPU among the ranks; with pipeline.schedule = '{pipeline.schedule}' "
            f"and train.device = '{config.train.device}' it cannot take effect. Drop it."
        )
    if pipeline.microbatch_size % pipeline.data_ranks:
        problems.append(
            f"pipeline.microbatch_size = {pipeline.microbatch_size} cannot be shared by "
            "pipeline.data_ranks = "
            f"{pipeline.data_ranks}. Make it a multiple."
        )


def _check_cutover(config: Config, problems: list[str]) -> None:
    pipeline, optim = config.pipeline, config.optim
    cutover, m = pipeline.cutover, pipeline.microbatches
    if cutover is None:
        return
    if config.synchronous:
        problems.append(
            f"pipeline.cutover = {cutover} cannot take effect: pipeline.schedule = '{pipeline.schedule}' reads the "
            "newest weights only. Drop it, or set pipeline.schedule=2bw."
        )
        return
    if pipeline.delay != 1 or pipeline.mismatch not in (0, [0]):
        problems.append(
            f"pipeline.cutover = {cutover} is of 2BW, where every stage is one update late: it does not go with "
            f"pipeline.delay = {pipeline.delay} and pipeline.mismatch = {pipeline.mismatch}. Drop it, or those."
        )
    if isinstance(cutover, list) and pipeline.schedule == "2bw":
        problems.append(
            f"pipeline.cutover = {cutover}: the stages of a pipeline share one, so that a microbatch reads one version "
            "all the way. Give one number, or set pipeline.schedule=emulate."
        )
    elif isinstance(cutover, list):
        layers = config.model.layers
        if not cutover or min(cutover) < 0 or max(cutover) > m:
            problems.append(f"pipeline.cutover = {cutover} must lie between 0 and the microbatches ({m}).")
        elif layers is not None and len(cutover) > layers:
            problems.append(
                f"pipeline.cutover = {cutover} names {len(cutover)} stages, and {layers} layers cannot fill them."
            )
    if optim.correction == "delay_compensation" and cutover not in (0, m):
        problems.append(
            f"pipeline.cutover = {cutover} does not go with optim.correction=delay_compensation, which changes a "
            "gradient taken at one bank. Set optim.correction=error_feedback or none, or drop it."
        )


def _check_mismatch(config: Config, delays: list[int], problems: list[str]) -> None:
    """A backward can only see newer weights where its forward's own are the ones autograd kept."""
    mismatch, train, optim = config.pipeline.mismatch, config.train, config.optim
    lags = mismatch if isinstance(mismatch, list) else [mismatch] * len(delays)
    if len(lags) != len(delays) or any(not 0 <= lag <= late for lag, late in zip(lags, delays, strict=False)):
        problems.append(
            f"pipeline.mismatch = {mismatch} must give one number for each stage of pipeline.delay = "
            f"{config.pipeline.delay}, none negative or above that stage's delay."
        )
    if train.dtype == "bfloat16_autocast" or train.compile:
        problems.append(
            "pipeline.mismatch cannot take effect under train.dtype=bfloat16_autocast or train.compile, where the "
            "backward may read a copy of the weights. Set train.dtype=bfloat16 (or float32) and train.compile=false."
        )
    if optim.sync_start or optim.sync_finish:
        problems.append(
            f"pipeline.mismatch = {mismatch} does not go with optim.sync_start and optim.sync_finish: a flushed "
            "update has no mismatch. Set them to 0."
        )


def _check_train(config: Config, problems: list[str]) -> None:
    train, optim = config.train, config.optim
    if train.dtype != "float32" and train.device == "cpu":
        problems.append(f"train.dtype = '{train.dtype}' is unusably slow on a CPU. Set train.dtype=float32.")
    if train.gradient_dtype is not None and (train.dtype != "bfloat16" or config.synchronous):
        problems.append(
            f"train.gradient_dtype = '{train.gradient_dtype}' goes with train.dtype=bfloat16 and the 2bw or emulate "
            "schedule only. Drop it."
        )
    if train.cuda_graphs and (config.pipeline.schedule != "emulate" or train.device == "cpu"):
        problems.append(
            "train.cuda_graphs records the microbatches of one process on a GPU; with pipeline.schedule = "
            f"'{config.pipeline.schedule}' and train.device = '{train.device}' it cannot take effect. Drop it."
        )
    if train.cuda_graphs and config.pipeline.mismatch not in (0, [0]):
        problems.append(
            f"train.cuda_graphs records one set of weights, and pipeline.mismatch = {config.pipeline.mismatch} gives "
            "a backward another. Drop one of them."
        )
    if train.fuse and (config.pipeline.schedule != "emulate" or config.model.experts):
        problems.append(
            "train.fuse computes microbatches of one process together, and needs a loss that is a mean over rows; with "
            f"pipeline.schedule = '{config.pipeline.schedule}' and model.experts = {config.model.experts} it cannot "
            "take effect. Drop it."
        )
    start, finish = updates(optim.sync_start, train.steps), updates(optim.sync_finish, train.steps)
    if start + finish > train.steps:
        problems.append(
            f"optim.sync_start ({start} updates) and optim.sync_finish ({finish}) exceed train.steps ({train.steps}). "
            "Lower one of them."
        )
    if updates(optim.warmup, train.steps) > train.steps:
        problems.append(
            f"optim.warmup = {optim.warmup:g} exceeds train.steps = {train.steps}. Set it to at most {train.steps} "
            "updates, or below 1 for a share of the steps."
        )
    if config.health.rollback and config.checkpoint.every == 0:
        problems.append("health.rollback needs checkpoints to return to. Set checkpoint.every.")
    if config.health.rollback and config.checkpoint.keep == 1:
        problems.append(
            "health.rollback needs a checkpoint from before the failure, and the newest may be from after it. Set "
            "checkpoint.keep=2 or more."
        )
