"""Arithmetic on lists of tensors. Dtypes may differ between lists.

Where they do, on a GPU, a kernel of ours does the whole list in one launch (`kernels/combine.py`); everywhere
else torch's own list operations do. On a CPU the bits do not depend on how a list is cut.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from slipstream import torch_private
from slipstream.kernels.combine import can_combine, combine
from slipstream.kernels.halves import round_high
from slipstream.torch_private import copy_, mul_, norms, zero_

__all__ = [
    "add_",
    "add_recorded",
    "can_combine",
    "copy_",
    "extrapolate",
    "lerp_",
    "lerp_and_add",
    "mul_",
    "norms",
    "round_into",
    "zero_",
]

Tensors = Sequence[Tensor]


def add_(targets: Tensors, others: Tensors, alpha: float = 1.0, factor: float = 1.0) -> None:
    """targets ← factor targets + alpha others."""
    if not targets:
        return
    if _differ(targets, others) and can_combine(targets, others):
        combine(targets, factor, targets, alpha, others)
        return
    if factor != 1:
        mul_(targets, factor)
    torch_private.add_(targets, others, alpha)


def add_recorded(targets: Tensors, others: Tensors, numbers: Tensor) -> None:
    """targets ← factor targets + alpha others, where `numbers` = (factor, alpha) are read when the kernel runs; for
    lists that `can_combine` takes, dtypes differing or not."""
    combine(targets, 0.0, targets, 0.0, others, numbers=numbers)


def lerp_(starts: Tensors, ends: Tensors, weight: float) -> None:
    """starts ← starts + weight (ends - starts)."""
    if not starts or not _differ(starts, ends):
        torch_private.lerp_(starts, ends, weight)
    elif can_combine(starts, ends):
        combine(starts, 1 - weight, starts, weight, ends)
    else:
        copy_(starts, [torch.lerp(s.to(e.dtype), e, weight) for s, e in zip(starts, ends, strict=True)])


def lerp_and_add(starts: Tensors, ends: Tensors, weight: float, outs: Tensors, alpha: float) -> None:
    """starts ← starts + weight (ends - starts), then outs ← starts + alpha ends."""
    if starts and can_combine(starts, ends, outs):
        keep = 1 - weight
        combine(starts, keep, starts, weight, ends, also=(outs, keep, weight + alpha))
        return
    lerp_(starts, ends, weight)
    for out, start, end in zip(outs, starts, ends, strict=True):
        torch.add(start, end, alpha=alpha, out=out)


def extrapolate(outs: Tensors, starts: Tensors, ends: Tensors, weight: float) -> None:
    """outs ← starts + weight (ends - starts). `starts` may be `outs`; else they are scratch."""
    if outs and _differ(outs, starts) and can_combine(outs, starts, ends):
        combine(outs, 1 - weight, starts, weight, ends)
        return
    lerp_(starts, ends, weight)
    apart = [
        (out, start) for out, start in zip(outs, starts, strict=True) if out.data_ptr() != start.data_ptr()
    ]
    copy_([out for out, _ in apart], [start for _, start in apart])


@torch.no_grad()
def round_into(outs: Tensors, wholes: Tensors) -> None:
    """outs ← wholes, dtypes as they come; float32 to bfloat16 as the upper half of a master in halves is rounded."""
    pairs = list(zip(outs, wholes, strict=True))
    narrowed = [(out, whole) for out, whole in pairs if _narrows(out, whole)]
    # A saved tensor is on the host.
    round_high([whole.to(out.device) for out, whole in narrowed], [out for out, _ in narrowed])
    others = [(out, whole) for out, whole in pairs if not _narrows(out, whole)]
    copy_([out for out, _ in others], [whole for _, whole in others])


def _narrows(out: Tensor, whole: Tensor) -> bool:
    return (whole.dtype, out.dtype) == (torch.float32, torch.bfloat16)


def _differ(ones: Tensors, others: Tensors) -> bool:
    return ones[0].dtype != others[0].dtype
