"""Batched matrix products whose result is known to be symmetric, at half the work.

    C = α A B + β D + γ E        for each of N matrices; A B, D and E symmetric, [M, M]

Only the tiles on and below the diagonal are computed; each is also written, transposed, to its mirror place.
So C is symmetric to the last bit. X Xᵀ is one such product, and so is every product of two polynomials in one
symmetric matrix, which is all that a Newton-Schulz iteration on a Gram matrix consists of.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.kernels.compiler import runs_on


class Tiling(NamedTuple):
    """How a product is cut. Chosen by measurement and not at run time: a choice changes the rounding."""

    tile: int
    step: int
    stages: int
    warps: int


TILINGS = {True: Tiling(128, 64, 4, 8), False: Tiling(64, 64, 4, 4)}  # by whether M is large


def tiling(m: int) -> Tiling:
    return TILINGS[m > 512]


def symmetric_product(
    a: Tensor,
    b: Tensor,
    alpha: float = 1.0,
    plus: tuple[tuple[float, Tensor], ...] = (),
    out: Tensor | None = None,
) -> Tensor:
    """α A B + Σ β D, A [N, M, K], B [N, K, M], at most two (β, D [N, M, M]); `out` may be none of them."""
    out = a.new_empty(a.shape[0], a.shape[1], a.shape[1]) if out is None else out
    if runs_on(a.device) and a.dtype in (torch.bfloat16, torch.float16):
        return _launch(a, b, alpha, plus, out)
    return _plain(a, b, alpha, plus, out)


def _plain(a: Tensor, b: Tensor, alpha: float, plus: tuple[tuple[float, Tensor], ...], out: Tensor) -> Tensor:
    if not plus:
        torch.bmm(a, b, out=out)
        return out.mul_(alpha) if alpha != 1 else out
    (beta, base), *more = plus
    torch.baddbmm(base, a, b, beta=beta, alpha=alpha, out=out)
    for gamma, other in more:
        out.add_(other, alpha=gamma)
    return out


def _launch(
    a: Tensor, b: Tensor, alpha: float, plus: tuple[tuple[float, Tensor], ...], out: Tensor
) -> Tensor:
    from slipstream.kernels.programs import symmetric_tile

    count, m, k = a.shape
    (beta, d), (gamma, e) = (*plus, (0.0, out), (0.0, out))[:2]

    cut = tiling(m)
    tiles = -(-m // cut.tile)
    symmetric_tile[tiles * (tiles + 1) // 2, count](  # pyright: ignore[reportIndexIssue]
        a, b, out, d, e, alpha, beta, gamma, m, k, *a.stride(), *b.stride(),
        terms=len(plus), TILE=cut.tile, STEP=cut.step, num_stages=cut.stages, num_warps=cut.warps,
    )  # fmt: skip
    return out
