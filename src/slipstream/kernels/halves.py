"""A float32 as the nearest bfloat16 and the 16 bits that it lacks, written as passes over memory or as a kernel.

    whole = high 2^16 + low        as integers, over the bit patterns; low in [-2^15, 2^15)

`high` is the upper half of the pattern, rounded: to the nearest bfloat16, and away from zero where two are as near.
So it is good as a weight by itself, and with `low` gives the float32 back exactly, infinities and zeros with a sign
included; what is not a number stays so, in both. (The usual rounding, ties to even, would need one more value of `low`
than 16 bits have.) Both ways give the same bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.kernels.compiler import launching_on, runs_on
from slipstream.kernels.tables import BLOCK, PIECE, Tensors, tables

_HALF = 1 << 15


@torch.no_grad()
def round_high(wholes: Tensors, highs: Tensors) -> None:
    """Write the upper half of each."""
    if _in_one_launch(wholes, highs):
        _launch_split(wholes, highs, ())
        return
    for whole, high in zip(wholes, highs, strict=True):
        high.view(torch.int16).copy_(whole.view(torch.int32).add(_HALF).bitwise_right_shift_(16))
        # CUDA's own, 0x7fffffff, would be rounded up to a zero.
        high.masked_fill_(whole.isnan(), torch.nan)


@torch.no_grad()
def split(wholes: Tensors, highs: Tensors, lows: Tensors) -> None:
    """Write both halves of each."""
    if _in_one_launch(wholes, highs, lows):
        _launch_split(wholes, highs, lows)
        return
    round_high(wholes, highs)
    for whole, low in zip(wholes, lows, strict=True):
        low.copy_(whole.view(torch.int32))  # the lower 16 bits


@torch.no_grad()
def join(highs: Tensors, lows: Tensors, wholes: Tensors) -> None:
    """Write the float32 tensors that were split."""
    if _in_one_launch(wholes, highs, lows):
        _launch_join(highs, lows, wholes)
        return
    for high, low, whole in zip(highs, lows, wholes, strict=True):
        bits = whole.view(torch.int32)
        bits.copy_(high.view(torch.int16)).bitwise_left_shift_(16).add_(low)


def _in_one_launch(wholes: Tensors, *halves: Tensors) -> bool:
    lists = (wholes, *halves)
    return (
        bool(wholes)
        and runs_on(wholes[0].device)
        and len({tensor.device for tensors in lists for tensor in tensors}) == 1
        and all(all(map(Tensor.is_contiguous, tensors)) for tensors in lists)
    )


def _launch_split(wholes: Tensors, highs: Tensors, lows: Tensors) -> None:
    from slipstream.kernels.programs import split_lists

    if found := tables(wholes, highs, lows):
        addresses, blocks, aligned = found
        with launching_on(wholes[0].device):
            split_lists[(len(blocks),)](
                addresses, blocks, len(wholes), both=bool(lows), aligned=aligned, BLOCK=BLOCK, PIECE=PIECE
            )


def _launch_join(highs: Tensors, lows: Tensors, wholes: Tensors) -> None:
    from slipstream.kernels.programs import join_lists

    if found := tables(wholes, highs, lows):
        addresses, blocks, aligned = found
        with launching_on(wholes[0].device):
            join_lists[(len(blocks),)](
                addresses, blocks, len(wholes), aligned=aligned, BLOCK=BLOCK, PIECE=PIECE
            )
