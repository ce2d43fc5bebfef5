"""Each matrix of a stack divided by its own norm, on the way to another dtype.

A norm is a sum of blocks that are cut and added in the same order whatever else is in the stack. torch's own sums are
cut by how many there are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.kernels.compiler import runs_on

_BLOCK = 4096  # elements of a program that divides
_SUMMED, _PIECE = 16384, 4096  # elements of a program that sums, and of one of its rounds


def normalised(stack: Tensor, least: float, out: Tensor) -> Tensor:
    """out[n] ← stack[n] / max(||stack[n]||, least) for contiguous stacks [N, R, C], which may be the same memory."""
    count, size = stack.shape[0], stack[0].numel()
    if not runs_on(stack.device):
        norms = torch.linalg.vector_norm(stack, dim=(1, 2), dtype=torch.float32)
        return out.copy_(stack / norms.clamp(min=least).view(count, 1, 1))
    from slipstream.kernels.programs import divide_by_norm, square_sums

    parts = -(-size // _SUMMED)
    sums = torch.empty(count, parts, dtype=torch.float32, device=stack.device)
    square_sums[parts, count](stack, sums, size, parts, BLOCK=_SUMMED, PIECE=_PIECE, num_warps=8)
    divide_by_norm[-(-size // _BLOCK), count](
        stack, out, sums, least, size, parts, BLOCK=_BLOCK, PARTS=_power_of_two(parts), num_warps=8
    )
    return out


def _power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length()
