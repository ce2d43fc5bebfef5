"""The kernels of a layer one by one, as `stage_speed.py` measures them together: which are slow, and whose are faster.

    python studies/stage_products.py OUT.jsonl [--seconds 60] [--dry-run]

For SmolLM2-360M and microbatches of 32,768 and 65,536 tokens: every product (forward, gradients of x and of W) by
cuBLAS and by cuBLASLt. For the smaller ones: attention by cuDNN and by FlashAttention, SwiGLU with gate and up apart
and as one product would leave them, and a norm under the settings of inductor that change it, each forward and
backward. A line of OUT is one of them: milliseconds on the device, TFLOP/s or GB/s, and its kernels by name; or its
error, and the others go on. Operands of a product take turns, so that none is in the cache. What compiles comes last;
nothing is begun when the time is over. `--dry-run`: tiny, on a CPU, nothing compiled.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from slipstream.metrics import kernels
from slipstream.models.llama import RMSNorm
from slipstream.models.sizes import PRESETS, ModelConfig
from slipstream.train.timeline import recorder, written

CACHE_BYTES = 256 << 20  # of operands that take turns: several times the cache
ROUNDS, LEAST_CALLS = 5, 8
AHEAD_CYCLES = 8_000_000  # 4 ms, longer than the host needs for the calls of a round
LIBRARIES = ("cublas", "cublaslt")
PASSES = ("forward", "dX", "dW")
NORM_SETTINGS = {
    "as it is": {},
    "stages": {"triton.mix_order_reduction_allow_multi_stages": True},
    "split": {"triton.mix_order_reduction_autotune_split_size": True},
    "apart": {"triton.mix_order_reduction": False},
}
RATES = {"tflops": "TFLOP/s", "gb_per_s": "GB/s"}

Job = tuple[dict[str, Any], Callable[[], dict[str, Any]]]  # what is measured, and how
Made = tuple[
    Callable[[], Tensor], Sequence[Tensor], Tensor
]  # a forward, what it reads, a gradient of its output


@dataclass(frozen=True)
class Shape:
    model: ModelConfig
    tokens: tuple[int, ...]  # of a microbatch
    lengths: tuple[int, ...]
    device: str = "cuda"
    compiled: bool = True

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.device == "cuda" else torch.float32

    def drawn(self, *size: int) -> Tensor:
        return torch.randn(size, device=self.device, dtype=self.dtype)


REAL = Shape(PRESETS["smollm2-360m"], (32_768, 65_536), (1024, 2048))
TINY = Shape(
    ModelConfig(vocab=96, dim=24, layers=1, heads=3, kv_heads=1, ffn=40),
    (64, 128),
    (16, 32),
    "cpu",
    compiled=False,
)


def sides(model: ModelConfig) -> dict[str, tuple[int, int]]:
    """Of each matrix: what it reads and what it writes. k is as v, up as gate; joined ones are beside their parts."""
    return {
        "q": (model.dim, model.q_dim),
        "kv": (model.dim, model.kv_dim),
        "qkv": (model.dim, model.q_dim + 2 * model.kv_dim),
        "o": (model.q_dim, model.dim),
        "gate": (model.dim, model.ffn),
        "gate_up": (model.dim, 2 * model.ffn),
        "down": (model.ffn, model.dim),
        "head": (model.dim, model.vocab),
    }


def operands(
    which: str, tokens: int, inner: int, outer: int, shape: Shape
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """(a, b, where a b goes) of one pass of y = x W', laid out as in training; several, that take turns."""
    size = (tokens * (inner + outer) + inner * outer) * shape.dtype.itemsize
    found = []
    for _ in range(max(2, -(-CACHE_BYTES // size) if shape.device == "cuda" else 2)):
        if which == "forward":
            a, b = shape.drawn(tokens, inner), shape.drawn(outer, inner).mT
        elif which == "dX":
            a, b = shape.drawn(tokens, outer), shape.drawn(outer, inner)
        else:
            a, b = shape.drawn(tokens, outer).mT, shape.drawn(tokens, inner)
        found.append((a, b, a.new_empty(a.shape[0], b.shape[1])))
    return found


def milliseconds(calls: Sequence[Callable[[], object]], device: str) -> float:
    """Of one call: the median of rounds in which the calls take turns. On a GPU a round is queued while the device
    sleeps, so that it is the device's time: the host takes longer to call a small kernel than that runs."""
    turns = [*calls] * max(1, -(-LEAST_CALLS // len(calls)))
    for call in calls:
        call()
    found = []
    for _ in range(ROUNDS):
        if device == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(AHEAD_CYCLES)
            start.record()
            for call in turns:
                call()
            end.record()
            end.synchronize()
            found.append(start.elapsed_time(end) / len(turns))
        else:
            began = time.perf_counter()
            for call in turns:
                call()
            found.append((time.perf_counter() - began) * 1e3 / len(turns))
    return median(found)


def recorded(call: Callable[[], object], times: int = 1) -> list[dict[str, Any]]:
    """The kernels of a call, with the milliseconds of each."""
    with recorder() as record:
        for _ in range(times):
            call()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    with tempfile.TemporaryDirectory(prefix="stage-products-") as folder:
        trace = written(record, Path(folder) / "trace.json")
    return kernels.longest(kernels.pieces(trace), times, most=12)


@contextmanager
def blas(library: str, device: str) -> Iterator[None]:
    torch.backends.cuda.preferred_blas_library(library if device == "cuda" else "default")
    try:
        yield
    finally:
        torch.backends.cuda.preferred_blas_library("default")


def products(shape: Shape, tokens: int) -> Iterator[Job]:
    for name, (inner, outer) in sides(shape.model).items():
        for which in PASSES:
            draw = cache(partial(operands, which, tokens, inner, outer, shape))
            for library in LIBRARIES:
                head = {
                    "what": "product",
                    "name": name,
                    "pass": which,
                    "tokens": tokens,
                    "library": library,
                }
                yield head, partial(product, draw, library, 2 * tokens * inner * outer, shape.device)


def product(
    draw: Callable[[], list[tuple[Tensor, Tensor, Tensor]]], library: str, flops: int, device: str
) -> dict[str, Any]:
    with blas(library, device):
        calls = [partial(torch.mm, a, b, out=out) for a, b, out in draw()]
        ms = milliseconds(calls, device)
        return {"ms": ms, "tflops": flops / ms / 1e9, "kernels": recorded(calls[0])}


def both_ways(
    head: dict[str, Any], make: Callable[[], Made], shape: Shape, settings: Mapping[str, Any] | None = None
) -> Iterator[Job]:
    """Forward and backward of what `make` makes, once, compiled where it compiles under `settings` of inductor."""
    made = cache(make)

    def measured(which: str) -> dict[str, Any]:
        from torch._functorch import config as aot
        from torch._inductor import config

        # A backward that runs more than once may not overwrite what the forward kept.
        with config.patch(dict(settings or {})), aot.patch(donated_buffer=False):
            forward, inputs, seed = made()
            call = forward
            if which == "backward":
                call = partial(torch.autograd.grad, forward(), inputs, seed, retain_graph=True)
            found: dict[str, Any] = {"ms": milliseconds([call], shape.device), "kernels": recorded(call, 3)}
        if "passes" in head:
            found["gb_per_s"] = head["passes"][which] * seed.nbytes / found["ms"] / 1e6
        return found

    for which in ("forward", "backward"):
        yield head | {"pass": which}, partial(measured, which)


def attention(shape: Shape, tokens: int) -> Iterator[Job]:
    model = shape.model
    kinds = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}

    def make(kind: SDPBackend, length: int) -> Made:
        q, k, v, seed = (
            shape.drawn(tokens // length, length, heads, model.head_dim).transpose(1, 2)
            for heads in (model.heads, model.kv_heads, model.kv_heads, model.heads)
        )
        inputs = [x.requires_grad_() for x in (q, k, v)]

        def forward() -> Tensor:
            with sdpa_kernel([kind]):
                return F.scaled_dot_product_attention(*inputs, is_causal=True, enable_gqa=True)

        return forward, inputs, seed

    for length in shape.lengths:
        for name, kind in kinds.items() if shape.device == "cuda" else {"math": SDPBackend.MATH}.items():
            head = {"what": "attention", "name": name, "tokens": tokens, "length": length}
            yield from both_ways(head, partial(make, kind, length), shape)


def swiglu(shape: Shape, tokens: int) -> Iterator[Job]:
    ffn = shape.model.ffn

    def apart(gate: Tensor, up: Tensor) -> Tensor:
        return F.silu(gate) * up

    def joined(both: Tensor) -> Tensor:
        return apart(*both.chunk(2, dim=-1))

    def make(function: Callable[..., Tensor], widths: Sequence[int]) -> Made:
        inputs = [shape.drawn(tokens, width).requires_grad_() for width in widths]
        return compiled(function, inputs, shape), inputs, shape.drawn(tokens, ffn)

    for function, widths in ((apart, (ffn, ffn)), (joined, (2 * ffn,))):
        passes = {"forward": 3, "backward": 5}  # over the output
        head = {"what": "swiglu", "name": function.__name__, "tokens": tokens, "passes": passes}
        yield from both_ways(head, partial(make, function, widths), shape)


def norm(shape: Shape, tokens: int) -> Iterator[Job]:
    """With its residual, as a layer has it; the sum over tokens for the weight is part of the backward."""
    model = shape.model

    def make() -> Made:
        module = RMSNorm(model.dim, model.norm_eps, shape.device).to(shape.dtype)
        x = shape.drawn(tokens, model.dim).requires_grad_()
        forward = compiled(lambda x: x + module(x), (x,), shape)
        return forward, (x, module.weight), shape.drawn(tokens, model.dim)

    for name, settings in NORM_SETTINGS.items():
        passes = {"forward": 2, "backward": 3}
        head = {"what": "norm", "name": name, "tokens": tokens, "passes": passes}
        yield from both_ways(head, make, shape, settings)


def compiled(function: Callable[..., Tensor], inputs: Sequence[Tensor], shape: Shape) -> Callable[[], Tensor]:
    torch.compiler.reset()
    return partial(torch.compile(function, dynamic=False) if shape.compiled else function, *inputs)


def run(out: Path, seconds: float, shape: Shape) -> list[dict[str, Any]]:
    least = shape.tokens[0]
    parts = [
        products(shape, least),
        attention(shape, least),
        *(products(shape, tokens) for tokens in shape.tokens[1:]),
        swiglu(shape, least),
        norm(shape, least),
    ]
    return measure(out, seconds, chain(*parts))


def measure(out: Path, seconds: float, jobs: Iterable[Job]) -> list[dict[str, Any]]:
    """A line for each, as soon as it is there; nothing is begun when the time is over."""
    began, rows = time.perf_counter(), []
    with out.open("a") as file:
        for head, job in jobs:
            if time.perf_counter() - began > seconds:
                print(f"not done after {seconds:.0f} s")
                break
            rows.append(head | attempt(job))
            print(json.dumps(rows[-1]), file=file, flush=True)
            print(told(rows[-1]), flush=True)
    return rows


def attempt(job: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What a job answers, or its error: the others are to be measured."""
    try:
        return job()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}


def told(row: Mapping[str, Any]) -> str:
    where = " ".join(str(row[key]) for key in ("what", "name", "pass", "length", "library") if key in row)
    if "error" in row:
        return f"{row['tokens']:6} {where:34} {row['error']}"
    rate = next((f" {row[key]:6.0f} {unit}" for key, unit in RATES.items() if key in row), "")
    first = row["kernels"][0]["name"] if row["kernels"] else ""
    return f"{row['tokens']:6} {where:34} {row['ms']:8.3f} ms{rate}  {first[:50]}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--dry-run", action="store_true", help="tiny, on a CPU, nothing compiled")
    given = parser.parse_args()
    run(given.out, given.seconds, TINY if given.dry_run else REAL)


if __name__ == "__main__":
    main()
