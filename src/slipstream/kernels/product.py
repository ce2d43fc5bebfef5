"""Batched matrix products whose bits do not depend on the size of the batch.

A vendor's library picks another kernel for another number of matrices, which adds in another order. Here each tile of
each matrix is summed alike, so that a matrix comes out the same whatever shares its stack.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.kernels.compiler import runs_on
from slipstream.kernels.symmetric import SMALL

_ROWS, _COLUMNS, _STEP, _STAGES, _WARPS = 128, 256, 64, 3, 8  # chosen by measurement, and not at run time


def product(a: Tensor, b: Tensor, out: Tensor) -> Tensor:
    """out[n] ← A[n] B[n] for contiguous A [N, M, K], B [N, K, C] in half precision; `out` is neither."""
    count, m, k = a.shape
    columns = b.shape[2]
    if not (runs_on(a.device) and product_in_tiles(a.dtype, m, k, columns)):
        return torch.bmm(a, b, out=out)
    from triton.tools.tensor_descriptor import TensorDescriptor

    from slipstream.kernels.programs import product_tile

    grid = -(-m // _ROWS), -(-columns // _COLUMNS), count
    product_tile[grid](
        TensorDescriptor.from_tensor(a.view(-1, k), [_ROWS, _STEP]),
        TensorDescriptor.from_tensor(b.view(-1, columns), [_STEP, _COLUMNS]),
        TensorDescriptor.from_tensor(out, [1, _ROWS, _COLUMNS]),
        m, k, ROWS=_ROWS, COLUMNS=_COLUMNS, STEP=_STEP, num_stages=_STAGES, num_warps=_WARPS,
    )  # fmt: skip
    return out


def product_in_tiles(dtype: torch.dtype, m: int, k: int, columns: int) -> bool:
    """Whether the kernel takes it: rows begin on 16 bytes, and a step ends with its matrix."""
    half = dtype in (torch.bfloat16, torch.float16)
    return half and min(m, columns) > SMALL and k % _STEP == 0 and columns % 8 == 0
