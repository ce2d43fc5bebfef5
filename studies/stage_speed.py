"""What makes a stage faster: every candidate on every shape, in turns in one process, beside compiled rivals.

    python studies/stage_speed.py OUT.jsonl --seconds 1500 [--shapes 360m-1024,moe] [--candidates base,cudnn] [--tiny]

A line of OUT is one measurement: tokens/s, MFU, the last loss, peak memory, seconds of each part of an update (forward,
backward) and their shares, the kernels that take longest and the gaps between kernels (`metrics/kernels.py`), or the
error of a candidate that failed; the others go on. The first turn measures everything once, the base first and again at
the end (`base_last`: how far the device drifted; its time is kept free); further turns, as long as the time lasts, show
how far to trust the first. The last line printed compares all with the base. Each is `slipstream bench train` without a
process of its own: one update is recorded after the timed ones. An update has as many tokens as such models are trained
with. Weights are drawn on the device, which is quicker and another draw than a run's, the same for all candidates: so a
loss that differs by more than rounding tells of code that is wrong. Candidates joined by + are measured together.
`--tiny` rehearses all of it on a CPU.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import reduce
from itertools import count
from pathlib import Path
from statistics import mean
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slipstream.bench import optim, train, train_contenders
from slipstream.bench.train_contenders import Setting
from slipstream.metrics.record import events_of
from slipstream.models.sizes import PRESETS, ModelConfig

SHAPES: dict[str, Setting] = {
    "360m-1024": Setting("smollm2-360m", 1024, microbatches=16, rows=32, steps=2, warmup=2, profile=1),
    # A quarter of the layers, for many candidates in little time: compiled by layer, as all of them are.
    "360m-8-layers": Setting(
        "smollm2-360m",
        1024,
        microbatches=16,
        rows=32,
        steps=4,
        warmup=2,
        profile=1,
        overrides=("model.layers=8", "train.compile=layers"),
    ),
    "360m-2048": Setting("smollm2-360m", 2048, microbatches=16, rows=16, steps=2, warmup=2, profile=1),
    "1.7b": Setting("smollm2-1.7b", 2048, microbatches=16, rows=8, steps=2, warmup=1, profile=1),
    # Six layers of the 10B mixture: 2.7B parameters, 0.5B of them active, as many as one device trains.
    "moe": Setting(
        "moe-10b", 2048, microbatches=16, rows=8, steps=3, warmup=2, profile=1, overrides=("model.layers=6",)
    ),
}
_TINY = Setting(
    "cpu-default", 16, microbatches=2, rows=2, device="cpu", compiled=False, steps=1, warmup=1, profile=1
)
TINY = {
    "dense": _TINY,
    "moe": replace(_TINY, model="moe-94m", overrides=("model.layers=1", "model.dim=64", "model.ffn=64")),
}


Values = tuple[tuple[str, Any], ...]  # by full name


@dataclass(frozen=True)
class Candidate:
    """What is set for one measurement. What only stands here is in no config: nobody has measured it yet."""

    overrides: tuple[str, ...] = ()
    rows: int = 1  # times as many sequences in a microbatch, and as many fewer microbatches
    blas: str = "default"
    constants: Values = ()  # of the package
    inductor: Values = ()  # torch's compiler
    flash4: bool = False  # FlashAttention 4 in the place of torch's own (`flash-attn-4`)
    environment: tuple[tuple[str, str], ...] = ()  # read once by a process, so it gets one of its own

    def __add__(self, other: Candidate) -> Candidate:
        return Candidate(
            self.overrides + other.overrides,
            self.rows * other.rows,
            other.blas if self.blas == "default" else self.blas,
            self.constants + other.constants,
            self.inductor + other.inductor,
            self.flash4 or other.flash4,
            self.environment + other.environment,
        )


def mlp_by_quack(mlp: Any, x: Tensor) -> Tensor:
    """SwiGLU inside the products (`quack-kernels`), its gradient too; gate and up are one product."""
    from quack.mlp import mlp_func

    first = torch.cat((mlp.gate.weight, mlp.up.weight))
    return mlp_func(x, first, mlp.down.weight, "swiglu", tuned=False, concat_layout=True)


def mlp_of_two_products(mlp: Any, x: Tensor) -> Tensor:
    """gate and up as one; so the gradient of x is one too."""
    gate, up = F.linear(x, torch.cat((mlp.gate.weight, mlp.up.weight))).chunk(2, dim=-1)
    return mlp.down(F.silu(gate) * up)


CUDNN, CHUNKED, STAGE = "train.attention=cudnn", "train.chunked_loss=true", "train.compile=stage"
NARROW_SUMS, GRAPHS = "train.gradient_dtype=bfloat16", "train.cuda_graphs=true"
FP8, FP8_BY_ROW = "train.fp8=tensorwise", "train.fp8=rowwise"
# The first is for a CPU too, but no rehearsal: it compiles.
ON_A_GPU = {STAGE, NARROW_SUMS, GRAPHS, FP8, FP8_BY_ROW, "quack", "flash4"}
APART = ("slipstream.models.llama.Attention._can_join", lambda _: False)  # q, k and v as three products
ONLINE = ("slipstream.models.loss.ONLINE_LSE", True)
GATE_UP = ("slipstream.models.llama.MLP.forward", mlp_of_two_products)
QUACK = ("slipstream.models.llama.MLP.forward", mlp_by_quack)
LARGE = ("slipstream.models.loss._HEAD_VALUES", 1 << 30)  # 2 GiB of logits and as much of their gradient
# Products are chosen by timing, so never in a run that is to repeat its bits.
PRODUCTS = (("max_autotune_gemm", True), ("triton.enable_persistent_tma_matmul", True))
DESCENT = ("coordinate_descent_tuning", True)
CANDIDATES = {
    "base": Candidate(),
    "cudnn": Candidate((CUDNN,)),
    "flash": Candidate(("train.attention=flash",)),
    "apart": Candidate(constants=(APART,)),
    "online": Candidate(constants=(ONLINE,)),
    "gate_up": Candidate(constants=(GATE_UP,)),
    # Neither library is a dependency: `stage_libraries.py` measures their kernels one by one.
    "quack": Candidate(constants=(QUACK,)),
    "flash4": Candidate(("train.attention=flash",), flash4=True),
    "chunked_loss": Candidate((CHUNKED,)),
    "chunked_loss_large": Candidate((CHUNKED,), constants=(LARGE,)),
    "chunked_loss_rows_x2": Candidate((CHUNKED,), rows=2, constants=(LARGE,)),
    "bf16_sums": Candidate((NARROW_SUMS,)),
    "bf16_momentum": Candidate(("optim.options.state_dtype=bfloat16",)),
    "cublaslt": Candidate(blas="cublaslt"),
    "cudnn_chunked_cublaslt": Candidate((CUDNN, CHUNKED), blas="cublaslt"),
    # 128 MiB instead of 32; cuBLASLt gets no more than cuBLAS.
    "workspace": Candidate(
        environment=(("CUBLAS_WORKSPACE_CONFIG", ":131072:1"), ("CUBLASLT_WORKSPACE_SIZE", "131072"))
    ),
    # Its code of 2.11 waits for the kernel before it only where it reads what that one wrote: look at the loss.
    "pdl": Candidate(inductor=(("triton.enable_pdl", True),)),
    "norm_stages": Candidate(inductor=(("triton.mix_order_reduction_allow_multi_stages", True),)),
    "norm_split": Candidate(inductor=(("triton.mix_order_reduction_autotune_split_size", True),)),
    "stage": Candidate((STAGE,)),
    "stage_cudnn_chunked": Candidate((STAGE, CUDNN, CHUNKED)),
    "stage_chunked_x2": Candidate((STAGE, CHUNKED), rows=2, constants=(LARGE,)),
    "fp8": Candidate((FP8,)),
    "fp8_rowwise": Candidate((FP8_BY_ROW,)),
    "graphs": Candidate((GRAPHS,)),  # seven updates before anything is timed
    "descent": Candidate(inductor=(DESCENT,)),
    "autotune": Candidate(inductor=(*PRODUCTS, DESCENT)),  # minutes of compiling
    "base_last": Candidate(),
}
FIRST, LAST = "base", "base_last"
RIVALS, STEPS = ("hf_compiled", "titan_compiled"), "optimizer_steps"

_INITIALISE = "slipstream.models.stages.initialise"


def candidate_of(name: str) -> Candidate:
    return reduce(Candidate.__add__, (CANDIDATES[part] for part in name.split("+")))


def setting_of(shape: Setting, candidate: Candidate) -> Setting:
    return replace(
        shape,
        rows=shape.rows * candidate.rows,
        microbatches=shape.microbatches // candidate.rows,
        overrides=(*shape.overrides, *candidate.overrides, "train.quiet=true"),
    )


def measured(shape: Setting, name: str) -> dict[str, Any]:
    """One measurement of `slipstream bench train`, in this process or in one with the candidate's environment."""
    with tempfile.TemporaryDirectory(prefix="stage-speed-") as folder, mock.patch(_INITIALISE, quickly):
        data = Path(folder) / "data"
        loss = None
        if name in RIVALS:
            train.write_tokens(data, shape)
            setting = replace(shape, rival_rows=max(1, shape.rows // 2))
            found = train_contenders.measure_rival(name, setting, data, rehearsed=not shape.compiled)
        else:
            candidate = candidate_of(name)
            if any(os.environ.get(key) != value for key, value in candidate.environment):
                return in_a_process(shape, name, candidate)
            train.write_tokens(data, shape)
            setting = setting_of(shape, candidate)
            with under(candidate, shape.device):
                found = train_contenders.measure_ours(setting, data, Path(folder), delayed=True)
            loss = events_of(Path(folder) / "run", "step")[-1]["loss"]
    spans = {part: sum(both) for part, both in (found.parts or {}).items()}
    shares = {part: seconds / (sum(spans.values()) or 1.0) for part, seconds in spans.items()}
    return asdict(found) | train.speed(setting, found.step_seconds) | {"loss": loss, "shares": shares}


def in_a_process(shape: Setting, name: str, candidate: Candidate) -> dict[str, Any]:
    command = [sys.executable, __file__, "--only", json.dumps([asdict(shape), name])]
    environment = os.environ | dict(candidate.environment)
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise RuntimeError(ended.stderr.strip().splitlines()[-1:] or f"exit code {ended.returncode}")
    return json.loads(ended.stdout.splitlines()[-1])


@contextmanager
def under(candidate: Candidate, device: str) -> Iterator[None]:
    """What a candidate sets besides its config. The compiler reads its settings when it compiles, which is inside."""
    with ExitStack() as stack:
        for name, value in candidate.constants:
            stack.enter_context(mock.patch(name, value))
        if candidate.inductor:
            from torch._inductor import config

            stack.enter_context(config.patch(dict(candidate.inductor)))
        if candidate.flash4:
            stack.enter_context(flash4())
        stack.enter_context(blas(candidate.blas if device == "cuda" else "default"))
        yield


@contextmanager
def flash4() -> Iterator[None]:
    """torch knows it as one of its own kinds. Of torch 2.11 only the result and the sums are expected."""
    from torch.nn import attention

    interface = importlib.import_module("flash_attn.cute.interface")
    forward = interface._flash_attn_fwd

    @functools.wraps(forward)  # with what it keeps of compiled kernels, which it finds by this name
    def two_results(*args: Any, **rest: Any) -> Any:
        return forward(*args, **rest)[:2]

    with mock.patch.object(interface, "_flash_attn_fwd", two_results):
        attention.activate_flash_attention_impl("FA4")
        try:
            yield
        finally:
            attention.restore_flash_attention_impl()


@torch.no_grad()
def quickly(stage: nn.Module, config: ModelConfig, seed: int) -> None:
    torch.manual_seed(seed)
    for parameter in stage.parameters():
        parameter.fill_(1.0) if parameter.ndim == 1 else parameter.normal_(0.0, config.init_std)


@contextmanager
def blas(library: str) -> Iterator[None]:
    torch.backends.cuda.preferred_blas_library(library)
    try:
        yield
    finally:
        torch.backends.cuda.preferred_blas_library("default")


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """An error after so long, as soon as Python runs again."""

    def late(*_: object) -> None:
        raise TimeoutError(f"not done after {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def attempt(job: Callable[[], dict[str, Any]], seconds: float) -> dict[str, Any]:
    """What a job answers, or its error: whatever goes wrong with one candidate, the others are to be measured."""
    try:
        with at_most(seconds):
            return job()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"}
    finally:
        train_contenders.forget()


def jobs(shapes: dict[str, Setting], names: list[str]) -> dict[tuple[str, str], Callable[[], dict[str, Any]]]:
    """By shape and candidate, the candidates in their order and each on all shapes."""
    found: dict[tuple[str, str], Callable[[], dict[str, Any]]] = {}
    for name in names:
        for key, shape in shapes.items():
            dense = not PRESETS[shape.model].experts
            if name == STEPS and dense:
                found[shape.model, name] = lambda shape=shape: steps(shape.model, shape.device)
            elif name != STEPS and (dense or name not in RIVALS):
                found[key, name] = lambda shape=shape, name=name: measured(shape, name)
    return found


def steps(model: str, device: str) -> dict[str, Any]:
    """`slipstream bench optim`: one step over the hidden matrices, by optimizer."""
    return optim.measure_steps(PRESETS[model], device, rounds=3 if device == "cpu" else 7)


def run(
    out: Path, seconds: float, shapes: dict[str, Setting], names: list[str], turns: int | None = None
) -> None:
    began, took = time.perf_counter(), {}
    todo, speeds = jobs(shapes, names), {}
    with out.open("a") as file:
        for turn in count() if turns is None else range(turns):
            done = 0
            for (shape, name), job in todo.items():
                kept = LAST in names and name != LAST
                spare = sum(took.get((one, FIRST), 0.0) for one in shapes) if kept else 0.0
                left = seconds - spare - (time.perf_counter() - began)
                # What has not been measured yet may take what the base took, or longer.
                if left < took.get((shape, name), took.get((shape, FIRST), 1.0)):
                    continue
                start = time.perf_counter()
                row = attempt(job, left)
                took[shape, name], done = time.perf_counter() - start, done + 1
                head = {"shape": shape, "candidate": name, "turn": turn, "took_seconds": took[shape, name]}
                print(json.dumps(head | row), file=file, flush=True)
                speeds.setdefault((shape, name), []).append(row.get("tokens_per_second"))
                print(f"{start - began:6.0f} s  {shape:13} {name:24} {said(row)}", flush=True)
            if not done:
                break
    for shape in shapes:
        own = {name: found for (key, name), found in speeds.items() if key == shape}
        print(f"{shape}: {summary(own)}", flush=True)


def said(row: Mapping[str, Any]) -> str:
    if "error" in row:
        return row["error"]
    loss = "" if row.get("loss") is None else f", loss {row['loss']:.4f}"
    return f"{row.get('tokens_per_second', 0):,.0f} tokens/s, MFU {row.get('mfu')}{loss}"


def summary(speeds: Mapping[str, list[float | None]]) -> str:
    """All candidates of a shape against the mean of the base's measurements, the fastest first."""
    means = {
        name: mean(found) for name, own in speeds.items() if (found := [x for x in own if x is not None])
    }
    failed = [name for name, own in speeds.items() if None in own and name != STEPS]
    bases = [means[name] for name in (FIRST, LAST) if name in means]
    in_order = sorted(means, key=means.__getitem__, reverse=True)
    if bases:
        told = [f"{name} {means[name] / mean(bases) - 1:+.2%}" for name in in_order]
    else:
        told = [f"{name} {means[name]:,.0f} tokens/s" for name in in_order]
    return ", ".join([*told, *(f"{name} failed" for name in failed)]) or "nothing was measured"


def all_names(tiny: bool) -> list[str]:
    """Everything there is to measure; of a rehearsal, what a CPU can do in seconds."""
    names = [name for name, one in CANDIDATES.items() if not (tiny and ON_A_GPU & {name, *one.overrides})]
    return [FIRST, *RIVALS, STEPS, *names[1:]]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, nargs="?")
    parser.add_argument("--seconds", type=float, default=1500.0)
    parser.add_argument("--shapes", default="")
    parser.add_argument("--candidates", default="")
    parser.add_argument("--turns", type=int)
    parser.add_argument("--tiny", action="store_true", help="a rehearsal on a CPU, nothing compiled")
    parser.add_argument("--only", help=argparse.SUPPRESS)  # one measurement, printed: of a process of its own
    given = parser.parse_args()
    if given.only:
        setting, name = json.loads(given.only)
        print(json.dumps(measured(Setting(**setting | {"overrides": tuple(setting["overrides"])}), name)))
        return
    if given.out is None:
        parser.error("OUT: a file for the measurements")
    shapes = TINY if given.tiny else SHAPES
    names = all_names(given.tiny)
    chosen = {key: shapes[key] for key in given.shapes.split(",")} if given.shapes else shapes
    run(
        given.out,
        given.seconds,
        chosen,
        given.candidates.split(",") if given.candidates else names,
        given.turns,
    )


if __name__ == "__main__":
    main()
