"""Name and options -> an optimizer over a stage's parameters: hidden matrices, and the rest.

Invariant: every optimizer has the same two parameter groups on every stage, `role` "matrices" and "rest", either of
which may be empty; `initial_lr` holds a group's peak rate. Weight decay falls on the matrices only, unless decay="all".

A parameter is a hidden matrix if it has two dimensions, or three (experts stacked as [E, out, in]), and is not part of
an embedding or of the head. That is read off, in this order: the marker `parameter.slipstream_role` ("matrix",
"embedding", "head" or "vector"), the module that holds it, its name. A tied parameter has several modules and names:
one that is an embedding's or a head's is enough. Never its position, which depends on how the model was cut.

Names and defaults are in `slipstream/optimizers.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import Parameter
from torch.optim import Optimizer

from slipstream.errors import UserError
from slipstream.optim.capped import CappedAdamW
from slipstream.optim.library import LibraryOptimizer
from slipstream.optim.muon import Muon
from slipstream.optimizers import ADAMW_REST, OPTIMIZERS, Defaults, check_options, unknown
from slipstream.torch_late import is_dtensor

Group = dict[str, Any]
Make = Callable[[list[Group], Mapping[str, Any]], Optimizer]  # of groups and options
_EMBEDDING_WORDS = ("embed", "wte", "wpe")
_HEAD_NAMES = ("head", "lm_head", "output")


@dataclass(frozen=True)
class Recipe:
    """Defaults of one optimizer, and how it is made from its two groups.

    `lr` and `weight_decay` are the groups'; what is left of the options is given to `make`.
    """

    known: Defaults
    make: Make
    on_shards: bool

    @property
    def defaults(self) -> Mapping[str, Any]:
        return self.known.options


def _torch(kind: Callable[..., Optimizer], **fixed: Any) -> Make:
    return lambda groups, options: kind(groups, **fixed, **options)


def _library(kind: str, **fixed: Any) -> Make:
    """An optimizer of pytorch-optimizer over the groups that are its own, AdamW over the others."""

    def make(groups: list[Group], options: Mapping[str, Any]) -> Optimizer:
        sharded = any(is_dtensor(parameter) for group in groups for parameter in group["params"])
        batched = {"foreach": False} if sharded else {}
        return LibraryOptimizer(kind, groups, {**fixed, **options, **batched})

    return make


def _spectral(groups: list[Group], options: Mapping[str, Any]) -> Optimizer:
    groups[0]["algorithm"] = "muon"
    return Muon(groups, **options)


_MAKERS: dict[str, Make] = {
    "adamw": _torch(torch.optim.AdamW, fused=True),
    "adamw_capped": _torch(CappedAdamW, fused=True),
    "nadamw": _torch(torch.optim.NAdam, decoupled_weight_decay=True, foreach=True),
    "sgd": _torch(torch.optim.SGD, foreach=True),
    "muon": _spectral,
    "normuon": _spectral,
    "scion": _spectral,
    "soap": _library("SOAP"),
    "mars": _library("MARS", mars_type="adamw", weight_decouple=True),
    "adan": _library("Adan", weight_decouple=False),
    "lion": _library("Lion", weight_decouple=True),
    "ademamix": _library("AdEMAMix", weight_decouple=True),
}
_WHOLE_ONLY = ("adamw_capped", "normuon", "soap")
RECIPES = {name: Recipe(OPTIMIZERS[name], make, name not in _WHOLE_ONLY) for name, make in _MAKERS.items()}


def build(name: str, module: nn.Module, **options: Any) -> Optimizer:
    """An optimizer over the trainable parameters of `module`. Options that are None keep their defaults."""
    if name not in RECIPES:
        raise UserError(unknown("optimizer", name, RECIPES))
    recipe = RECIPES[name]
    decay = options.pop("decay", None) or "matrices"
    given = {
        key: tuple(value) if isinstance(value, list) else value
        for key, value in options.items()
        if value is not None
    }
    try:
        _check(name, given, decay)
        return _made(name, recipe, module, {**recipe.defaults, **given}, decay)
    except (TypeError, ValueError) as error:  # how torch and the library refuse a value
        shown = ", ".join(f"{key}={value}" for key, value in given.items()) or "no options"
        raise UserError(f"{name} cannot be made with {shown}: {error}.") from error


def _made(name: str, recipe: Recipe, module: nn.Module, settings: dict[str, Any], decay: str) -> Optimizer:
    matrices, rest = split_parameters(module)
    if not recipe.on_shards and any(is_dtensor(parameter) for parameter in matrices):
        raise UserError(
            f"{name} needs whole matrices and these are sharded (DTensor). "
            "Use muon, adamw or lion with FSDP, or shard the optimizer by whole matrices instead."
        )
    lr, weight_decay = settings.pop("lr"), settings.pop("weight_decay")
    own = {"algorithm": name, "lr": lr}
    groups: list[Group] = [
        {"params": matrices, "role": "matrices", **own, "weight_decay": weight_decay},
        {"params": rest, "role": "rest", **own, "weight_decay": weight_decay if decay == "all" else 0.0},
    ]
    if recipe.known.for_matrices:
        adamw = {key.removeprefix("adamw_"): settings.pop(key) for key in ADAMW_REST}
        adamw["lr"] = lr if adamw["lr"] is None else adamw["lr"]
        groups[1] |= {"algorithm": "adamw", **adamw}
    for group in groups:
        group["initial_lr"] = group["lr"]
    return recipe.make(groups, settings)


def _check(name: str, given: Mapping[str, Any], decay: str) -> None:
    check_options(name, given)
    if decay not in ("matrices", "all"):
        raise UserError(
            f"decay={decay!r}: set it to 'matrices' (weight decay on hidden matrices only) or 'all'."
        )
    for option in ("lr", "weight_decay", "adamw_lr", "adamw_eps"):
        if not given.get(option, 0.0) >= 0:
            raise UserError(f"{name} needs {option} >= 0, not {given[option]}.")
    # Of a group's own rates torch takes any; it looks at an optimizer's defaults only.
    rates = (*given.get("adamw_betas", (0.0, 0.0)), given.get("row_beta", 0.0))
    if len(rates) != 3 or not all(0 <= rate < 1 for rate in rates):
        raise UserError(f"{name} needs two adamw_betas and row_beta in [0, 1), not {dict(given)}.")


def split_parameters(module: nn.Module) -> tuple[list[Parameter], list[Parameter]]:
    """The trainable parameters of a stage: hidden matrices, and the rest, each in the module's order."""
    names: dict[Parameter, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if parameter.requires_grad:
            names.setdefault(parameter, []).append(name)
    matrices: list[Parameter] = []
    rest: list[Parameter] = []
    for parameter, own in names.items():
        found = (is_matrix(name, parameter, module.get_submodule(name.rpartition(".")[0])) for name in own)
        (matrices if all(found) else rest).append(parameter)
    return matrices, rest


def is_matrix(name: str, parameter: Parameter, owner: nn.Module) -> bool:
    role = getattr(parameter, "slipstream_role", None)
    if role is not None:
        return role == "matrix"
    if parameter.ndim not in (2, 3) or isinstance(
        owner, nn.Embedding | nn.EmbeddingBag | nn.Conv1d | nn.ConvTranspose1d
    ):
        return False
    words = name.lower().split(".")
    if any(part in word for word in words for part in _EMBEDDING_WORDS):
        return False
    # `layers.3.attention.output.weight` is a hidden matrix; the model's own head stands outside the layers.
    in_a_layer = any(word.isdigit() for word in words)
    return in_a_layer or not any(word in _HEAD_NAMES for word in words)
