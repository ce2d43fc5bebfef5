"""Orthogonalise a stack of equal-shaped matrices at once (Newton-Schulz, quintic).

With X = M / ||M||_F, on the smaller side of each matrix,

    A = X Xᵀ        X ← a X + (b A + c A²) X        five times,

brings every singular value near 1 while keeping the singular vectors (Jordan et al. 2024, whose a, b, c these
are). Shapes: N matrices, R rows, C columns.

Invariant: what comes out for one matrix does not depend on which others share its stack. Only batched
products and per-matrix norms are used, which on one CPU thread give the same bits at every N. So a stage
split, which changes what is stacked with what, changes no bit. (A plain `mm` rounds differently on small
matrices.) On a GPU it holds for matrices whose products are ours (`kernels/product.py`, `symmetric.py`: sides of more
than 512, multiples of 64). For others the vendor's library picks a kernel by N, and a split may change last bits; under
`torch.use_deterministic_algorithms` each of them has a stack of its own.

On a GPU with Triton the same polynomial is evaluated with fewer and cheaper products. The iteration multiplies X from
the left by polynomials in its own Gram matrix. They all commute, so the Gram matrix can be iterated alone and X
multiplied once at the end:

    G = X Xᵀ        Z = b G + c G²        Q ← Q (a I + Z)        G ← (a I + Z) G (a I + Z)        X ← Q X

Every product but the last is symmetric (`kernels/symmetric.py`: half the work) and on the smaller side only.
For [960, 2560] that is 26 GFLOP instead of 56. The identity's part of Q and of a I + Z is kept apart as a
scalar, because half precision would round small entries away beside it; Q gets it in the end.

G loses small eigenvalues to rounding as it is iterated, so after three iterations X is multiplied and G made
anew. In fp16, which X of norm 1 fits into, the result is nearer to the exact polynomial's than the plain
iteration in bf16: 0.3 against 1.0 % on Gaussian [960, 2560], 1.3 against 2.6 % with singular values over two
decades, 2.8 against 5.4 % over four. In fp32 on a CPU that form errs by 2e-4 where the plain one errs by 5e-6
(four decades), so there it is not used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from slipstream.kernels.compiler import MOST_MATRICES, launching_on, runs_on
from slipstream.kernels.normalise import normalised
from slipstream.kernels.product import product, product_in_tiles
from slipstream.kernels.symmetric import in_tiles, programs_at_once, symmetric_product, tiles
from slipstream.lists import norms

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
STEPS = 5
TOGETHER = 3  # iterations on one Gram matrix
EPS = 1e-7
Fill = Callable[[list[int], list[Tensor]], None]
# Elements of one stack: enough to fill the device, few enough for the cache (CPU) or for the scratch (GPU).
_STACK_ELEMENTS = {"cpu": 2**21, "cuda": 2**27}
_SCRATCH_BYTES = 3 * 2**28  # of the matrices that are worked on at a time, on a GPU


def compute_dtype(tensor: Tensor) -> torch.dtype:
    """Of a stack: bf16 on a GPU, which holds any gradient; elsewhere the tensor's own precision, at least fp32."""
    if tensor.is_cuda and tensor.dtype != torch.float64:
        return torch.bfloat16
    return torch.promote_types(tensor.dtype, torch.float32)


def orthogonalise(stack: Tensor, steps: int = STEPS) -> Tensor:
    """The orthogonal factor of each matrix of `stack` [N, R, C]. `stack` serves as scratch."""
    if stack.dtype == torch.bfloat16 and runs_on(stack.device):
        return _orthogonalise_in_place(stack, steps)
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


def _orthogonalise_in_place(stack: Tensor, steps: int) -> Tensor:
    """Of a stack in bf16, in fp16 in its own memory; some matrices at a time, so that scratch stays small."""
    halves = stack.view(torch.float16)
    size = part_size(*stack.shape, programs=programs_at_once(stack.device))
    for part, place in zip(stack.split(size), halves.split(size), strict=True):
        with launching_on(stack.device):
            found = orthogonalise_by_gram(normalised(part, EPS, place), steps, COEFFICIENTS)
        if found is not place:  # after an odd number of products
            place.copy_(found)
    return halves


