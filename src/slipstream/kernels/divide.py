"""Each matrix of a stack divided by a number of its own, on the way to another dtype."""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.kernels.compiler import runs_on

_BLOCK = 4096


def divided(stack: Tensor, divisors: Tensor, least: float, dtype: torch.dtype) -> Tensor:
    """stack[n] / max(divisors[n], least) for a contiguous stack [N, R, C]."""
    count = stack.shape[0]
    if not runs_on(stack.device):
        return (stack / divisors.clamp(min=least).view(count, 1, 1)).to(dtype)
    from slipstream.kernels.programs import divide_rows

    out = torch.empty_like(stack, dtype=dtype)
    size = stack[0].numel()
    divide_rows[-(-size // _BLOCK), count](  # pyright: ignore[reportIndexIssue]
        stack, out, divisors, least, size, BLOCK=_BLOCK, num_warps=8
    )
    return out
