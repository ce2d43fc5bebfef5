"""The optimizers and corrections by name, with their defaults. What needs no torch asks here; `optim/` makes them.

Where an optimizer is one for matrices, the rest goes to AdamW with `adamw_lr` (None: the same lr), `adamw_betas` and
`adamw_eps`. The others take every parameter.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from slipstream.errors import UserError, did_you_mean

ADAMW_REST = {"adamw_lr": None, "adamw_betas": (0.9, 0.95), "adamw_eps": 1e-8}


@dataclass(frozen=True)
class Defaults:
    """Options of one optimizer, where their values come from, and what is done about delay unless a run says."""

    options: Mapping[str, Any]
    source: str
    correction: str = "error_feedback"

    @property
    def for_matrices(self) -> bool:
        return "adamw_lr" in self.options


OPTIMIZERS: dict[str, Defaults] = {
    "adamw": Defaults(
        {"lr": 1e-3, "weight_decay": 0.1, "betas": (0.9, 0.95), "eps": 1e-8},
        "Loshchilov & Hutter 2019; betas and decay as usual for language models",
    ),
    "adamw_capped": Defaults(
        {"lr": 1e-3, "weight_decay": 0.1, "betas": (0.9, 0.95), "eps": 1e-8, "cap": 0.4, "basis": "qr"},
        "ours: AdamW with a bound on its longest directions, `optim/capped.py`; tried at 1M and 42M parameters",
    ),
    "nadamw": Defaults(
        {"lr": 3e-4, "weight_decay": 0.01, "betas": (0.99, 0.999), "eps": 1e-8, "momentum_decay": 0.004},
        "the Nesterov correction of AsyncPP (Ajanthan et al. 2025): NAdam, decoupled decay, beta1 0.99",
    ),
    "sgd": Defaults(
        {"lr": 0.1, "weight_decay": 0.0, "momentum": 0.9, "dampening": 0.0, "nesterov": False},
        "Polyak 1964; weight decay is torch's, added to the gradient",
    ),
    "muon": Defaults(
        {"lr": 2e-3, "weight_decay": 0.1, "momentum": 0.95, "lookahead": 1, "scale": "match_rms_adamw"}
        | {"steps": 5, "state_dtype": None}
        | ADAMW_REST,
        "Jordan et al. 2024; scale, decay and one lr for both parts from Liu et al. 2025",
    ),
    "normuon": Defaults(
        {"lr": 2e-3, "weight_decay": 0.1, "momentum": 0.95, "lookahead": 1, "scale": "match_rms_adamw"}
        | {"row_beta": 0.95, "steps": 5, "state_dtype": None}
        | ADAMW_REST,
        "Li et al. 2025: Muon with rows evened out; betas theirs, the rest as Muon",
    ),
    "scion": Defaults(
        {"lr": 0.018, "weight_decay": 0.02, "momentum": 0.9, "lookahead": 0, "scale": "spectral", "steps": 5}
        | {"state_dtype": None, **ADAMW_REST, "adamw_lr": 1e-3},
        "Pethick et al. 2025, examples/modded-nanogpt of LIONS-EPFL/scion: lr 3.6e-4 times radius 50, decay 1 / radius "
        "(their constrained form; 0: unconstrained), momentum 1 - 0.1; their sign rule for the head is AdamW here",
    ),
    "soap": Defaults(
        {"lr": 3e-3, "weight_decay": 0.01, "betas": (0.95, 0.95), "eps": 1e-8, "precondition_frequency": 10}
        | {"max_precondition_dim": 10_000, **ADAMW_REST},
        "Vyas et al. 2024; its first step only measures the preconditioner",
    ),
    "mars": Defaults(
        {"lr": 3e-3, "weight_decay": 0.01, "betas": (0.95, 0.99), "eps": 1e-8, "gamma": 0.025, **ADAMW_REST},
        "Yuan et al. 2024, MARS-AdamW, approximate form",
    ),
    "adan": Defaults(
        {"lr": 1e-3, "weight_decay": 0.02, "betas": (0.98, 0.92, 0.99), "eps": 1e-8},
        "Xie et al. 2022, with its proximal weight decay",
    ),
    "lion": Defaults(
        {"lr": 1e-4, "weight_decay": 1.0, "betas": (0.9, 0.99)},
        "Chen et al. 2023: a tenth of AdamW's lr, ten times its decay",
        correction="none",  # its steps have one size, and error feedback makes it worse (docs/results)
    ),
    "ademamix": Defaults(
        {"lr": 1e-3, "weight_decay": 0.1, "betas": (0.9, 0.999, 0.9999), "eps": 1e-8, "alpha": 5.0}
        | {"t_alpha_beta3": None},
        "Pagliardini et al. 2024; set t_alpha_beta3 to the length of the run for their warm-up",
    ),
}
CORRECTION_NAMES = ("none", "error_feedback", "momentum_prediction", "delay_compensation", "lr_scaling")


def default_correction(optimizer: str) -> str:
    """What is done about a delay unless a run says."""
    return OPTIMIZERS[optimizer].correction if optimizer in OPTIMIZERS else "error_feedback"


def check_options(optimizer: str, given: Iterable[str]) -> None:
    """Refuse an option that the optimizer does not have."""
    known = [*OPTIMIZERS[optimizer].options, "decay"]
    for option in given:
        if option not in known:
            hint = did_you_mean(option, known)
            raise UserError(f"{optimizer} has no option {option!r}.{hint} It has {', '.join(known)}.")


def unknown(what: str, name: str, known: Iterable[str]) -> str:
    """What to say of a name that nobody has."""
    known = list(known)
    return f"No {what} is called {name!r}.{did_you_mean(name, known)} There are {', '.join(known)}."