def part_size(count: int, rows: int, columns: int, programs: int) -> int:
    """Of `count` matrices [rows, columns], how many to work on at a time where `programs` of a product run at once."""
    side = min(rows, columns)
    # In half precision: G, Z, Q and a product; what X is multiplied into.
    scratch = 2 * (4 * side * side + rows * columns)
    most = min(MOST_MATRICES, _SCRATCH_BYTES // max(1, scratch))
    return max(1, count if count <= most else _fullest(count, most, tiles(side), programs))


@lru_cache(maxsize=64)
def _fullest(count: int, most: int, each: int, programs: int) -> int:
    """A product of n matrices of `each` tiles takes ceil(n each / programs) rounds, and the last may leave most of the
    device idle. So not always the most that fit, but the most with which all parts together take fewest rounds."""

    def rounds(size: int) -> int:
        full, rest = divmod(count, size)
        return full * -(-size * each // programs) - (-rest * each // programs)

    return min(range(most // 2 + 1, most + 1), key=lambda size: (rounds(size), -size), default=1)


def orthogonalise_by_gram(x: Tensor, steps: int, coefficients: tuple[float, float, float]) -> Tensor:
    """`steps` iterations on X [N, R, C] of norm at most 1. X is overwritten."""
    wide = x.shape[1] <= x.shape[2]
    side = min(x.shape[1:])
    # What lives at once: G, Z, Q and a product on the way to one of them.
    spare = [x.new_empty(x.shape[0], side, side) for _ in range(4)]
    y = torch.empty_like(x)
    for done in range(0, steps, TOGETHER):
        polynomial = _polynomial(x, not wide, min(TOGETHER, steps - done), coefficients, spare)
        product(*((polynomial, x) if wide else (x, polynomial)), out=y)
        x, y = y, x
    return x


def _polynomial(
    x: Tensor, tall: bool, steps: int, coefficients: tuple[float, float, float], spare: list[Tensor]
) -> Tensor:
    """Q, what `steps` iterations multiply X by; it lies in one of `spare`."""
    a, b, c = coefficients
    gram, z, q, other = spare
    symmetric_product(x, x, tall=tall, out=gram)
    factor = 1.0  # Q = factor I + q
    for step in range(steps):
        last = step == steps - 1
        diagonal = factor * a if last else 0.0
        if step == 0:
            symmetric_product(gram, gram, c, ((b, gram),), diagonal, out=q)
            step_z = q
        else:
            symmetric_product(gram, gram, c, ((b, gram),), out=z)
            symmetric_product(q, z, 1.0, ((a, q), (factor, z)), diagonal, out=other)
            q, other = other, q
            step_z = z
        factor *= a
        if not last:
            symmetric_product(step_z, gram, 1.0, ((a, gram),), out=other)
            gram, other = other, gram
            symmetric_product(gram, step_z, 1.0, ((a, gram),), out=other)
            gram, other = other, gram
    return q


@dataclass(frozen=True)
class Stack:
    """Tensors [R, C] or [E, R, C] (E matrices) of equal R and C that are orthogonalised together."""

    indices: list[int]
    shapes: list[torch.Size]
    dtype: torch.dtype
    device: torch.device

    @cached_property
    def shape(self) -> torch.Size:
        count = sum(shape[:-2].numel() for shape in self.shapes)
        return torch.Size((count, *self.shapes[0][-2:]))

    @cached_property
    def _alike(self) -> bool:
        return all(shape == self.shapes[0] for shape in self.shapes)

    def empty(self) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=self.device)

    def views(self, stack: Tensor) -> list[Tensor]:
        """The part of each tensor in memory of this shape."""
        if self._alike:
            return list(stack.view(-1, *self.shapes[0]).unbind())
        parts = stack.split([shape[:-2].numel() for shape in self.shapes])
        return [part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)]


def stacks(like: Sequence[Tensor]) -> list[Stack]:
    """Tensors that share a stack, in lists of about equal size near the device's limit."""
    groups: dict[tuple[object, ...], list[int]] = {}
    for i, tensor in enumerate(like):
        if tensor.numel():
            groups.setdefault((tensor.shape[-2:], tensor.dtype, tensor.device), []).append(i)
    found = []
    for indices in groups.values():
        first = like[indices[0]]
        limit = _STACK_ELEMENTS.get(first.device.type, _STACK_ELEMENTS["cuda"])
        pieces = max(1, round(sum(like[i].numel() for i in indices) / limit))
        size = 1 if _apart(first) else -(-len(indices) // pieces)
        for start in range(0, len(indices), size):
            part = indices[start : start + size]
            found.append(Stack(part, [like[i].shape for i in part], compute_dtype(first), first.device))
    return found


def _apart(matrix: Tensor) -> bool:
    """Whether its bits would depend on its stack, and must not."""
    if matrix.device.type == "cpu" or not torch.are_deterministic_algorithms_enabled():
        return False
    rows, columns = matrix.shape[-2:]
    side = min(rows, columns)
    ours = (
        in_tiles(torch.float16, side, max(rows, columns), tall=rows > columns)
        and in_tiles(torch.float16, side, side, tall=False)
        and product_in_tiles(torch.float16, rows, side, columns)
    )
    return not (ours and runs_on(matrix.device) and matrix.dtype != torch.float64)


def orthogonal_stacks(
    stacks: Sequence[Stack], fill: Fill, steps: int = STEPS, memories: Sequence[Tensor] | None = None
) -> Iterator[tuple[list[int], list[Tensor]]]:
    """`fill(indices, outs)` writes those tensors into their places in a stack.

    Yields the indices of a stack and, for each, its orthogonalised tensor. `memories`: of the stacks, in which
    those tensors will lie as well.
    """
    for number, stack in enumerate(stacks):
        memory = stack.empty() if memories is None else memories[number]
        fill(stack.indices, stack.views(memory))
        found = orthogonalise(memory, steps)
        if memories is not None and found.data_ptr() != memory.data_ptr():
            found = memory.copy_(found)
        yield stack.indices, stack.views(found)
