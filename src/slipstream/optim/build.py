"""Name and options -> an optimizer over a stage's parameters: hidden matrices, and the rest.

Invariant: every optimizer has the same two parameter groups on every stage, `role` "matrices" and "rest"
(`roles.py`), either of which may be empty; `initial_lr` holds a group's peak rate. Weight decay falls on the
matrices only, unless decay="all".

Where an optimizer is one for matrices, the rest goes to AdamW with `adamw_lr` (by default the same lr),
`adamw_betas` and `adamw_eps`. The others take every parameter.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from slipstream.errors import UserError
from slipstream.optim.library import LibraryOptimizer
from slipstream.optim.muon import Muon
from slipstream.optim.roles import split_parameters

Group = dict[str, Any]

_ADAMW_REST = {"adamw_lr": None, "adamw_betas": (0.9, 0.95), "adamw_eps": 1e-8}


@dataclass(frozen=True)
class Recipe:
    """Defaults of one optimizer, where they come from, and how it is made from its two groups.

    `lr` and `weight_decay` are the groups'; what is left of the options is given to `make`.
    """

    defaults: Mapping[str, Any]
    source: str
    make: Callable[[list[Group], Mapping[str, Any]], Optimizer]
    on_shards: bool = True

    @property
    def for_matrices(self) -> bool:
        return "adamw_lr" in self.defaults


def _torch(
    kind: Callable[..., Optimizer], **fixed: Any
) -> Callable[[list[Group], Mapping[str, Any]], Optimizer]:
    return lambda groups, options: kind(groups, **fixed, **options)


def _library(kind: str, **fixed: Any) -> Callable[[list[Group], Mapping[str, Any]], Optimizer]:
    """An optimizer of pytorch-optimizer over the groups that are its own, AdamW over the others."""

    def make(groups: list[Group], options: Mapping[str, Any]) -> Optimizer:
        sharded = any(isinstance(parameter, DTensor) for group in groups for parameter in group["params"])
        batched = {"foreach": False} if sharded else {}
        return LibraryOptimizer(kind, groups, {**fixed, **options, **batched})

    return make


def _spectral(groups: list[Group], options: Mapping[str, Any]) -> Optimizer:
    groups[0]["algorithm"] = "muon"
    return Muon(groups, **options)


RECIPES: dict[str, Recipe] = {
    "adamw": Recipe(
        {"lr": 1e-3, "weight_decay": 0.1, "betas": (0.9, 0.95), "eps": 1e-8},
        "Loshchilov & Hutter 2019; betas and decay as usual for language models",
        _torch(torch.optim.AdamW, fused=True),
    ),
    "nadamw": Recipe(
        {"lr": 3e-4, "weight_decay": 0.01, "betas": (0.99, 0.999), "eps": 1e-8, "momentum_decay": 0.004},
        "the Nesterov correction of AsyncPP (Ajanthan et al. 2025): NAdam, decoupled decay, beta1 0.99",
        _torch(torch.optim.NAdam, decoupled_weight_decay=True, foreach=True),
    ),
    "sgd": Recipe(
        {"lr": 0.1, "weight_decay": 0.0, "momentum": 0.9, "dampening": 0.0, "nesterov": False},
        "Polyak 1964; weight decay is torch's, added to the gradient",
        _torch(torch.optim.SGD, foreach=True),
    ),
    "muon": Recipe(
        {"lr": 2e-3, "weight_decay": 0.1, "momentum": 0.95, "lookahead": 1, "scale": "match_rms_adamw"}
        | {"steps": 5}
        | _ADAMW_REST,
        "Jordan et al. 2024; scale, decay and one lr for both parts from Liu et al. 2025",
        _spectral,
    ),
    "normuon": Recipe(
        {"lr": 2e-3, "weight_decay": 0.1, "momentum": 0.95, "lookahead": 1, "scale": "match_rms_adamw"}
        | {"row_beta": 0.95, "steps": 5}
        | _ADAMW_REST,
        "Li et al. 2025: Muon with rows evened out; betas theirs, the rest as Muon",
        _spectral,
        on_shards=False,
    ),
    "scion": Recipe(
        {"lr": 0.018, "weight_decay": 0.02, "momentum": 0.9, "lookahead": 0, "scale": "spectral", "steps": 5}
        | {**_ADAMW_REST, "adamw_lr": 1e-3},
        "Pethick et al. 2025, examples/modded-nanogpt of LIONS-EPFL/scion: lr 3.6e-4 times radius 50, decay 1 / radius "
        "(their constrained form; 0: unconstrained), momentum 1 - 0.1; their sign rule for the head is AdamW here",
        _spectral,
    ),
    "soap": Recipe(
        {"lr": 3e-3, "weight_decay": 0.01, "betas": (0.95, 0.95), "eps": 1e-8, "precondition_frequency": 10}
        | {"max_precondition_dim": 10_000, **_ADAMW_REST},
        "Vyas et al. 2024; its first step only measures the preconditioner",
        _library("SOAP"),
        on_shards=False,
    ),
    "mars": Recipe(
        {"lr": 3e-3, "weight_decay": 0.01, "betas": (0.95, 0.99), "eps": 1e-8, "gamma": 0.025, **_ADAMW_REST},
        "Yuan et al. 2024, MARS-AdamW, approximate form",
        _library("MARS", mars_type="adamw", weight_decouple=True),
    ),
    "adan": Recipe(
        {"lr": 1e-3, "weight_decay": 0.02, "betas": (0.98, 0.92, 0.99), "eps": 1e-8},
        "Xie et al. 2022, with its proximal weight decay",
        _library("Adan", weight_decouple=False),
    ),
    "lion": Recipe(
        {"lr": 1e-4, "weight_decay": 1.0, "betas": (0.9, 0.99)},
        "Chen et al. 2023: a tenth of AdamW's lr, ten times its decay",
        _library("Lion", weight_decouple=True),
    ),
    "ademamix": Recipe(
        {"lr": 1e-3, "weight_decay": 0.1, "betas": (0.9, 0.999, 0.9999), "eps": 1e-8, "alpha": 5.0}
        | {"t_alpha_beta3": None},
        "Pagliardini et al. 2024; set t_alpha_beta3 to the length of the run for their warm-up",
        _library("AdEMAMix", weight_decouple=True),
    ),
}


def build(name: str, module: nn.Module, **options: Any) -> Optimizer:
    """An optimizer over the trainable parameters of `module`. Options that are None keep their defaults."""
    recipe = _recipe(name)
    decay = options.pop("decay", None) or "matrices"
    given = {
        key: tuple(value) if isinstance(value, list) else value
        for key, value in options.items()
        if value is not None
    }
    try:
        _check(name, recipe, given, decay)
        return _made(name, recipe, module, {**recipe.defaults, **given}, decay)
    except (TypeError, ValueError) as error:  # how torch and the library refuse a value
        shown = ", ".join(f"{key}={value}" for key, value in given.items()) or "no options"
        raise UserError(f"{name} cannot be made with {shown}: {error}.") from error


def _made(name: str, recipe: Recipe, module: nn.Module, settings: dict[str, Any], decay: str) -> Optimizer:
    matrices, rest = split_parameters(module)
    if not recipe.on_shards and any(isinstance(parameter, DTensor) for parameter in matrices):
        raise UserError(
            f"{name} needs whole matrices and these are sharded (DTensor). "
            "Use muon, adamw or lion with FSDP, or shard the optimizer by whole matrices instead."
        )
    lr, weight_decay = settings.pop("lr"), settings.pop("weight_decay")
    groups: list[Group] = [
        {"params": matrices, "role": "matrices", "algorithm": name, "lr": lr, "weight_decay": weight_decay},
        {
            "params": rest,
            "role": "rest",
            "algorithm": name,
            "lr": lr,
            "weight_decay": weight_decay if decay == "all" else 0.0,
        },
    ]
    if recipe.for_matrices:
        adamw = {key.removeprefix("adamw_"): settings.pop(key) for key in _ADAMW_REST}
        adamw["lr"] = lr if adamw["lr"] is None else adamw["lr"]
        groups[1] |= {"algorithm": "adamw", **adamw}
    for group in groups:
        group["initial_lr"] = group["lr"]
    return recipe.make(groups, settings)


def _recipe(name: str) -> Recipe:
    if name not in RECIPES:
        near = difflib.get_close_matches(name, RECIPES, 1) or ["muon"]
        raise UserError(
            f"No optimizer is called {name!r}. Did you mean {near[0]!r}? There are {', '.join(RECIPES)}."
        )
    return RECIPES[name]


def _check(name: str, recipe: Recipe, given: Mapping[str, Any], decay: str) -> None:
    known = [*recipe.defaults, "decay"]
    for option in given:
        if option not in recipe.defaults:
            near = difflib.get_close_matches(option, known, 1)
            hint = f"Did you mean {near[0]!r}? " if near else ""
            raise UserError(f"{name} has no option {option!r}. {hint}It has {', '.join(known)}.")
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
