"""Batched matrix products whose result is known to be symmetric, at half the work.

    C = α A Bᵀ + β D + γ E + δ I        for each of N matrices; A Bᵀ, D and E symmetric, [M, M]

Only the tiles on and below the diagonal are computed; each is also written, transposed, to its mirror place.
So C is symmetric to the last bit, but for the tiles on the diagonal, which are as symmetric as A Bᵀ comes out. X Xᵀ is
one such product, and so is every product of two polynomials in one symmetric matrix, which is all that a
Newton-Schulz iteration on a Gram matrix consists of.
"""

from __future__ import annotations

from functools import lru_cache
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


TILING = Tiling(128, 64, 3, 4)
_PROGRAMS = 2  # that share a multiprocessor: what they keep there leaves no room for a third
SMALL = 512  # up to here whole products by the vendor's library are as fast


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
    m, k = (a.shape[2], a.shape[1]) if tall else a.shape[1:]
    out = a.new_empty(a.shape[0], m, m) if out is None else out
    if runs_on(a.device) and in_tiles(a.dtype, m, k, tall):
        _launch(a, b, alpha, plus, diagonal, tall, out)
    else:
        _plain(*((a.mT, b) if tall else (a, b.mT)), alpha, plus, diagonal, out)
    return out


def in_tiles(dtype: torch.dtype, m: int, k: int, tall: bool) -> bool:
    """Whether the kernel takes it: rows begin on 16 bytes, and a step of a tall product ends with its matrix."""
    half = dtype in (torch.bfloat16, torch.float16)
    return half and m > SMALL and m % 8 == 0 and k % (TILING.step if tall else 8) == 0


def tiles(m: int) -> int:
    """Those of a result [M, M] that are computed."""
    count = -(-m // TILING.tile)
    return count * (count + 1) // 2


@lru_cache(maxsize=16)
def programs_at_once(device: torch.device) -> int:
    """How many tiles a device computes at a time."""
    if device.type != "cuda":
        return 1
    return _PROGRAMS * torch.cuda.get_device_properties(device).multi_processor_count


def _plain(a: Tensor, b: Tensor, alpha: float, plus: Terms, diagonal: float, out: Tensor) -> None:
    (beta, d), *more = plus or ((0.0, out),)
    torch.baddbmm(d, a, b, beta=beta, alpha=alpha, out=out)
    for factor, term in more:
        out.add_(term, alpha=factor)
    if diagonal:
        out.diagonal(dim1=1, dim2=2).add_(diagonal)


def _launch(
    a: Tensor, b: Tensor, alpha: float, plus: Terms, diagonal: float, tall: bool, out: Tensor
) -> None:
    from triton.tools.tensor_descriptor import TensorDescriptor

    from slipstream.kernels.programs import symmetric_tile

    tile, step, stages, warps = TILING
    count, m = out.shape[:2]

    def rows(matrices: Tensor, *block: int) -> TensorDescriptor:
        return TensorDescriptor.from_tensor(matrices.view(-1, matrices.shape[2]), list(block))

    block = (step, tile) if tall else (tile, step)
    # The host makes no descriptor twice, and none for a second term that is not there.
    left = rows(a, *block)
    right = left if b is a else rows(b, *block)
    added = [rows(term, tile, tile) for _, term in plus] or [rows(out, tile, tile)]
    (beta, _), (gamma, _) = (*plus, (0.0, out), (0.0, out))[:2]
    symmetric_tile[tiles(m), count](
        left, right, TensorDescriptor.from_tensor(out, [1, tile, tile]),
        added[0], added[-1], alpha, beta, gamma, diagonal, m, a.shape[1 if tall else 2],
        terms=len(plus), tall=tall, TILE=tile, STEP=step, num_stages=stages, num_warps=warps,
    )  # fmt: skip
