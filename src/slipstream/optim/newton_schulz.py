"""Orthogonalise a stack of equal-shaped matrices at once (Newton-Schulz, quintic).

With X = M / ||M||_F, on the smaller side of each matrix,

    A = X Xᵀ        X ← a X + (b A + c A²) X        five times,

brings every singular value near 1 while keeping the singular vectors (Jordan et al. 2024, whose a, b, c these
are). Shapes: N matrices, R rows, C columns.

Invariant: what comes out for one matrix does not depend on which others share its stack. Only batched
products and per-matrix norms are used, which on one CPU thread give the same bits at every N. So a stage
split, which changes what is stacked with what, changes no bit. (A plain `mm` rounds differently on small
matrices.)

On a GPU with Triton the same polynomial is evaluated on the Gram matrix (`gram.py`), in about half the time. In
fp32 on a CPU that form errs by 2e-4 where this one errs by 5e-6 (singular values over four decades), so there it
is not used.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.kernels.compiler import MOST_MATRICES, launching_on, runs_on
from slipstream.kernels.divide import divided
from slipstream.lists import norms
from slipstream.optim.gram import orthogonalise_by_gram

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
STEPS = 5
EPS = 1e-7


def compute_dtype(tensor: Tensor) -> torch.dtype:
    """Of a stack: bf16 on a GPU, which holds any gradient; elsewhere the tensor's own precision, at least fp32."""
    if tensor.is_cuda and tensor.dtype != torch.float64:
        return torch.bfloat16
    return torch.promote_types(tensor.dtype, torch.float32)


def orthogonalise(stack: Tensor, steps: int = STEPS) -> Tensor:
    """The orthogonal factor of each matrix of `stack` [N, R, C], in its dtype. `stack` serves as scratch."""
    if stack.dtype == torch.bfloat16 and runs_on(stack.device):
        if stack.shape[0] > MOST_MATRICES:
            return torch.cat([orthogonalise(part, steps) for part in stack.split(MOST_MATRICES)])
        sizes = torch.linalg.vector_norm(stack, dim=(1, 2), dtype=torch.float32)
        with launching_on(stack.device):
            return orthogonalise_by_gram(divided(stack, sizes, EPS, torch.float16), steps, COEFFICIENTS)
    a, b, c = COEFFICIENTS
    count, rows, columns = stack.shape
    wide = rows <= columns
    sizes = torch.stack(norms(stack.unbind())).clamp_(min=EPS)
    x = stack.div_(sizes.view(count, 1, 1))
    y = torch.empty_like(x)
    gram = x.new_empty(count, min(rows, columns), min(rows, columns))
    polynomial = torch.empty_like(gram)
    for _ in range(steps):
        torch.bmm(*((x, x.mT) if wide else (x.mT, x)), out=gram)
        torch.baddbmm(gram, gram, gram, beta=b, alpha=c, out=polynomial)
        torch.baddbmm(x, *((polynomial, x) if wide else (x, polynomial)), beta=a, out=y)
        x, y = y, x
    return x
