"""Derive what can be derived; what cannot work is refused, all of it at once (`refuse.py`).

m is a setting, never derived from the stages: the trajectory must not depend on how many stages compute it.
"""

from __future__ import annotations

import dataclasses

from slipstream.config.refuse import refused
from slipstream.config.settings import Config, ModelSettings
from slipstream.errors import ConfigError, did_you_mean
from slipstream.models.sizes import PRESETS, ModelConfig
from slipstream.optimizers import default_correction

# Learning rates found by sweeps on the embedded corpus; elsewhere the optimizer's own default holds.
TUNED_LR = {("cpu-default", "muon"): 0.01}


def resolve(config: Config, *, world: int | None = None) -> Config:
    """Fill in the derived keys (`world`: torchrun's ranks, if it started us) and check the whole."""
    given, problems = config, []
    model = None if config.own_model else _model(config.model, problems)
    pipeline, train, optim = config.pipeline, config.train, config.optim
    stages = pipeline.stages
    if stages is None:
        ranks = 2 * pipeline.data_ranks if world is None else world
        stages = 1 if pipeline.schedule == "emulate" else max(1, ranks // pipeline.data_ranks)
    restarts = (3 if pipeline.elastic else 0) if train.restarts is None else train.restarts
    floor = 0.0 if optim.schedule == "constant" else 0.1
    tuned = None if config.model.hf is not None else TUNED_LR.get((config.model.preset, optim.name))
    config = config.changed(pipeline={"fine_microbatches": _fine_microbatches(config, problems)})
    config = config.changed(
        pipeline={"stages": stages, "cutover": _cutover(config, problems)},
        train={"restarts": restarts} | ({} if config.checkpoint.keep else {"sample_tokens": 0}),
        checkpoint={} if config.checkpoint.keep else {"every": 0},
        optim={
            "correction": optim.correction or (default_correction(optim.name) if config.late else "none"),
            "floor": floor if optim.floor is None else optim.floor,
            "lr": tuned if optim.lr is None else optim.lr,
        },
    )
    if model is not None:
        config = config.changed(model={name: getattr(model, name) for name in overridable(model)})
    elif config.own_model:
        config = config.changed(model={"vocab": config.model.vocab or PRESETS["cpu-default"].vocab})
    problems += refused(given, config, model, world)
    if problems:
        raise ConfigError(problems)
    return config


def model_config(settings: ModelSettings) -> ModelConfig:
    """The model's own settings: the preset with single values replaced."""
    if settings.preset not in PRESETS:
        hint = did_you_mean(settings.preset, PRESETS)
        raise ConfigError([f"model.preset = '{settings.preset}' is not one of {', '.join(PRESETS)}.{hint}"])
    preset = PRESETS[settings.preset]
    given = {name: value for name in overridable(preset) if (value := getattr(settings, name)) is not None}
    return dataclasses.replace(preset, **given)


def overridable(model: ModelConfig) -> list[str]:
    return [field.name for field in dataclasses.fields(model) if field.name in ModelSettings.model_fields]


def _model(settings: ModelSettings, problems: list[str]) -> ModelConfig | None:
    try:
        return model_config(settings)
    except ConfigError as error:  # the model's own settings explain themselves
        problems.extend(error.problems)
        return None


def _fine_microbatches(config: Config, problems: list[str]) -> int | None:
    """Of an update in the fine start; None where the run has none."""
    pipeline = config.pipeline
    given, m, rows = pipeline.fine_microbatches, pipeline.microbatches, pipeline.microbatch_size
    if given is not None or not pipeline.fine_start:
        return given
    parts = next((parts for parts in (4, 3, 2) if rows % parts == 0), None)
    if parts is None:
        problems.append(
            f"pipeline.fine_start = {pipeline.fine_start:g}: microbatches of pipeline.microbatch_size = {rows} cannot "
            "be cut into 4, 3 or 2 equal ones. Make it a multiple of one of those"
            + (", or name pipeline.fine_microbatches." if rows > 1 else ".")
        )
        return None
    return parts * m


def _cutover(config: Config, problems: list[str]) -> int | list[int] | None:
    """In microbatches; None: it is decided when the run is made, and kept with it. Where an update has fewer (not in a
    fine start), all of them are old."""
    given, m, most = config.pipeline.cutover, config.pipeline.microbatches, config.pipeline.most_microbatches
    if given is None or isinstance(given, list):
        return given
    if isinstance(given, float) and given == 1 and m > 1:
        problems.append(
            f"pipeline.cutover = {given} could be one microbatch or all of them: write 1, or {m} for all."
        )
        return None
    share = 0 < given < 1
    count = given * m if share else given
    if abs(count - round(count)) > 1e-9 or not 0 <= count <= most:
        which = f"{given:g} of pipeline.microbatches = {m} is {count:g}" if share else f"it is {given:g}"
        problems.append(
            f"pipeline.cutover: {which}, and must be a whole number of microbatches, from 0 (synchronous) to {most} "
            "(all of them old, PipeDream-2BW)."
        )
        return None
    return None if count == most and config.pipeline.schedule == "emulate" else round(count)
