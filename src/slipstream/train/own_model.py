"""A model of the user's own, cut into stages: model.module names a function of the vocabulary size.

It returns an `nn.Sequential`, a list of layers, or one `nn.Module`. The first layer takes tokens [B, T], each takes
what the one before it returned, the last returns logits [B, T, V]. Invariant: every rank makes the whole model from
the seed and keeps its own layers, so how the model is cut changes neither names nor initial weights.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.config import Config
from slipstream.config.objects import fetch
from slipstream.errors import UserError
from slipstream.models.config_json import read_described
from slipstream.models.cut import balanced
from slipstream.models.hugging_face import HuggingFaceStage, Parts, build


class OwnStage(nn.Module):
    """Some of the layers, called one after another. Parameters keep the number of their layer in the whole model."""

    def __init__(self, layers: dict[int, nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(index): layer for index, layer in layers.items()})

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers.values():
            x = layer(x)
        return x


class OwnModel:
    """The whole model on the host, what it is made of, and which parameters it uses twice."""

    key = "model.module"

    def __init__(self, config: Config) -> None:
        place = getattr(config.model, self.key.removeprefix("model."))
        assert place is not None
        assert config.model.vocab is not None
        self.place, self.vocab, self.sequence = place, config.model.vocab, config.data.sequence
        self.whole = False  # one module, which cannot be cut
        torch.manual_seed(config.train.seed)
        self.layers = self._made(config)
        stage = self._stage(range(len(self.layers)))
        self.parameters = sum(parameter.numel() for parameter in stage.parameters())
        self.ties = _shared(stage)
        self.boundaries = self._shapes()

    def _made(self, config: Config) -> list[nn.Module]:
        """The layers between which it may be cut."""
        made = fetch(self.key, self.place)(self.vocab)
        self.whole = not isinstance(made, nn.Sequential | nn.ModuleList | list | tuple)
        layers: list[nn.Module] = [made] if self.whole else list(made)
        wrong = next((layer for layer in layers if not isinstance(layer, nn.Module)), None)
        if wrong is not None or not layers:
            raise UserError(
                f"{self.key} = '{self.place}' returned {type(made).__name__} with {type(wrong).__name__} in it. "
                "Return an nn.Sequential, a list of nn.Modules, or one nn.Module."
            )
        self._mark_head(layers[-1])
        return layers

    def _stage(self, span: range) -> nn.Module:
        return OwnStage({index: self.layers[index] for index in span})

    def _weights(self) -> list[float]:
        """The work of each layer."""
        return [weight(layer) for layer in self.layers]

    def describe(self) -> dict[str, Any]:
        return {"module": self.place, "vocab": self.vocab, "layers": len(self.layers), "whole": self.whole}

    def stages(self, config: Config, count: int, indices: list[int], device: torch.device) -> list[nn.Module]:
        edges = self._cut(count, config.pipeline.boundaries)
        spans = [range(*edge) for edge in pairwise(edges)]
        return [self._stage(spans[index]).to(device) for index in indices]

    def hidden(self, count: int, boundaries: list[int | float] | None) -> list[tuple[int, ...]]:
        """Of each cut, the shape that one sequence has there."""
        return [self.boundaries[edge - 1] for edge in self._cut(count, boundaries)[1:-1]]

    def ties_between(self, modules: list[nn.Module]) -> dict[str, list[str]]:
        """The shared parameters of which these stages hold a part: {tie: names here}."""
        here = {name for module in modules for name, _ in module.named_parameters(remove_duplicate=False)}
        found = {names[0]: [name for name in names if name in here] for names in self.ties}
        # One parameter, which is tied by itself.
        alone = {names[0] for names in self.ties if set(names) <= here}
        return {tie: own for tie, own in found.items() if own and tie not in alone}

    def _cut(self, count: int, boundaries: list[int | float] | None) -> list[int]:
        if boundaries is not None:
            edges = [int(edge) for edge in (0, *boundaries, len(self.layers))]
            if (
                edges[1:-1] == boundaries
                and len(edges) == count + 1
                and all(a < b for a, b in pairwise(edges))
            ):
                return edges
            raise UserError(
                f"pipeline.boundaries = {boundaries} do not cut the {len(self.layers)} layers of '{self.place}' into "
                f"{count} stages. List {count - 1} rising whole numbers of layers."
            )
        if count > len(self.layers):
            hint = "Return its layers as a list, or set" if self.whole else "Set"
            raise UserError(
                f"{self.key} = '{self.place}' has {len(self.layers)} layer{'s' * (len(self.layers) > 1)}, too few for "
                f"{count} stages. {hint} pipeline.stages={len(self.layers)}."
            )
        return balanced(self._weights(), count)

    def _mark_head(self, layer: nn.Module) -> None:
        """The matrix that makes logits is no hidden matrix, and its name does not tell."""
        for parameter in layer.parameters():
            if (
                parameter.ndim == 2
                and parameter.shape[0] == self.vocab
                and not hasattr(parameter, "slipstream_role")
            ):
                parameter.slipstream_role = "head"  # pyrefly: ignore[missing-attribute]

    @torch.no_grad()
    def _shapes(self) -> list[tuple[int, ...]]:
        """What one sequence is after each layer."""
        x: Any = torch.zeros(1, self.sequence, dtype=torch.int64)
        shapes = []
        for index, layer in enumerate(self.layers):
            x = layer(x)
            if not isinstance(x, Tensor):
                raise UserError(
                    f"Layer {index} of '{self.place}' returns {type(x).__name__}. Every layer returns one tensor."
                )
            shapes.append(tuple(x.shape[1:]))
        if shapes[-1] != (self.sequence, self.vocab):
            raise UserError(
                f"The last layer of '{self.place}' returns {list(shapes[-1])} for each sequence; a language model "
                f"returns logits [tokens, vocabulary] = [{self.sequence}, {self.vocab}]."
            )
        return shapes


def weight(layer: nn.Module) -> float:
    """Work goes with the parameters a token is multiplied with; an embedding is only looked up."""
    looked_up = {id(m.weight) for m in layer.modules() if isinstance(m, nn.Embedding)}
    return 1.0 + sum(p.numel() for p in layer.parameters() if id(p) not in looked_up)


def _shared(stage: nn.Module) -> list[list[str]]:
    names: dict[int, list[str]] = {}
    for name, parameter in stage.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [found for found in names.values() if len(found) > 1]


class TransformersModel(OwnModel):
    """A model class of transformers: model.hf names its config.json, model.init_from its weights. Layers are its
    decoder layers; the embedding goes with the first, norm and head with the last."""

    key = "model.hf"

    def _made(self, config: Config) -> list[nn.Module]:
        self.described = described(config)
        start = config.model.init_from
        model = build(self.described, self.vocab, None if start is None else Path(start))
        self._parts = Parts(model, self.place)
        # As the engine scales a microbatch's loss.
        self._auxiliary_weight = 1.0 / config.pipeline.microbatches
        if self._parts.balance is not None:
            self._check_balanced(config)
        if config.train.activation_checkpointing:
            self._parts.recompute()
        return self._parts.layers

    def _check_balanced(self, config: Config) -> None:
        """What the balance loss of experts does not go with."""
        train = config.train
        words = (
            f"output_router_logits in model.hf = '{self.place}' adds the balance loss of its experts, which"
        )
        if train.fuse:
            raise UserError(f"{words} is no mean over rows, as train.fuse needs it. Drop train.fuse.")
        if train.compile not in (False, "layers"):
            raise UserError(
                f"{words} a stage compiled as a whole does not compute as transformers does (train.compile = "
                f"{train.compile}). Set train.compile=layers, or drop it."
            )

    def describe(self) -> dict[str, Any]:
        return {"hugging_face": self.described, "vocab": self.vocab, "layers": len(self.layers)}

    def stages(self, config: Config, count: int, indices: list[int], device: torch.device) -> list[nn.Module]:
        if count > 1:
            self._parts.check_cut()
        return super().stages(config, count, indices, device)

    def _stage(self, span: range) -> nn.Module:
        return HuggingFaceStage(self._parts, span, self._auxiliary_weight)

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
