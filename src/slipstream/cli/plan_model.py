"""The model that a plan is for: its shape, and the settings of a run that trains it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from slipstream.config import Config, load
from slipstream.config.resolve import model_config, resolve
from slipstream.errors import UserError, did_you_mean
from slipstream.formats import toml_value
from slipstream.models.config_json import differences, read_config
from slipstream.models.sizes import PRESETS, ModelConfig
from slipstream.plan.layout import ModelSettings
from slipstream.train.preflight import adopt_shape, adopt_vocabulary


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
        return Found(config, ModelSettings(differs=_differs(path)))
    raise UserError(
        f"There is no model preset '{name}'.{did_you_mean(name, PRESETS)} Presets: {', '.join(PRESETS)}; or name a "
        "Hugging Face folder, a config.json, or the .toml of a run."
    )


def _of_run(path: Path) -> Found:
    config = load(path)
    model = config.model
    if model.module is not None and model.hf is None:
        raise UserError(
            f"{path}: model.module = '{model.module}' is code, which does not say its shape. Plan for a model of the "
            "same size: a preset, or a run with model.dim, model.layers and so on."
        )
    adopted = adopt_vocabulary(adopt_shape(config)).model
    alone = Config().changed(pipeline={"stages": 1}, optim={"name": "adamw"})
    resolve(alone.model_copy(update={"model": adopted}))  # what a run could not train is refused
    values = model.model_dump(exclude_unset=True, exclude_none=True)
    if config.data.path is not None and model.init_from is None:
        values["vocab"] = adopted.vocab  # of data that the run which is written does not name
    settings = ModelSettings(values)
    if model.hf is None:
        return Found(model_config(adopted), settings)
    assert adopted.vocab is not None
    return Found(replace(read_config(Path(model.hf), to_run=False), vocab=adopted.vocab), settings)


def _differs(path: Path) -> str:
    """What is to be known of a model that is only planned for; nothing where ours is the one described."""
    names = differences(path)
    if not names:
        return ""
    return (
        f"A model of slipstream's in the same shape; '{path}' describes another one ({', '.join(names)}).\n"
        f"To plan for that one, and train it: --model FILE.toml, with model.hf = {toml_value(str(path))} in it."
    )
