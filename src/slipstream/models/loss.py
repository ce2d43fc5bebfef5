"""Next-token cross entropy, weighted by tokens, lean in memory, with an optional z-loss.

    loss of a microbatch = shares / C * sum over its counted tokens of (lse - logit[target] + z * lse^2)

C is the number of counted tokens of the whole group and `shares` the number of microbatches it is cut
into (m, times the data ranks), so the mean over microbatches is the mean over tokens, however the
counted tokens fall. C travels with the targets as one more column: a loss function of an engine sees
only (output, target) of its own microbatch. Without gradients, so in validation, z is taken as 0.

Only logits and one number per token are kept for the backward; float32 copies exist chunk by chunk. Where a stage hands
over (hidden, weight of the head) instead of logits, these exist chunk by chunk too, and so does their gradient.
Shapes: N tokens, V vocabulary, D model width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

IGNORE = -100  # a target that is not counted

_CHUNK_VALUES = 1 << 25  # logits held in float32 at a time: 128 MiB
_HEAD_VALUES = 1 << 28  # logits that one product of the head makes: large enough for it to run at full speed
_TILE = 128  # rows of a product's tiles
# Compiled code reads logits once for maximum and sum. Off, and no setting: `studies/stage_speed.py` is to measure it.
ONLINE_LSE = False


class _SumCrossEntropy(torch.autograd.Function):
    """Sum over the counted rows of lse - logit[target] + z * lse^2, for logits [N, V]."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, z_loss: float) -> Tensor:
        counted = targets != IGNORE
        targets = targets.where(counted, 0)
        lse = _log_sums(logits)
        picked = logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1).type_as(lse)
        ctx.save_for_backward(logits, targets, counted, lse)
        ctx.z_loss = z_loss
        return ((lse - picked + z_loss * lse.square()) * counted).sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """d/dlogit = softmax * (1 + 2 z lse) - onehot(target)"""
        logits, targets, counted, lse = ctx.saved_tensors
        scale = grads[0] * counted
        slope = scale * (1.0 + 2.0 * ctx.z_loss * lse)
        return _gradient(logits, targets, lse, slope, scale), None, None


