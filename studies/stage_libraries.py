"""Kernels of other libraries beside those in use, at the shapes of a layer: whether one of them makes a stage faster.

    python studies/stage_libraries.py OUT.jsonl [--seconds 120] [--tuned] [--dry-run]

QuACK's products (`quack-kernels`) by themselves and with SwiGLU inside them, its symmetric products beside those of
Muon's step, and FlashAttention 4 (`flash-attn-4`) beside torch's attention: kernels in CuTe's Python, compiled on the
spot. Neither is a dependency; what is not installed is a line with an error, and the rest is measured. Shapes, timing
and lines are those of `stage_products.py`; `off` is how far a result is from torch's, as a share of its norm.
`--tuned`: QuACK tries its tilings first, which takes a while for each shape. `--dry-run`: tiny, on a CPU.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from itertools import chain
from pathlib import Path
from typing import Any

import stage_products as base
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from slipstream.kernels.symmetric import symmetric_product
from slipstream.optim.newton_schulz import COEFFICIENTS

STACK = 32  # matrices of one shape, as Muon works on them together
GATE_THEN_UP = ("B",)  # the weights lie one after the other, not row by row in turns

Call = Callable[[], Tensor | Sequence[Tensor]]
Made = tuple[Sequence[Call], Call]  # what is timed, in turns, and what the first should give


def quack() -> Any:
    from quack import gemm_interface

    return gemm_interface


def measured(make: Callable[[], Made], flops: int, device: str) -> dict[str, Any]:
    began = time.perf_counter()
    calls, expected = make()
    wrong = off(calls[0](), expected())
    ready = time.perf_counter() - began
    ms = base.milliseconds(calls, device)
    return {
        "ms": ms,
        "tflops": flops / ms / 1e9,
        "off": wrong,
        "ready_seconds": ready,
        "kernels": base.recorded(calls[0]),
    }


def off(found: Tensor | Sequence[Tensor], expected: Tensor | Sequence[Tensor]) -> float:
    one, other = (
        torch.cat([part.flatten().float() for part in ([x] if isinstance(x, Tensor) else x)])
        for x in (found, expected)
    )
    return float((one - other).norm() / other.norm())


def products(shape: base.Shape, tokens: int, tuned: bool) -> Iterator[base.Job]:
    for name, (inner, outer) in base.sides(shape.model).items():
        for which in base.PASSES:

            def made(which: str = which, inner: int = inner, outer: int = outer) -> Made:
                gemm, drawn = quack().gemm, base.operands(which, tokens, inner, outer, shape)
                calls = [partial(gemm, a, b, out=out, tuned=tuned) for a, b, out in drawn]
                return calls, partial(torch.mm, *drawn[0][:2])

            head = {"what": "product", "name": name, "pass": which, "tokens": tokens, "library": "quack"}
            yield head, partial(measured, made, 2 * tokens * inner * outer, shape.device)


def swiglu(shape: base.Shape, tokens: int, tuned: bool) -> Iterator[base.Job]:
    """With the product before it, h = silu(x Wg) (x Wu), and its gradient with the product on the way back, as one.

    x, seed [T, D]; first [2F, D], gate above up; second [D, F]; both [T, 2F]. In QuACK gate and up of a token lie in
    turns. Both are kept for the backward, which makes h again.
    """
    dim, ffn = shape.model.dim, shape.model.ffn

    @cache
    def drawn() -> tuple[Tensor, ...]:
        weights = (shape.drawn(2 * ffn, dim) / dim**0.5, shape.drawn(dim, ffn) / ffn**0.5)
        return shape.drawn(tokens, dim), *weights, shape.drawn(tokens, dim)

    @cache
    def both() -> Tensor:
        x, first, *_ = drawn()
        return x @ first.mT

    @cache
    def both_in_turns() -> Tensor:
        return both().unflatten(1, (2, ffn)).mT.flatten(1)

    def forward(x: Tensor, first: Tensor) -> tuple[Tensor, Tensor]:
        joined = x @ first.mT
        gate, up = joined.chunk(2, dim=-1)
        return joined, F.silu(gate) * up

    def backward(seed: Tensor, second: Tensor, joined: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = joined.chunk(2, dim=-1)
        gradient, sigmoid, silu = seed @ second, gate.float().sigmoid(), F.silu(gate)
        slope = sigmoid * (1 + gate * (1 - sigmoid))
        parts = (gradient * up * slope, gradient * silu)
        return torch.cat(parts, dim=-1).to(seed.dtype), silu * up

    def expected(which: str) -> tuple[Tensor, Tensor]:
        x, first, second, seed = drawn()
        if which == "forward":
            return forward(x, first)
        joined = both().detach().requires_grad_()
        gate, up = joined.chunk(2, dim=-1)
        h = F.silu(gate) * up
        (gradient,) = torch.autograd.grad(h, joined, seed @ second)
        return gradient, h.detach()

    def by_torch(which: str) -> Made:
        x, first, second, seed = drawn()
        torch.compiler.reset()
        function = forward if which == "forward" else backward
        given = (x, first) if which == "forward" else (seed, second, both())
        if shape.compiled:
            function = torch.compile(function, dynamic=False)
        return [partial(function, *given)], partial(expected, which)

    def by_quack(which: str) -> Made:
        library, (x, first, second, seed) = quack(), drawn()
        settings = {"activation": "swiglu", "tuned": tuned}
        if which == "forward":
            call = partial(library.gemm_gated, x, first.mT, concat_layout=GATE_THEN_UP, **settings)
        else:
            call = partial(library.gemm_dgated, seed, second, both_in_turns(), **settings)

        def in_turns() -> tuple[Tensor, Tensor]:
            joined, h = expected(which)
            return joined.unflatten(1, (2, ffn)).mT.flatten(1), h

        return [call], in_turns

    for which, times in (("forward", 2), ("backward", 1)):
        for library, make in (("torch", by_torch), ("quack", by_quack)):
            head = {"what": "gated", "name": "swiglu", "pass": which, "tokens": tokens, "library": library}
            flops = 2 * times * tokens * dim * ffn
            yield head, partial(measured, partial(make, which), flops, shape.device)


def symmetric(shape: base.Shape) -> Iterator[base.Job]:
    """X Xᵀ and b G + c G², of which a Newton-Schulz iteration on Gram matrices consists."""
    dim, ffn = shape.model.dim, shape.model.ffn
    _, linear, square = COEFFICIENTS

    def made(library: str, columns: int) -> Made:
        x = shape.drawn(STACK, dim, columns)
        x /= x.float().norm(dim=(1, 2), keepdim=True).to(x.dtype)
        polynomial = columns == dim
        if polynomial:
            x = x @ x.mT
        alpha, beta = (square, linear) if polynomial else (1.0, 0.0)
        out, added = x.new_empty(STACK, dim, dim), x if polynomial else None
        if library == "quack":
            call = partial(quack().gemm_symmetric, x, x.mT, C=added, out=out, alpha=alpha, beta=beta or 1.0)
        else:
            terms = ((beta, x),) if polynomial else ()
            call = partial(symmetric_product, x, x, alpha, terms, out=out)
        start = x if polynomial else torch.zeros_like(out)
        return [call], partial(torch.baddbmm, start, x, x.mT, beta=beta, alpha=alpha)

    for name, columns in (("x xT", ffn), ("b G + c G2", dim)):
        for library in ("ours", "quack"):
            head = {"what": "symmetric", "name": name, "tokens": 0, "library": library}
            flops = STACK * dim * (dim + 1) * columns
            yield head, partial(measured, partial(made, library, columns), flops, shape.device)


def attention(shape: base.Shape, tokens: int) -> Iterator[base.Job]:
    model = shape.model
    kind = SDPBackend.CUDNN_ATTENTION if shape.device == "cuda" else SDPBackend.MATH

    def by_torch(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel([kind]):
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)

    def by_flash4(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        from flash_attn.cute import flash_attn_func

        found = flash_attn_func(q, k, v, causal=True)
        return found[0] if isinstance(found, tuple) else found

    def made(function: Callable[..., Tensor], which: str, length: int) -> Made:
        *inputs, seed = (
            shape.drawn(tokens // length, length, heads, model.head_dim)
            for heads in (model.heads, model.kv_heads, model.kv_heads, model.heads)
        )

        def way(function: Callable[..., Tensor]) -> Call:
            own = [x.detach().requires_grad_(which == "backward") for x in inputs]
            if which == "forward":
                return partial(function, *own)
            return partial(torch.autograd.grad, function(*own), own, seed, retain_graph=True)

        return [way(function)], way(by_torch)

    for length in shape.lengths:
        for which, times in (("forward", 2), ("backward", 5)):
            flops = times * tokens * length * model.q_dim  # half of the pairs are masked
            for library, function in (("torch", by_torch), ("flash4", by_flash4)):
                head = {
                    "what": "attention",
                    "name": "causal",
                    "pass": which,
                    "tokens": tokens,
                    "length": length,
                    "library": library,
                }
                yield head, partial(measured, partial(made, function, which, length), flops, shape.device)


def jobs(shape: base.Shape, tuned: bool) -> Iterator[base.Job]:
    tokens = shape.tokens[-1]
    return chain(
        swiglu(shape, tokens, tuned),
        attention(shape, tokens),
        symmetric(shape),
        products(shape, tokens, tuned),
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--tuned", action="store_true", help="QuACK tries its tilings first")
    parser.add_argument("--dry-run", action="store_true", help="tiny, on a CPU, nothing compiled")
    given = parser.parse_args()
    shape = base.TINY if given.dry_run else base.REAL
    base.measure(given.out, given.seconds, jobs(shape, given.tuned))


if __name__ == "__main__":
    main()
