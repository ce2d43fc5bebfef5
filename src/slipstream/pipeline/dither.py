"""Sums of gradients in bfloat16 that lose nothing on average: each addition is rounded up or down at random.

    total ← the bfloat16 below or above total + term, with the probabilities that make its mean exact

A sum that is rounded to the nearest stands still once its terms fall below half a unit in its last place; this one
moves as far as it should, with noise. The random bits of an element are a hash of its place in its tensor and of
`seed`, which follows from the parameter's name and the microbatch: the same at every depth and after a resume.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

MASK = 0xFFFF


def seed_of(name: str, turn: int) -> int:
    """Of a parameter, in the `turn`-th microbatch of a run."""
    return zlib.crc32(f"{name}/{turn}".encode()) - (1 << 31)


@torch.no_grad()
def add_dithered(totals: Sequence[Tensor], terms: Sequence[Tensor], seeds: Sequence[int]) -> None:
    """totals ← totals + terms, for bfloat16 totals."""
    for total, term, seed in zip(totals, terms, seeds, strict=True):
        exact = total.float().add_(term).view(torch.int32)
        noise = _noise(total.numel(), seed, total.device).view(total.shape)
        # Adding to the lower half carries into the upper one with the probability that the lower one names.
        total.view(torch.int16).copy_(exact.add_(noise).bitwise_right_shift_(16))


def _noise(count: int, seed: int, device: torch.device) -> Tensor:
    """16 bits for each place: a multiplicative hash, mixed twice (int32 products wrap)."""
    bits = torch.arange(count, dtype=torch.int32, device=device)
    bits = bits.mul_(-1640531527).add_(seed)
    for factor in (-2048144777, -1028477379):
        bits = bits.bitwise_xor_(bits.bitwise_right_shift(15)).mul_(factor)
    return bits.bitwise_xor_(bits.bitwise_right_shift(16)).bitwise_and_(MASK)
