"""The newest weights of a run as plain tensors: for generating, exporting, and looking."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.config import Config, from_tree
from slipstream.errors import CheckpointError, ConfigError
from slipstream.models import hugging_face
from slipstream.models.sizes import ModelConfig
from slipstream.models.stages import build_model
from slipstream.train import checkpoint
from slipstream.train.export import export as export_ours
from slipstream.train.export import hugging_face_class, parameter_shapes, write_own, write_transformers
from slipstream.train.sanity import check_weights

TOKENIZER_FILE = "tokenizer.json"


@dataclass(frozen=True)
class Master:
    """z at `step`, with what is needed to use it."""

    weights: dict[str, Tensor]
    config: Config
    # None: the user's own (config.model.module), or transformers' (config.model.hf).
    model: ModelConfig | None
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


def whole_model(master: Master) -> nn.Module:
    """Tokens in, logits out; not of a model of the user's own."""
    if master.model is None:
        assert master.described is not None
        settings = master.config.model
        assert settings.vocab is not None
        return hugging_face.loaded(master.weights, master.described, settings.vocab, str(settings.hf))
    model = build_model(master.model, master.config.train.seed)
    missing = model.load_state_dict(master.weights, strict=False).missing_keys
    if missing:
        raise CheckpointError(f"The run lacks {len(missing)} weights, '{missing[0]}' among them.")
    return model


def export(master: Master, folder: Path, dtype: torch.dtype) -> str:
    """Write the weights as a folder for others to load; what it holds, in words."""
    weights, tokenizer, sequence = master.weights, master.tokenizer, master.config.data.sequence
    if master.described is not None:
        vocab = master.config.model.vocab
        assert vocab is not None
        return write_transformers(
            weights,
            master.described,
            folder,
            vocab=vocab,
            tokenizer=tokenizer,
            sequence=sequence,
            dtype=dtype,
        )
    if master.model is None:
        # One nn.Module, or a sequence of layers: layers.NUMBER.NAME is under the name that the model itself gives it.
        skipped = 2 if len({name.split(".")[1] for name in weights}) == 1 else 1
        own = {name.split(".", skipped)[skipped]: tensor for name, tensor in weights.items()}
        write_own(own, folder, tokenizer=tokenizer, dtype=dtype)
        return f"{master.config.model.module}, state dict"
    export_ours(weights, master.model, folder, tokenizer=tokenizer, sequence=sequence, dtype=dtype)
    return hugging_face_class(master.model)
