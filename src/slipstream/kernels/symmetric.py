"""Batched matrix products whose result is known to be symmetric, at half the work.

    C = α A Bᵀ + β D + γ E + δ I        for each of N matrices; A Bᵀ, D and E symmetric, [M, M]

Only the tiles on and below the diagonal are computed; each is also written, transposed, to its mirror place.
So C is symmetric to the last bit, but for the tiles on the diagonal, which are as symmetric as A Bᵀ comes out. X Xᵀ is
one such product, and so is every product of two polynomials in one symmetric matrix, which is all that a
Newton-Schulz iteration on a Gram matrix consists of.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.kernels.compiler import runs_on

Terms = tuple[tuple[float, Tensor], ...]


class Tiling(NamedTuple):
    """How a product is cut. Chosen by measurement and not at run time: a choice changes the rounding."""

    tile: int
    step: int
    stages: int
    warps: int


def tiling(m: int) -> Tiling:
    """The fastest of twelve on an H200 at M = 960 and 320; loading by descriptors (TMA) gave nothing there."""
    return Tiling(128, 64, 3, 4) if m > 512 else Tiling(64, 64, 4, 4)


def symmetric_product(
    a: Tensor,
    b: Tensor,
    alpha: float = 1.0,
    plus: Terms = (),
    diagonal: float = 0.0,
    tall: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """α A Bᵀ + Σ β D + δ I for A, B [N, M, K] and at most two (β, D [N, M, M]). `tall`: Aᵀ B for A, B [N, K, M].

    All contiguous; `out` is none of the others.
    """
    m = a.shape[2 if tall else 1]
    out = a.new_empty(a.shape[0], m, m) if out is None else out
    if runs_on(a.device) and a.dtype in (torch.bfloat16, torch.float16):
        _launch(a, b, alpha, plus, diagonal, tall, out)
    else:
        _plain(*((a.mT, b) if tall else (a, b.mT)), alpha, plus, diagonal, out)
    return out


def _plain(a: Tensor, b: Tensor, alpha: float, plus: Terms, diagonal: float, out: Tensor) -> None:
    torch.bmm(a, b, out=out)
    if alpha != 1:
        out.mul_(alpha)
    for factor, term in plus:
        out.add_(term, alpha=factor)
    if diagonal:
        out.diagonal(dim1=1, dim2=2).add_(diagonal)


def _launch(
    a: Tensor, b: Tensor, alpha: float, plus: Terms, diagonal: float, tall: bool, out: Tensor
) -> None:
    from slipstream.kernels.programs import symmetric_tile

    count, m, k = (a.shape[0], a.shape[2], a.shape[1]) if tall else a.shape
    cut = tiling(m)
    (beta, d), (gamma, e) = (*plus, (0.0, out), (0.0, out))[:2]
    tiles = -(-m // cut.tile)
    symmetric_tile[tiles * (tiles + 1) // 2, count](  # pyright: ignore[reportIndexIssue]
        a, b, out, d, e, alpha, beta, gamma, diagonal, m, k,
        terms=len(plus), tall=tall, even=k % cut.step == 0,
        TILE=cut.tile, STEP=cut.step, num_stages=cut.stages, num_warps=cut.warps,
    )  # fmt: skip
