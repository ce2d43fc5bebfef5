"""What makes a stage faster: every candidate on every shape, in turns in one process, beside compiled rivals.

    python studies/stage_speed.py OUT.jsonl --seconds 1500 [--shapes 360m-1024,moe] [--candidates base,cudnn] [--tiny]

A line of OUT is one measurement: tokens/s, MFU, peak memory, seconds of each part of an update (forward, backward) and
their shares, the kernels that take longest and the gaps between kernels (`metrics/kernels.py`), or the error of a
candidate that failed; the others go on. The first turn measures everything once, the base first; further turns, as long
as the time lasts, show how far to trust the first. Each is `slipstream bench train` without a process of its own: one
update is recorded after the timed ones. An update has as many tokens as such models are trained with. Weights are drawn
on the device, which is quicker and another draw than a run's. `--tiny` rehearses all of it on a CPU.
"""

from __future__ import annotations

import argparse
import json
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

from slipstream.bench import optim, train, train_contenders
from slipstream.bench.train_contenders import Setting
from slipstream.models.sizes import PRESETS, ModelConfig

SHAPES: dict[str, Setting] = {
    "360m-1024": Setting("smollm2-360m", 1024, microbatches=16, rows=32, steps=2, warmup=2, profile=1),
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


@dataclass(frozen=True)
class Candidate:
    overrides: tuple[str, ...] = ()
    rows: int = 1  # times as many sequences in a microbatch, and as many fewer microbatches
    blas: str = "default"


CUDNN, CHUNKED, STAGE = "train.attention=cudnn", "train.chunked_loss=true", "train.compile=stage"
NARROW_SUMS, GRAPHS = "train.gradient_dtype=bfloat16", "train.cuda_graphs=true"
FP8, FP8_BY_ROW = "train.fp8=tensorwise", "train.fp8=rowwise"
ON_A_GPU = {
    STAGE,
    NARROW_SUMS,
    GRAPHS,
    FP8,
    FP8_BY_ROW,
}  # the first is for a CPU too, but no rehearsal: it compiles
CANDIDATES = {
    "base": Candidate(),
    "cudnn": Candidate((CUDNN,)),
    "flash": Candidate(("train.attention=flash",)),
    "chunked_loss": Candidate((CHUNKED,)),
    "chunked_loss_rows_x2": Candidate((CHUNKED,), rows=2),
    "bf16_sums": Candidate((NARROW_SUMS,)),
    "bf16_momentum": Candidate(("optim.options.state_dtype=bfloat16",)),
    "cublaslt": Candidate(blas="cublaslt"),
    "cudnn_chunked_cublaslt": Candidate((CUDNN, CHUNKED), blas="cublaslt"),
    "stage": Candidate((STAGE,)),
    "stage_cudnn_chunked": Candidate((STAGE, CUDNN, CHUNKED)),
    "fp8": Candidate((FP8,)),
    "fp8_rowwise": Candidate((FP8_BY_ROW,)),
    "graphs": Candidate((GRAPHS,)),  # seven updates before anything is timed
}
RIVALS, STEPS = ("hf_compiled", "titan_compiled"), "optimizer_steps"


_INITIALISE = "slipstream.models.stages.initialise"


def setting_of(shape: Setting, candidate: Candidate) -> Setting:
    return replace(
        shape,
        rows=shape.rows * candidate.rows,
        microbatches=shape.microbatches // candidate.rows,
        overrides=(*shape.overrides, *candidate.overrides, "train.quiet=true"),
    )


def measured(shape: Setting, name: str) -> dict[str, Any]:
    """One measurement of `slipstream bench train`, in this process."""
    with tempfile.TemporaryDirectory(prefix="stage-speed-") as folder, mock.patch(_INITIALISE, quickly):
        data = Path(folder) / "data"
        train.write_tokens(data, shape)
        if name in RIVALS:
            setting = replace(shape, rival_rows=max(1, shape.rows // 2))
            found = train_contenders.measure_rival(name, setting, data, rehearsed=not shape.compiled)
        else:
            setting = setting_of(shape, CANDIDATES[name])
            with blas(CANDIDATES[name].blas if shape.device == "cuda" else "default"):
                found = train_contenders.measure_ours(setting, data, Path(folder), delayed=True)
    spans = {part: sum(both) for part, both in (found.parts or {}).items()}
    shares = {part: seconds / (sum(spans.values()) or 1.0) for part, seconds in spans.items()}
    return asdict(found) | train.speed(setting, found.step_seconds) | {"shares": shares}


@torch.no_grad()
def quickly(stage: nn.Module, config: ModelConfig, seed: int) -> None:
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
    todo = jobs(shapes, names)
    with out.open("a") as file:
        for turn in count() if turns is None else range(turns):
            done = 0
            for (shape, name), job in todo.items():
                left = seconds - (time.perf_counter() - began)
                if left < took.get((shape, name), 1.0):
                    continue
                start = time.perf_counter()
                row = attempt(job, left)
                took[shape, name], done = time.perf_counter() - start, done + 1
                head = {"shape": shape, "candidate": name, "turn": turn, "took_seconds": took[shape, name]}
                print(json.dumps(head | row), file=file, flush=True)
                said = (
                    row.get("error")
                    or f"{row.get('tokens_per_second', 0):,.0f} tokens/s, MFU {row.get('mfu')}"
                )
                print(f"{seconds - left:6.0f} s  {shape:10} {name:24} {said}", flush=True)
            if not done:
                return


def all_names(tiny: bool) -> list[str]:
    """Everything there is to measure; of a rehearsal, what a CPU can do in seconds."""
    names = [name for name, one in CANDIDATES.items() if not (tiny and ON_A_GPU & set(one.overrides))]
    return ["base", *RIVALS, STEPS, *names[1:]]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=1500.0)
    parser.add_argument("--shapes", default="")
    parser.add_argument("--candidates", default="")
    parser.add_argument("--turns", type=int)
    parser.add_argument("--tiny", action="store_true", help="a rehearsal on a CPU, nothing compiled")
    given = parser.parse_args()
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