class _LinearCrossEntropy(torch.autograd.Function):
    """`scale` times the same sum for logits = hidden weight', hidden [N, D], weight [V, D], a chunk of rows at a time.

    Gradients are taken while a chunk's logits are there, so nothing is computed twice. The weight's is summed over
    chunks in float32, each chunk's part of it rounded once: in bfloat16 its error is up to sqrt(2) times that of whole
    logits. The gradient of `hidden` has the same rounding either way.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, scale: Tensor, z_loss: float
    ) -> Tensor:
        counted = targets != IGNORE
        rows = _chunks(hidden.shape[0], weight.shape[0])
        wide = torch.promote_types(weight.dtype, torch.float32)
        losses, hidden_grads, weight_grad = [], [], None
        for x, target, counts in zip(
            *(part.split(rows) for part in (hidden, targets.where(counted, 0), counted)), strict=True
        ):
            logits = x @ weight.mT
            lse = _log_sums(logits)
            picked = logits.gather(-1, target.unsqueeze(-1)).squeeze(-1).type_as(lse)
            losses.append(((lse - picked + z_loss * lse.square()) * counts).sum())
            own = counts * scale
            grad = _gradient(logits, target, lse, own * (1.0 + 2.0 * z_loss * lse), own)
            hidden_grads.append(grad @ weight)
            part = grad.mT @ x
            weight_grad = part.to(wide) if weight_grad is None else weight_grad + part
        assert weight_grad is not None
        ctx.save_for_backward(torch.cat(hidden_grads), weight_grad)
        ctx.dtype = weight.dtype
        return torch.stack(losses).sum() * scale

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden_grad, weight_grad = ctx.saved_tensors
        seed = grads[0]
        return (
            hidden_grad * seed.type_as(hidden_grad),
            (weight_grad * seed.type_as(weight_grad)).to(ctx.dtype),
            None,
            None,
            None,
        )


def _chunks(rows: int, columns: int) -> list[int]:
    """Rows of each chunk: as few chunks as `_HEAD_VALUES` allows, alike, of whole tiles. A remainder below a tile would
    be a product that costs as much as one: it goes with the last."""
    count = max(1, -(-rows // max(1, _HEAD_VALUES // columns)))
    each = max(1, -(-rows // (count * _TILE))) * _TILE
    whole, rest = rows // each, rows % each  # torch's compiler knows no divmod where lengths vary
    sizes = [each] * whole
    if rest >= _TILE or not sizes:
        return [*sizes, rest]
    return [*sizes[:-1], each + rest]


def _log_sums(logits: Tensor) -> Tensor:
    """[N, V] -> [N], float32 copies chunk by chunk."""
    return torch.cat([_log_sum(_wide(part)) for part in logits.split(_chunk_rows(logits))])


def _log_sum(x: Tensor) -> Tensor:
    if not (ONLINE_LSE and torch.compiler.is_compiling()):
        return x.logsumexp(-1)
    # logsumexp also looks whether the maximum is infinite, and inductor makes that a loop of its own. A row of nothing
    # but -inf would be NaN here; the head makes none, and its loss would be NaN as well.
    most = x.amax(-1, keepdim=True)
    return (most + (x - most).exp().sum(-1, keepdim=True).log()).squeeze(-1)


def _gradient(logits: Tensor, targets: Tensor, lse: Tensor, slope: Tensor, scale: Tensor) -> Tensor:
    rows = [x.split(_chunk_rows(logits)) for x in (logits, targets, lse, slope, scale)]
    parts = [_gradient_of_rows(*row) for row in zip(*rows, strict=True)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _gradient_of_rows(logits: Tensor, targets: Tensor, lse: Tensor, slope: Tensor, scale: Tensor) -> Tensor:
    targets, lse, slope, scale = (x.unsqueeze(-1) for x in (targets, lse, slope, scale))
    softmax = (_wide(logits) - lse).exp() * slope
    if torch.compiler.is_compiling():  # a comparison fuses with the rest; a scatter would not
        columns = torch.arange(logits.shape[-1], device=logits.device)
        return (softmax - (columns == targets) * scale).type_as(logits)
    return softmax.scatter_add_(-1, targets, -scale).type_as(logits)


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _chunk_rows(logits: Tensor) -> int:
    if torch.compiler.is_compiling():  # fused: no float32 copy is ever made
        return logits.shape[0]
    return max(1, _CHUNK_VALUES // logits.shape[1])


def with_group_count(targets: Tensor) -> Tensor:
    """targets [B, T] of a whole group -> [B, T + 1]: the last column holds the group's counted tokens."""
    count = (targets != IGNORE).sum().expand(targets.shape[0], 1)
    return torch.cat((targets, count), dim=1)


@dataclass(frozen=True)
class TokenLoss:
    """loss(logits [B, T, V] or (hidden [B, T, D], weight [V, D]), targets): with targets [B, T + 1] as
    `with_group_count` gives them, the microbatch's share of the group's token mean; with targets [B, T], the mean over
    these tokens.

    `rows`: of a group whose microbatches are not alike; each is then as many shares as its rows make."""

    shares: int = 1
    z_loss: float = 0.0
    rows: int | None = None

    def __call__(self, output: Tensor | tuple[Tensor, Tensor], targets: Tensor) -> Tensor:
        logits, weight = output if isinstance(output, tuple) else (output, None)
        length = logits.shape[1]
        if targets.shape[1] == length:
            shares, count = 1, (targets != IGNORE).sum()
        else:
            assert targets.shape[1] == length + 1, (tuple(logits.shape), tuple(targets.shape))
            shares = self.shares if self.rows is None else self.rows / targets.shape[0]
            count = targets[0, length]
        rows = targets[:, :length].reshape(-1)
        z_loss = self.z_loss if torch.is_grad_enabled() else 0.0
        flat = logits.reshape(-1, logits.shape[-1])
        scale = shares / count.clamp(min=1).to(torch.promote_types(flat.dtype, torch.float32))
        if weight is not None:
            return _LinearCrossEntropy.apply(flat, weight, rows, scale, z_loss)
        return _SumCrossEntropy.apply(flat, rows, z_loss) * scale
