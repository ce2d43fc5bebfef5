"""Routed experts: each token goes to its top-k experts, weighted by their normalised probabilities.

    p = softmax(router(x));   y = sum over e in top-k(p) of p_e / sum(p_top-k) * expert_e(x)
    balance loss  = E * sum_e f_e * mean(p_e),   f_e the share of assignments expert e got; 1 at balance
    router z loss = mean(logsumexp(router logits)^2)

No token is dropped and no expert is padded: rows are sorted by expert and multiplied group by group in
one call. Both losses are returned, not stored, so a layer stays a pure function (see stages.py for how
their gradient enters).

Shapes: N tokens, D model width, E experts, k experts per token, R = N * k rows.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slipstream.models.llama import Attention, RMSNorm
from slipstream.models.sizes import ModelConfig

Grouped = Callable[[Tensor, Tensor, Tensor], Tensor]


class _Rows(torch.autograd.Function):
    """x[order // copies], where `order` permutes the rows of x each repeated `copies` times.

    Autograd's own backward would scatter-add; the inverse permutation turns it into a gather and a sum in
    a fixed order, which is deterministic on every device.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor, copies: int) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.copies = copies
        return x[order // copies]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (inverse,) = ctx.saved_tensors
        grad = grads[0][inverse]
        return grad.view(-1, ctx.copies, grad.shape[-1]).sum(1), None, None, None


def _autocasting(x: Tensor) -> bool:
    return x.device.type != "meta" and torch.is_autocast_enabled(x.device.type)


def grouped_linear(x: Tensor, weight: Tensor, ends: Tensor, eager: Grouped | None = None) -> Tensor:
    """Rows x[ends[e-1]:ends[e]] times weight[e]^T, for weight [E, out, in] and int32 ends [E].

    `eager` computes what the compiler cannot: it knows grouped_mm in bfloat16 only.
    """
    if _autocasting(x):
        dtype = torch.get_autocast_dtype(x.device.type)
        x, weight = x.to(dtype), weight.to(dtype)
    if x.dtype == torch.bfloat16:
        return F.grouped_mm(x, weight.transpose(-2, -1), offs=ends)
    return (eager or _grouped_linear_eager)(x, weight, ends)


def _grouped_linear_eager(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    if x.dtype == torch.float64:  # no grouped_mm at all; used by tests of exactness only
        rows = torch.diff(ends, prepend=ends.new_zeros(1)).tolist()
        return torch.cat([F.linear(part, w) for part, w in zip(x.split(rows), weight, strict=True)])
    return F.grouped_mm(x, weight.transpose(-2, -1), offs=ends)


@cache
def _outside_graphs() -> Grouped:
    return torch.compiler.disable(_grouped_linear_eager)


class MoE(nn.Module):
    def __init__(self, config: ModelConfig, device: torch.device | str | None = None) -> None:
        super().__init__()
        self._grouped: Grouped = _grouped_linear_eager
        self.experts, self.top_k = config.experts, config.experts_per_token
        self.router = nn.Linear(config.dim, config.experts, bias=False, device=device)
        self.gate = nn.Parameter(torch.empty(config.experts, config.ffn, config.dim, device=device))
        self.up = nn.Parameter(torch.empty(config.experts, config.ffn, config.dim, device=device))
        self.down = nn.Parameter(torch.empty(config.experts, config.dim, config.ffn, device=device))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [B, T, D] -> (y [B, T, D], the two losses [balance, z])."""
        flat = x.reshape(-1, x.shape[-1])
        logits = self._router_logits(flat)
        probabilities = logits.softmax(-1)
        weights, chosen = probabilities.topk(self.top_k, dim=-1)  # [N, k]
        weights = weights / weights.sum(-1, keepdim=True)

        assigned = chosen.unsqueeze(-1) == torch.arange(self.experts, device=x.device)
        counts = assigned.sum((0, 1))
        order = chosen.flatten().argsort(stable=True)
        inverse = order.argsort()
        ends = counts.cumsum(0).to(torch.int32)

        rows = _Rows.apply(flat, order, inverse, self.top_k)
        gate, up = (grouped_linear(rows, w, ends, self._grouped) for w in (self.gate, self.up))
        hidden = F.silu(gate) * up
        out = _Rows.apply(grouped_linear(hidden, self.down, ends, self._grouped), inverse, order, 1)
        y = (out.view(-1, self.top_k, x.shape[-1]) * weights.unsqueeze(-1).type_as(out)).sum(1)

        share = counts / chosen.numel()
        balance = self.experts * (share * probabilities.mean(0)).sum()
        z = logits.logsumexp(-1).square().mean()
        return y.view_as(x).type_as(x), torch.stack((balance, z))

    def prepare_for_compiler(self) -> None:
        """Keep out of compiled graphs what the compiler cannot do. Loads the compiler, which takes seconds."""
        self._grouped = _outside_graphs()

    def _router_logits(self, flat: Tensor) -> Tensor:
        """In float32 at least: the choice of experts should not hang on rounding."""
        wide = flat if flat.dtype == torch.float64 else flat.float()
        with torch.autocast(flat.device.type, enabled=False) if _autocasting(flat) else nullcontext():
            return F.linear(wide, self.router.weight.type_as(wide))


class MoELayer(nn.Module):
    """Attention and experts, as `DenseLayer`. The losses come with the experts."""

    def __init__(
        self,
        config: ModelConfig,
        device: torch.device | str | None = None,
        attention: bool = True,
        moe: bool = True,
    ) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.dim, config.norm_eps, device) if attention else None
        self.attention = Attention(config, device) if attention else None
        self.mlp_norm = RMSNorm(config.dim, config.norm_eps, device) if moe else None
        self.moe = MoE(config, device) if moe else None

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        if self.attention_norm is not None and self.attention is not None:
            x = x + self.attention(self.attention_norm(x), cos, sin, mask)
        if self.mlp_norm is None or self.moe is None:
            return x, None
        y, losses = self.moe(self.mlp_norm(x))
        return x + y, losses
