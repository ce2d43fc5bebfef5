"""Each matrix of a stack divided by a number of its own, on the way to another dtype."""

from __future__ import annotations

from torch import Tensor

from slipstream.kernels.compiler import runs_on

_BLOCK = 4096


def divided(stack: Tensor, divisors: Tensor, least: float, out: Tensor) -> Tensor:
    """out[n] ← stack[n] / max(divisors[n], least) for contiguous stacks [N, R, C], which may be the same memory."""
    count = stack.shape[0]
    if not runs_on(stack.device):
        return out.copy_(stack / divisors.clamp(min=least).view(count, 1, 1))
    from slipstream.kernels.programs import divide_rows

    size = stack[0].numel()
    divide_rows[-(-size // _BLOCK), count](  # pyright: ignore[reportIndexIssue]
        stack, out, divisors, least, size, BLOCK=_BLOCK, num_warps=8
    )
    return out
