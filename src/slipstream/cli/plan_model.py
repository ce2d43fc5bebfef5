"""The model that a plan is for: its shape, and the settings of a run that trains it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from slipstream.config import load
from slipstream.config.resolve import model_config
from slipstream.errors import UserError, did_you_mean
from slipstream.models.config_json import read_config
from slipstream.models.sizes import PRESETS, ModelConfig
from slipstream.plan.layout import ModelSettings
from slipstream.train.preflight import adopt_shape


class Found(NamedTuple):
    config: ModelConfig
    settings: ModelSettings | None = None  # None: its preset, or its shape key by key


def find_model(name: str) -> Found:
    """What a preset, a model folder, a config.json or a run's file says."""
    if name in PRESETS:
        return Found(PRESETS[name])
    path = Path(name)
    if path.suffix == ".toml":
        return _of_run(path)
    if path.exists() or path.suffix == ".json" or "/" in name:
        config = read_config(path, to_run=False)
        try:
            read_config(path)
        except UserError as error:
            return Found(config, ModelSettings(differs=str(error)))
        return Found(config)
    raise UserError(
        f"There is no model preset '{name}'.{did_you_mean(name, PRESETS)} Presets: {', '.join(PRESETS)}; or name a "
        "Hugging Face folder, a config.json, or the .toml of a run."
    )


def _of_run(path: Path) -> Found:
    config = load(path)
    model = config.model
    if model.module is not None:
        raise UserError(
            f"{path}: model.module = '{model.module}' is code, which does not say its shape. Plan for a model of the "
            "same size: a preset, or a run with model.dim, model.layers and so on."
        )
    settings = ModelSettings(model.model_dump(exclude_unset=True, exclude_none=True))
    if model.hf is None:
        return Found(model_config(adopt_shape(config).model), settings)
    found = read_config(Path(model.hf), to_run=False)
    return Found(found if model.vocab is None else replace(found, vocab=model.vocab), settings)
