"""AdamW with a bound on the longest directions of a matrix's step.

    D  = (m / (1 - beta1^t)) / (sqrt(n / (1 - beta2^t)) + eps)                     AdamW's step over lr
    D' = D - sum_i max(0, sigma_i - c) u_i v_i'  over the RANK largest sigma_i,  c = cap sqrt(longer side)

Where a gradient agrees over a whole matrix every entry of D is about 1, and the step along one direction is up to
sqrt(rows columns) long; Muon's is 0.2 sqrt(longer side) along each. Such a direction is where AdamW overshoots when its
gradients are late (docs/delay.md).

Few directions are that long, and they change slowly: they are followed by one subspace iteration per update from the
basis of the last, which is state. Weight decay is outside the bound.

The new basis is made orthonormal by QR, or with `basis="cholesky"` by products and factors of RANK x RANK, which a GPU
does in batches. What is cut depends on the span of the basis alone, so from one basis both cut the same, but for 5e-6
of the step in float32. Where a step has fewer directions than the basis has columns, the others are anyone's choice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import AdamW

from slipstream.optim.velocity import groups_and_states
from slipstream.torch_private import add_, copy_

RANK = 8
MOST_ELEMENTS = 1 << 26  # of a batch: it is scratch memory


class CappedAdamW(AdamW):
    """Of its groups, that with the role "matrices" is bounded: tensors [rows, columns], or [count, rows, columns]."""

    def __init__(
        self, groups: Sequence[dict[str, Any]], *, cap: float, basis: str = "qr", **options: Any
    ) -> None:
        if not cap > 0:
            raise ValueError(f"cap is {cap}, and a bound must be above 0")
        if basis not in BASES:
            raise ValueError(f"basis is {basis!r}, and may be {' or '.join(BASES)}")
        super().__init__([{**group, "cap": cap, "basis": basis} for group in groups], **options)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        loss = super().step(closure)
        for group in self.param_groups:
            if group["role"] == "matrices":
                for batch in _together([p for p in group["params"] if p.grad is not None]):
                    self._cut(group, batch)
        return loss

    def _cut(self, group: Mapping[str, Any], batch: list[Parameter]) -> None:
        states = [self.state[parameter] for parameter in batch]
        steps = _steps(group, states)
        start = _start(steps[0])
        before = torch.stack([state.get("basis", start) for state in states])
        orthonormal = BASES[group.get("basis", "qr")]  # a checkpoint of before there was a choice has none
        bases = orthonormal(_followed(steps, before))
        excesses = _excess(steps, bases, group["cap"]).mul_(group["lr"])
        add_(batch, excesses.unbind())
        for state in states:
            # What is loaded has the dtype of its parameter.
            if "basis" not in state or state["basis"].dtype != bases.dtype:
                state["basis"] = torch.empty_like(bases[0])  # not a view of all: a checkpoint holds none
        copy_([state["basis"] for state in states], bases.unbind())

    def velocity(self, params: Sequence[Parameter]) -> list[Tensor]:
        places = dict(zip(params, groups_and_states(self, params), strict=True))
        found: dict[Parameter, Tensor] = {}
        for group in self.param_groups:
            for batch in _together([p for p in params if places[p][0] is group]):
                states = [places[p][1] for p in batch]
                steps = _steps(group, states)
                if group["role"] == "matrices":
                    steps -= _excess(steps, torch.stack([state["basis"] for state in states]), group["cap"])
                steps.mul_(-group["lr"])
                found.update((p, own.to(p.dtype)) for p, own in zip(batch, steps, strict=True))
        return [found[p] for p in params]


def _steps(group: Mapping[str, Any], states: Sequence[Mapping[str, Any]]) -> Tensor:
    """D of a batch, one after the other along the first dimension."""
    means, squares = (_wide(torch.stack([s[key] for s in states])) for key in ("exp_avg", "exp_avg_sq"))
    times = torch.stack([s["step"] for s in states]).double()  # no wait for the device
    shape = (len(states), *[1] * (means.dim() - 1))
    first, second = ((1 - beta**times).to(means).view(shape) for beta in group["betas"])
    return means.div_(first).div_(squares.div_(second).sqrt_().add_(group["eps"]))


def _wide(tensor: Tensor) -> Tensor:
    """Products of narrow numbers have no QR."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _together(parameters: list[Parameter]) -> list[list[Parameter]]:
    """On a GPU equal shapes in one batch: small factorisations are slow one by one there. On a CPU, and where torch is
    to be deterministic, each by itself, so that a matrix's bits do not depend on which others its stage holds."""
    found: dict[object, list[Parameter]] = {}
    apart = torch.are_deterministic_algorithms_enabled()
    for parameter in parameters:
        key = id(parameter) if apart or parameter.device.type == "cpu" else (parameter.shape, parameter.dtype)
        found.setdefault(key, []).append(parameter)
    most = [max(1, MOST_ELEMENTS // max(1, batch[0].numel())) for batch in found.values()]
    return [
        batch[start : start + size]
        for batch, size in zip(found.values(), most, strict=True)
        for start in range(0, len(batch), size)
    ]


def _tall(step: Tensor) -> Tensor:
    """With its longer side first: the basis lies in the shorter one."""
    return step if step.shape[-2] >= step.shape[-1] else step.mT


def _start(step: Tensor) -> Tensor:
    side = min(step.shape[-2:])
    basis = torch.eye(side, min(RANK, side), dtype=step.dtype, device=step.device)
    return basis.expand(*step.shape[:-2], *basis.shape)


def _followed(step: Tensor, basis: Tensor) -> Tensor:
    """[shorter side, RANK or fewer]: columns that span where the longest directions are."""
    step = _tall(step)
    return step.mT @ (step @ _wide(basis))


def _by_qr(columns: Tensor) -> Tensor:
    return torch.linalg.qr(columns).Q


def _by_cholesky(columns: Tensor) -> Tensor:
    """Y R^-1 with R'R = Y'Y, twice, in float64.

    A step may have fewer directions than there are columns. QR then goes on with rounding errors; here a 1e-7th of a
    fixed matrix that knows nothing of the step is added to Y. The shift on the diagonal makes sure that there is a
    factor; the second round takes its effect away. Nothing here waits for the device.
    """
    size = torch.linalg.matrix_norm(columns, keepdim=True).clamp(min=torch.finfo(columns.dtype).tiny)
    rows, count = columns.shape[-2:]
    other = torch.arange(rows * count, device=columns.device).double().square_().cos_().view(rows, count)
    y = (columns / size).double() + 1e-7 * (2 / rows) ** 0.5 * other
    identity = torch.eye(count, dtype=y.dtype, device=y.device)
    for _ in range(2):
        lower, _ = torch.linalg.cholesky_ex(y.mT @ y + 1e-13 * identity)
        y = y @ torch.linalg.solve_triangular(lower, identity, upper=False).mT
    return y.to(columns.dtype)


BASES = {"qr": _by_qr, "cholesky": _by_cholesky}


def _excess(step: Tensor, basis: Tensor, cap: float) -> Tensor:
    """What is above the bound, in the directions of the basis."""
    tall, basis = _tall(step), _wide(basis)
    seen = tall @ basis
    squares, turn = torch.linalg.eigh(seen.mT @ seen)
    bound = cap * math.sqrt(tall.shape[-2])
    share = (1 - bound * squares.clamp(min=bound**2).rsqrt()).unsqueeze(-2)
    excess = (seen @ (turn * share) @ turn.mT) @ basis.mT
    return excess if tall is step else excess.mT
