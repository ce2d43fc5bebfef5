"""The newest weights of a run as plain tensors: for generating, exporting, and looking."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from slipstream.config import Config, from_tree
from slipstream.errors import CheckpointError, ConfigError
from slipstream.models.sizes import ModelConfig
from slipstream.train import checkpoint
from slipstream.train.export import parameter_shapes
from slipstream.train.sanity import check_weights

TOKENIZER_FILE = "tokenizer.json"


@dataclass(frozen=True)
class Master:
    """z at `step`, with what is needed to use it."""

    weights: dict[str, Tensor]
    config: Config
    model: (
        ModelConfig | None
    )  # None: the user's own (config.model.module), or transformers' (config.model.hf)
    step: int
    tokenizer: Path | None  # a tokenizer.json, where the run's data had one
    described: dict[str, Any] | None = None  # the config.json of a model of transformers


def load_master(run: str | Path) -> Master:
    """The master of the newest good checkpoint of a run folder, or of a checkpoint folder."""
    path = checkpoint.locate(run)
    found = checkpoint.verify(path)
    trees = checkpoint.read(path, found, sections=("master",))
    try:
        weights = {name: tensor for tree in trees for name, tensor in tree["master"].items()}
        places = [path.parents[1] / TOKENIZER_FILE, Path(found.says("data_folder", str)) / TOKENIZER_FILE]
        config, described = from_tree(found.says("config", dict)), found.says("model", dict)
        foreign = "module" in described or "hugging_face" in described
        model = None if foreign else ModelConfig(**described)
    except ConfigError as error:
        raise CheckpointError(f"'{path}' is of another version: {error}") from None
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        raise CheckpointError(
            f"'{path}' is not a run's checkpoint: {type(error).__name__} {error}."
        ) from None
    check_weights(path, weights)
    if model is not None:
        _check_shapes(path, weights, model)
    tokenizer = next((place for place in places if place.is_file()), None)
    return Master(weights, config, model, found.step, tokenizer, described.get("hugging_face"))


def _check_shapes(path: Path, weights: dict[str, Tensor], model: ModelConfig) -> None:
    """Before a model is built: one of the wrong size might not fit any memory."""
    shapes = parameter_shapes(model) if model.layers <= len(weights) else {"layers": None}
    if "embedding.weight" in shapes:  # a tied head has no parameter of its own, and is kept all the same
        shapes |= dict.fromkeys({"head.weight"} & weights.keys(), shapes["embedding.weight"])
    for name, shape in shapes.items():
        if name not in weights or weights[name].shape != shape:
            seen = f"is {tuple(weights[name].shape)}" if name in weights else "is missing"
            raise CheckpointError(f"'{path}': '{name}' {seen}, and its model needs {shape and tuple(shape)}.")


def own_names(master: Master) -> dict[str, Tensor]:
    """The weights of a user's own model under the names that the model itself gives them."""
    whole = (
        len({name.split(".")[1] for name in master.weights}) == 1
    )  # one nn.Module, not a sequence of layers
    skipped = 2 if whole else 1  # of layers.NUMBER.NAME
    return {name.split(".", skipped)[skipped]: tensor for name, tensor in master.weights.items()}
