"""A model class of transformers in the trainer: model.hf names its config.json, model.init_from its weights.

Every rank makes the whole model from the seed (or reads the weights) and keeps its own layers, as with a model of the
user's own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from slipstream.config import Config
from slipstream.models.config_json import read_described
from slipstream.models.hugging_face import HuggingFaceStage, Parts, build
from slipstream.train.own_model import OwnModel, weight


class TransformersModel(OwnModel):
    """Layers are its decoder layers; the embedding goes with the first, norm and head with the last."""

    key = "model.hf"

    def _made(self, config: Config) -> list[nn.Module]:
        self.described = described(config)
        start = config.model.init_from
        model = build(self.described, self.vocab, None if start is None else Path(start))
        self._parts = Parts(model, self.place)
        if config.train.activation_checkpointing:
            self._parts.recompute()
        return self._parts.layers

    def describe(self) -> dict[str, Any]:
        return {"hugging_face": self.described, "vocab": self.vocab, "layers": len(self.layers)}

    def stages(self, config: Config, count: int, indices: list[int], device: torch.device) -> list[nn.Module]:
        if count > 1:
            self._parts.check_cut()
        return super().stages(config, count, indices, device)

    def _stage(self, span: range) -> nn.Module:
        return HuggingFaceStage(self._parts, span)

    def _weights(self) -> list[float]:
        found = [weight(layer) for layer in self.layers]
        found[-1] += weight(self._parts.head)
        return found

    def _shapes(self) -> list[tuple[int, ...]]:
        return [(self.sequence, self._parts.width)] * len(self.layers)


def described(config: Config) -> dict[str, Any]:
    """What the config.json says, as it is kept with the run."""
    return read_described(Path(str(config.model.hf)))


def changed_description(had: Any, config: Config) -> list[str]:
    """What the file at model.hf says otherwise than when the run began."""
    old, new = had if isinstance(had, dict) else {}, described(config)
    changed = sorted(key for key in old.keys() | new.keys() if old.get(key) != new.get(key))
    return [
        f"model.hf: {key} in its config.json was {old.get(key)}, now it is {new.get(key)}" for key in changed
    ]
