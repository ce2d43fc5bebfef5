"""Losses that a stage adds beside the loss of the tokens, and transformers' balance loss of routed experts.

With L routed layers of T rows each, E experts and k of them for every row,

    balance loss = E * sum_e (sum of counts_e / LT) * (sum of p_e / LT),   p = softmax(router logits)

counts_e being the rows whose k largest p hold e. The sums go over all layers, so the loss is no sum over stages.
Both sums are: `routed` of a stage's own layers is added to that of the stages before, which travels with the hidden
state. The last stage makes the loss of them, and its gradient travels back as that of any message.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class AddLoss(torch.autograd.Function):
    """The identity on x; in the backward, `loss` receives the gradient `weight`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor, weight: float) -> Tensor:
        ctx.weight, ctx.dtype, ctx.device = weight, loss.dtype, loss.device
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0], torch.full((), ctx.weight, dtype=ctx.dtype, device=ctx.device), None


def routed(logits: Sequence[Tensor], experts_per_token: int) -> Tensor:
    """[2, E]: counts and probabilities of every expert, summed over the rows of some layers' logits [T, E]."""
    sums = []
    for layer in logits:
        probabilities = layer.softmax(-1)
        chosen = probabilities.topk(experts_per_token, -1).indices
        counts = torch.zeros_like(probabilities, dtype=torch.float32).scatter(-1, chosen, 1.0).sum(0)
        sums.append(torch.stack((counts, probabilities.float().sum(0))))
    return torch.stack(sums).sum(0)


def balance_loss(sums: Tensor, experts_per_token: int) -> Tensor:
    """Transformers' load-balancing loss of what `routed` found in all layers."""
    counts, probabilities = sums
    rows = counts.sum() / experts_per_token
    return len(counts) * (counts * probabilities).sum() / rows**2
