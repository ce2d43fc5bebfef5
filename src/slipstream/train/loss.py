"""The training loss of a microbatch, weighted by tokens.

    L_i = (sum over counted tokens of -log p  +  z * (log Z)^2) / (N / K)

N counts the tokens of the whole group, K its parts (microbatches x data ranks), so the mean of the K parts
is the mean over all tokens, however unevenly masked tokens fall. N rides in the last column of the targets:
the loss stays a pure function of its arguments, and a group in flight cannot meet the number of another.

Shapes: logits [B, T, V]; targets [B, T + 1].
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORE = -100


def pack_targets(targets: Tensor) -> Tensor:
    """Append the number of counted tokens of the whole group to every row."""
    count = (targets != IGNORE).sum().clamp(min=1)
    return torch.cat([targets, count.expand(targets.shape[0], 1)], dim=1)


def token_loss(parts: int, z_loss: float = 0.0) -> Callable[[Tensor, Tensor], Tensor]:
    """The loss function given to an engine that averages over `parts` microbatches."""

    def loss(logits: Tensor, packed: Tensor) -> Tensor:
        targets, share = packed[:, :-1].flatten(), packed[0, -1] / parts
        flat = logits.flatten(0, 1).float()
        total = F.cross_entropy(flat, targets, ignore_index=IGNORE, reduction="sum")
        if z_loss and torch.is_grad_enabled():  # a validation loss is the plain one
            counted = targets != IGNORE
            total = total + z_loss * (torch.logsumexp(flat, dim=-1).square() * counted).sum()
        return total / share

    return loss
