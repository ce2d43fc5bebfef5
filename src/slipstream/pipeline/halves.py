"""A float32 tensor as two of 16 bits: the bfloat16 nearest to it, and what is left.

    whole = high 2^16 + low        as integers, over the bit patterns; low in [-2^15, 2^15)

`high` is the upper half of the pattern, rounded: to the nearest bfloat16, and away from zero where two are as near.
So it is good as a weight by itself, and with `low` gives the float32 back exactly, infinities and zeros with a sign
included; what is not a number stays so, in both. (The usual rounding, ties to even, would need one more value of `low`
than 16 bits have.) Every copy of a float32 master into bfloat16 weights is rounded so: a master in halves and a plain
one give the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from slipstream.lists import copy_

HALF = 1 << 15
PAIR = (torch.float32, torch.bfloat16)


@torch.no_grad()
def round_into(outs: Sequence[Tensor], wholes: Sequence[Tensor]) -> None:
    """outs ← wholes, dtypes as they come; float32 to bfloat16 as `high` is rounded."""
    plain = [(out, whole) for out, whole in zip(outs, wholes, strict=True) if not _narrows(out, whole)]
    copy_([out for out, _ in plain], [whole for _, whole in plain])
    for out, whole in zip(outs, wholes, strict=True):
        if _narrows(out, whole):
            out.view(torch.int16).copy_(whole.view(torch.int32).add(HALF).bitwise_right_shift_(16))
            out.masked_fill_(
                whole.isnan(), torch.nan
            )  # CUDA's own, 0x7fffffff, would be rounded up to a zero


@torch.no_grad()
def split(wholes: Sequence[Tensor], highs: Sequence[Tensor], lows: Sequence[Tensor]) -> None:
    """Write both halves of each."""
    round_into(highs, wholes)
    for whole, low in zip(wholes, lows, strict=True):
        low.copy_(whole.view(torch.int32))  # the lower 16 bits


@torch.no_grad()
def join(highs: Sequence[Tensor], lows: Sequence[Tensor], wholes: Sequence[Tensor]) -> None:
    """Write the float32 tensors that were split."""
    for high, low, whole in zip(highs, lows, wholes, strict=True):
        bits = whole.view(torch.int32)
        bits.copy_(high.view(torch.int16)).bitwise_left_shift_(16).add_(low)


def _narrows(out: Tensor, whole: Tensor) -> bool:
    return (whole.dtype, out.dtype) == PAIR
