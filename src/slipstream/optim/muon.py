"""Muon for hidden matrices and AdamW for the rest, in one optimizer.

For a matrix W with gradient G (an expert tensor [E, out, in] is E matrices):

    M ← μ M + (1 - μ) G
    U = (1 - μ^k) G + μ^k M               k = lookahead: 0 plain momentum, 1 Nesterov, 2 the blend applied twice
    W ← (1 - lr wd) W - lr scale Orthogonal(U)

with scale 0.2 sqrt(max(out, in)) (`match_rms_adamw`, Liu et al. 2025: the step has the RMS of an AdamW step, so
one lr serves both) or sqrt(max(1, out / in)) (`original`, Jordan et al. 2024).

Invariants: state is made when the optimizer is, one entry per trainable parameter, so checkpoint keys agree on
every rank; the result for a matrix depends on that matrix alone (`newton_schulz.py`), so on no stage split.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.optim.adamw import adamw

from slipstream.errors import UserError
from slipstream.optim.newton_schulz import STEPS, orthogonal_batches
from slipstream.optim.velocity import adam_velocity, groups_and_states, local

SCALES: dict[str, Callable[[int, int], float]] = {
    "match_rms_adamw": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
    "original": lambda rows, columns: math.sqrt(max(1.0, rows / columns)),
}


class Muon(Optimizer):
    """Parameter groups carry `algorithm`: "muon" (2-D and 3-D tensors) or "adamw" (anything)."""

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        lr: float = 2e-3,
        momentum: float = 0.95,
        lookahead: int = 1,
        weight_decay: float = 0.1,
        scale: str = "match_rms_adamw",
        steps: int = STEPS,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
    ) -> None:
        if scale not in SCALES:
            raise UserError(f"Muon has no scale {scale!r}. Set scale to {' or '.join(map(repr, SCALES))}.")
        if not 0 <= momentum < 1 or lookahead < 0:
            raise UserError(f"Muon needs 0 <= momentum < 1 and lookahead >= 0: {momentum=}, {lookahead=}.")
        muon = {"momentum": momentum, "lookahead": lookahead, "scale": scale, "steps": steps}
        rest = {"betas": betas, "eps": eps}
        groups = [
            {
                "lr": lr,
                "weight_decay": weight_decay,
                **(rest if group["algorithm"] == "adamw" else muon),
                **group,
            }
            for group in params
        ]
        super().__init__(groups, {})
        for group in self.param_groups:
            for parameter in group["params"]:
                if group["algorithm"] == "muon" and parameter.ndim not in (2, 3):
                    raise UserError(
                        f"Muon takes matrices [out, in] and stacks [experts, out, in], not {tuple(parameter.shape)}. "
                        "Put this parameter into the group with algorithm 'adamw'."
                    )
                if parameter.requires_grad:
                    self._make_state(group, parameter)

    def _make_state(self, group: dict[str, Any], parameter: Tensor) -> dict[str, Tensor]:
        state = self.state[parameter]
        if group["algorithm"] == "muon":
            state.setdefault("momentum_buffer", torch.zeros_like(parameter))
        elif not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        return state

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            params = [parameter for parameter in group["params"] if parameter.grad is not None]
            if params and group["algorithm"] == "muon":
                self._muon(group, params)
            elif params:
                self._adamw(group, params)
        return loss

    def _muon(self, group: dict[str, Any], params: list[Parameter]) -> None:
        grads = [local(_grad(parameter)) for parameter in params]
        momenta = [local(self._make_state(group, parameter)["momentum_buffer"]) for parameter in params]
        torch._foreach_lerp_(momenta, grads, 1 - group["momentum"])
        blend = group["momentum"] ** group["lookahead"]

        def fill(i: int, out: Tensor) -> None:
            # Orthogonal(U) does not see U's size, so U / blend will do: one pass, cast included.
            if blend:
                torch.add(momenta[i], grads[i], alpha=(1 - blend) / blend, out=out)
            else:
                out.copy_(grads[i])

        for indices, directions in orthogonal_batches(params, fill, group["steps"]):
            weights = [local(params[i]) for i in indices]
            if group["weight_decay"]:
                torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
            torch._foreach_add_(weights, directions, alpha=-_rate(group, params[indices[0]]))

    def _adamw(self, group: dict[str, Any], params: list[Parameter]) -> None:
        states = [self._make_state(group, parameter) for parameter in params]
        fused = all(parameter.device.type in ("cpu", "cuda") for parameter in params)
        beta1, beta2 = group["betas"]
        adamw(
            [local(parameter) for parameter in params],
            [local(_grad(parameter)) for parameter in params],
            [local(state["exp_avg"]) for state in states],
            [local(state["exp_avg_sq"]) for state in states],
            [],
            [state["step"] for state in states],
            foreach=not fused,
            fused=fused,
            amsgrad=False,
            maximize=False,
            lr=group["lr"],
            beta1=beta1,
            beta2=beta2,
            weight_decay=group["weight_decay"],
            eps=group["eps"],
        )

    @torch.no_grad()
    def velocity(self, params: Sequence[Parameter]) -> list[Tensor]:
        """-lr scale Orthogonal(M) for a matrix, Adam's for the rest; see `optim/velocity.py`."""
        pairs = list(groups_and_states(self, params))
        ahead: list[Tensor] = [torch.empty(0)] * len(pairs)
        matrices = [i for i, (group, _) in enumerate(pairs) if group["algorithm"] == "muon"]
        for i, (group, state) in enumerate(pairs):
            if group["algorithm"] == "adamw":
                ahead[i] = adam_velocity(group, state)

        def fill(k: int, out: Tensor) -> None:
            out.copy_(local(pairs[matrices[k]][1]["momentum_buffer"]))

        for indices, directions in orthogonal_batches([params[i] for i in matrices], fill):
            for k, direction in zip(indices, directions, strict=True):
                i = matrices[k]
                ahead[i] = direction.to(params[i].dtype).mul_(-_rate(pairs[i][0], params[i]))
        return ahead


def _grad(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def _rate(group: dict[str, Any], parameter: Tensor) -> float:
    rows, columns = parameter.shape[-2:]
    return group["lr"] * SCALES[group["scale"]](rows, columns)
