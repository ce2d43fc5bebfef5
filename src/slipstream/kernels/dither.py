"""A sum in bf16, rounded up or down at random: the hash that decides, written out as passes over memory or as a kernel.

The bits of chance are a hash of an element's place and of a seed. Both ways give the same bits. On a GPU the passes
take some hundred bytes of traffic per element, and twelve of memory; the kernel takes six, and none.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.kernels.compiler import launching_on, runs_on

_BLOCK = 1024


def add_dithered(total: Tensor, term: Tensor, seed: int) -> None:
    """total ← the bfloat16 below or above total + term, with the probabilities that make the mean exact."""
    if runs_on(total.device) and total.is_contiguous() and term.is_contiguous():
        _in_one_pass(total, term, seed)
        return
    exact = total.float().add_(term).view(torch.int32)
    chance = noise(total.numel(), seed, total.device).view(total.shape)
    # Adding to the lower half carries into the upper one with the probability that the lower one names.
    total.view(torch.int16).copy_(exact.add_(chance).bitwise_right_shift_(16))


def _in_one_pass(total: Tensor, term: Tensor, seed: int) -> None:
    from slipstream.kernels import programs

    size = total.numel()
    if size:
        with launching_on(total.device):
            programs.add_dithered[(-(-size // _BLOCK),)](
                total.view(torch.int16), term, seed, size, BLOCK=_BLOCK
            )


def noise(count: int, seed: int, device: torch.device) -> Tensor:
    """16 bits for each place: a multiplicative hash, mixed twice (int32 products wrap)."""
    bits = torch.arange(count, dtype=torch.int32, device=device)
    bits = bits.mul_(-1640531527).add_(seed)
    for factor in (-2048144777, -1028477379):
        bits = bits.bitwise_xor_(bits.bitwise_right_shift(15)).mul_(factor)
    return bits.bitwise_xor_(bits.bitwise_right_shift(16)).bitwise_and_(0xFFFF)
