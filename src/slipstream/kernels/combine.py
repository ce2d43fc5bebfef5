"""Lists of tensors combined in one launch, dtypes as they come.

    out = a x + b y        for each tensor of three lists, computed in float32; a second such sum on request

torch's own list operations take the slow way, a launch per tensor, as soon as dtypes differ. That is where a
training step on bf16 weights and an fp32 master needs them: gradients into their sums, momentum into the stacks
of Newton-Schulz, directions into weights, the master into a bank.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.kernels.compiler import launching_on, runs_on
from slipstream.kernels.tables import BLOCK, PIECE, Tensors, tables

_DTYPES = {torch.float32, torch.bfloat16, torch.float16}


def can_combine(*lists: Tensors) -> bool:
    """Whether `combine` takes these: one dtype a list, contiguous, on a device with Triton."""
    if not runs_on(lists[0][0].device):
        return False
    dtypes = [{tensor.dtype for tensor in tensors} for tensors in lists]
    return all(len(found) == 1 and found <= _DTYPES for found in dtypes) and all(
        all(map(Tensor.is_contiguous, tensors)) for tensors in lists
    )


def combine(
    outs: Tensors,
    a: float,
    xs: Tensors,
    b: float,
    ys: Tensors,
    also: tuple[Tensors, float, float] | None = None,
    numbers: Tensor | None = None,
) -> None:
    """outs ← a xs + b ys and, given `also` = (others, c, d), others ← c xs + d ys. `outs` may be `xs` or `ys`.

    `numbers`: a and b on the device, in float32, read when the kernel runs.
    """
    import triton.language as tl

    from slipstream.kernels.programs import combine_lists

    types = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
    others, c, d = also or ((), 0.0, 0.0)
    found = tables(outs, xs, ys, others)
    if found is None:
        return
    addresses, blocks, aligned = found
    with launching_on(outs[0].device):
        combine_lists[(len(blocks),)](
            addresses, blocks, len(outs), a, b, c, d, numbers,
            out_type=types[outs[0].dtype], x_type=types[xs[0].dtype], y_type=types[ys[0].dtype],
            also_type=types[others[0].dtype] if others else None, aligned=aligned,
            BLOCK=BLOCK, PIECE=PIECE, num_warps=4,
        )  # fmt: skip
