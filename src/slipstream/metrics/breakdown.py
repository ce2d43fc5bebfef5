"""Where the time of an update goes, read from a trace of torch's profiler (Chrome's format). Imports no torch.

The time is cut into pieces: a piece is a stretch in which the GPU ran one kernel; without a GPU, one in which the
busiest thread was in one operation and in none that this called. What a piece belongs to is told by the operations
around its launch, their names first and then the shapes they were given. That holds for compiled code too, in which one
kernel does what several modules ask for: a product is known by the weight's shape, whoever computes it. Of a CUDA
graph only the launch is recorded, so its kernels are known by their own names or not at all.

    sum over parts of (forward + backward) + idle = span

Two kernels at once count once, for the one that started first; communication counts only while nothing else runs.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import Any

from slipstream.models.sizes import ModelConfig

UPDATE = "slipstream: update"  # what the engines mark so (`torch_private.updating`)

ATTENTION, PRODUCTS, MLP, HEAD = "attention", "q, k, v, o, other products", "MLP or experts", "head and loss"
NORMS, EMBEDDING, OPTIMIZER = "norms, rotary, residuals", "embedding", "optimizer and sums"
COMMUNICATION, IDLE = "communication", "launches and idle"
RECORDED = "else, in CUDA graphs"
PARTS = (ATTENTION, PRODUCTS, MLP, HEAD, NORMS, EMBEDDING, RECORDED, OPTIMIZER, COMMUNICATION, IDLE)
_GRAPH = "cudaGraphLaunch"

# The first line of which a word is in the name of the kernel or of any operation around its launch.
_BY_NAME = (
    (OPTIMIZER, (UPDATE, "Optimizer.step", "AccumulateGrad", "_foreach_", "multi_tensor_apply")),
    (COMMUNICATION, ("nccl", "c10d::", "gloo:", "Memcpy PtoP")),
    (ATTENTION, ("scaled_dot_product", "ScaledDotProduct", "flash_fwd", "flash_bwd", "sdpa", "fmha")),
    (EMBEDDING, ("embedding", "Embedding")),
    (HEAD, ("CrossEntropy", "cross_entropy", "log_softmax", "LogSoftmax", "nll_loss", "NllLoss")),
    (MLP, ("grouped_mm", "GroupedMm", "silu", "Silu")),
)
_PRODUCTS = ("aten::mm", "aten::addmm", "aten::linear", "aten::matmul", "aten::bmm", "aten::baddbmm")
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_FULL, _LIGHT = "█", "▒"
_WIDTH = 40


@dataclass(frozen=True)
class Sizes:
    """What tells the matrices of a model apart."""

    vocab: int = 0
    mlp: frozenset[int] = frozenset()  # widths that only the MLP, the router or the experts have
    tokens: int = 0  # of a microbatch
    routed: int = 0  # rows that its experts get

    @classmethod
    def of(cls, model: ModelConfig, tokens: int) -> Sizes:
        mlp = frozenset({model.ffn, model.experts} - {0, model.dim, model.q_dim, model.kv_dim})
        return cls(model.vocab, mlp, tokens, tokens * model.experts_per_token)


@dataclass(frozen=True)
class Breakdown:
    """Seconds of each part: (forward, backward). What is neither counts as forward."""

    parts: dict[str, tuple[float, float]]

    @property
    def span(self) -> float:
        return sum(map(sum, self.parts.values()))

    def per_update(self, updates: int, seconds: float | None = None) -> Breakdown:
        """Of one update. `seconds`: what one takes unrecorded; recording slows the host, never the kernels."""
        parts = {name: (there / updates, back / updates) for name, (there, back) in self.parts.items()}
        if seconds is not None:
            busy = sum(sum(both) for name, both in parts.items() if name != IDLE)
            parts[IDLE] = (max(0.0, seconds - busy), 0.0)
        return Breakdown(parts)

    def lines(self) -> list[str]:
        """A bar for each part, the longest that there is `_WIDTH` wide."""
        longest = max(map(sum, self.parts.values()), default=0.0) or 1.0
        span = self.span or 1.0
        found = [f"{'ms per update':26} forward backward  share"]
        for name, (there, back) in self.parts.items():
            full, both = (round(_WIDTH * value / longest) for value in (there, there + back))
            bar = _FULL * full + _LIGHT * (both - full)
            times = f"{there * 1e3:7.1f} {back * 1e3:8.1f}" if back else f"{there * 1e3:7.1f} {'':8}"
            found.append(f"{name:26} {times} {(there + back) / span:5.1%}  {bar}".rstrip())
        return [*found, f"{'all':26} {self.span * 1e3:7.1f} ms   {_FULL} forward  {_LIGHT} backward"]


@dataclass(eq=False)
class Operation:
    name: str
    start: float
    end: float
    shapes: list[list[int]]
    parent: Operation | None = None
    inner: float = 0.0  # time in operations that this one called

    def around(self) -> Iterator[Operation]:
        operation: Operation | None = self
        while operation is not None:
            yield operation
            operation = operation.parent


def breakdown(trace: Mapping[str, Any], sizes: Sizes) -> Breakdown:
    """Of everything that was recorded."""
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    threads, launches = operations(events)
    kernels = [e for e in events if e.get("cat") in ON_DEVICE]
    seconds = {part: [0.0, 0.0] for part in PARTS}

    def count(name: str, operation: Operation | None, microseconds: float) -> None:
        around = list(operation.around()) if operation is not None else []
        backward = any(each.name.startswith("autograd::engine") for each in around)
        part = _part(name, around, sizes)
        seconds[part][backward and part != OPTIMIZER] += microseconds / 1e6

    if kernels:
        begin, end = min(e["ts"] for e in kernels), max(e["ts"] + e["dur"] for e in kernels)
        for event, own in _alone(kernels):
            count(event["name"], launches.get(event.get("args", {}).get("correlation")), own)
    else:
        busiest = busiest_thread(threads)
        begin, end = (min(o.start for o in busiest), max(o.end for o in busiest)) if busiest else (0.0, 0.0)
        for operation in busiest:
            count("", operation, operation.end - operation.start - operation.inner)
    seconds[IDLE][0] = max(0.0, (end - begin) / 1e6 - sum(map(sum, seconds.values())))
    shown = {
        part: (there, back) for part, (there, back) in seconds.items() if part != RECORDED or there + back
    }
    return Breakdown(shown)


def operations(events: Sequence[Mapping[str, Any]]) -> tuple[list[list[Operation]], dict[int, Operation]]:
    """The operations of each thread, each with what is around it, and the operation behind each launch."""
    by_thread: dict[Any, list[Mapping[str, Any]]] = {}
    for event in events:
        if event.get("cat") in ("cpu_op", "user_annotation", "cuda_runtime", "cuda_driver"):
            by_thread.setdefault((event["pid"], event["tid"]), []).append(event)
    threads, launches = [], {}
    for own in by_thread.values():
        found, inside = [], None
        for event in sorted(own, key=lambda e: (e["ts"], -e["dur"])):
            while inside is not None and inside.end <= event["ts"]:
                inside = inside.parent
            arguments, start, end = event.get("args", {}), event["ts"], event["ts"] + event["dur"]
            if event["cat"].startswith("cuda"):
                if event["name"] == _GRAPH:
                    launches[arguments.get("correlation")] = Operation(_GRAPH, start, end, [], inside)
                elif inside is not None:
                    launches[arguments.get("correlation")] = inside
                continue
            shapes = list(_shapes(arguments.get("Input Dims", [])))
            operation = Operation(event["name"], start, end, shapes, inside)
            if inside is not None:
                inside.inner += end - start
            found.append(operation)
            inside = operation
        threads.append(found)
    return threads, launches


def _shapes(given: Any) -> Iterator[list[int]]:
    """Those of tensors; an argument may be a list of them."""
    if isinstance(given, list) and given:
        if all(isinstance(size, int) for size in given):
            yield given
        else:
            yield from chain.from_iterable(map(_shapes, given))


def busiest_thread(threads: Sequence[list[Operation]]) -> list[Operation]:
    def busy(thread: list[Operation]) -> float:
        return sum(operation.end - operation.start for operation in thread if operation.parent is None)

    return max(threads, key=busy, default=[])


def _alone(kernels: Sequence[Mapping[str, Any]]) -> Iterator[tuple[Mapping[str, Any], float]]:
    """Each kernel with the time that no other counts: communication last."""
    taken: list[tuple[float, float]] = []
    for communicates in (False, True):
        merged: list[tuple[float, float]] = []
        own = [e for e in kernels if (_by_name(e["name"]) == COMMUNICATION) is communicates]
        for event in sorted(own, key=lambda e: e["ts"]):
            start, end = event["ts"], event["ts"] + event["dur"]
            start = max(start, merged[-1][1]) if merged else start
            if end > start:
                merged.append((start, end))
            yield event, max(0.0, end - start - _covered(start, end, taken))
        taken = merged


def _covered(start: float, end: float, taken: Sequence[tuple[float, float]]) -> float:
    """How much of a stretch lies in `taken`, which is in order and does not overlap."""
    covered = 0.0
    for a, b in taken[bisect(taken, start, key=lambda stretch: stretch[1]) :]:
        if a >= end:
            break
        covered += min(end, b) - max(start, a)
    return covered


@cache
def _by_name(name: str) -> str | None:
    return next((part for part, words in _BY_NAME if any(word in name for word in words)), None)


def _part(kernel: str, around: Sequence[Operation], sizes: Sizes) -> str:
    known = {_by_name(name) for name in (kernel, *(operation.name for operation in around))}
    for part, _ in _BY_NAME:
        if part in known:
            return part
    if around and around[0].name == _GRAPH:
        return RECORDED
    for operation in around:
        if operation.name in _PRODUCTS and (weight := _weight(operation, sizes.tokens)):
            return HEAD if sizes.vocab in weight else MLP if sizes.mlp & weight else PRODUCTS
    for operation in around:
        if sizes.routed and any(sizes.routed in shape for shape in operation.shapes):
            return MLP
        if last := {shape[-1] for shape in operation.shapes if len(shape) > 1}:
            return HEAD if sizes.vocab in last else MLP if sizes.mlp & last else NORMS
    return NORMS


def _weight(product: Operation, tokens: int) -> set[int]:
    """The sides of the matrix that is no list of tokens: [N, i] [i, o], [N, o] [o, i] or [o, N] [N, i]."""
    one, other, *_ = [*product.shapes["add" in product.name :], [], []]
    if len(one) != 2 or len(other) != 2 or product.name == "aten::linear":
        return set(other[-2:])
    sides = [one[0], one[1], other[1]]
    if tokens in sides:
        sides.remove(tokens)
    return set(sides)
