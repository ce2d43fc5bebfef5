"""What an optimizer step costs, ours against torch's and pytorch-optimizer's, and what error feedback adds.

Two tables. *Steps*: one step over the hidden matrices of a preset, gradients given, every contender once per
round in a rotating order. *Corrections*: a whole training step (forward, backward, update, publish) without
correction and with error feedback, in the same way, and the bytes that live on after the step under each.
A contender that cannot run is listed with its error.
"""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable, Mapping
from functools import partial
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer

from slipstream.bench.checks import check_device
from slipstream.bench.sample import rotated, settle
from slipstream.errors import UserError
from slipstream.models.sizes import PRESETS, ModelConfig
from slipstream.models.stages import build_model
from slipstream.optim import build
from slipstream.optim.capped import CappedAdamW
from slipstream.optim.corrections import Publication, build_correction
from slipstream.optim.muon import Muon
from slipstream.pipeline.emulator import Emulator

OURS, TORCH, LIBRARY = "slipstream muon", "torch.optim.Muon", "pytorch-optimizer Muon"
CORRECTIONS = ("none", "error_feedback")


def run(
    as_json: bool = False, device: str | None = None, preset: str | None = None, rounds: int = 7
) -> dict[str, Any]:
    """Measure and print. Default: a GPU with smollm2-360m if there is one, else the CPU with cpu-default."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    preset = preset or ("smollm2-360m" if device.startswith("cuda") else "cpu-default")
    if preset not in PRESETS:
        raise UserError(f"There is no model preset {preset!r}. Presets: {', '.join(PRESETS)}.")
    check_device(device)
    if rounds < 1:
        raise UserError(f"--rounds {rounds}: a median needs 1 round or more.")
    result: dict[str, Any] = {
        "device": torch.cuda.get_device_name(device) if device.startswith("cuda") else "cpu",
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "preset": preset,
        "steps": measure_steps(PRESETS[preset], device, rounds),
        "corrections": measure_corrections(PRESETS[preset], device, rounds),
    }
    print(json.dumps(result, indent=2)) if as_json else _print(result)
    return result


def matrices(config: ModelConfig, device: str) -> list[nn.Parameter]:
    """The hidden matrices of a dense model of this shape, filled with noise; no model is built for it."""
    kv, query = config.kv_dim, config.heads * config.head_dim
    layer = [(query, config.dim), (kv, config.dim), (kv, config.dim), (config.dim, query)]
    layer += [(config.ffn, config.dim), (config.ffn, config.dim), (config.dim, config.ffn)]
    generator = torch.Generator(device).manual_seed(0)
    params = []
    for shape in layer * config.layers:
        params.append(nn.Parameter(torch.randn(shape, generator=generator, device=device) * 0.02))
        params[-1].grad = torch.randn(shape, generator=generator, device=device)
    return params


def _library_muon(params: list[nn.Parameter]) -> Optimizer:
    import pytorch_optimizer

    return pytorch_optimizer.Muon([{"params": params, "use_muon": True}], use_adjusted_lr=True)


def _capped(basis: str, params: list[nn.Parameter]) -> Optimizer:
    return CappedAdamW([{"params": params, "role": "matrices"}], cap=0.4, basis=basis, fused=True)


CONTENDERS: Mapping[str, Callable[[list[nn.Parameter]], Optimizer]] = {
    OURS: lambda params: Muon([{"params": params, "algorithm": "muon"}]),
    TORCH: lambda params: torch.optim.Muon(params, adjust_lr_fn="match_rms_adamw"),
    LIBRARY: _library_muon,
    **{f"adamw_capped, {basis}": partial(_capped, basis) for basis in ("qr", "cholesky")},
    "torch.optim.AdamW (fused)": lambda params: torch.optim.AdamW(params, fused=True),
}


def measure_steps(config: ModelConfig, device: str, rounds: int) -> dict[str, Any]:
    """Milliseconds of one step over the hidden matrices, for each contender; ratios against ours."""
    params = matrices(config, device)
    start = [parameter.detach().clone() for parameter in params]
    runs: dict[str, Callable[[], None]] = {}
    rows: dict[str, Any] = {}
    for name, make in CONTENDERS.items():
        try:
            optimizer = make(params)
            optimizer.step()
            runs[name] = optimizer.step
        except Exception as error:  # a rival that is missing or refuses must not end the benchmark
            rows[name] = {"error": f"{type(error).__name__}: {error}"}

    def restore() -> None:  # a rival may use the gradients as scratch, and weights must not run away
        generator = torch.Generator(device).manual_seed(1)
        for parameter, value in zip(params, start, strict=True):
            parameter.data.copy_(value)
            parameter.grad = torch.randn(value.shape, generator=generator, device=device)

    times = _rotate(runs, rounds, device, restore)
    for name, seconds in times.items():
        rows[name] = {"ms": median(seconds) * 1e3, "least_ms": min(seconds) * 1e3}
        rows[name]["times_ours"] = median(seconds) / median(times[OURS])
    return {"matrices": len(params), "elements": sum(p.numel() for p in params), "contenders": rows}


def measure_corrections(config: ModelConfig, device: str, rounds: int) -> dict[str, Any]:
    """A whole training step without correction and with error feedback: time, and bytes that stay."""
    on_gpu = device.startswith("cuda")
    microbatches, rows, sequence = (4, 4, 1024) if on_gpu else (4, 2, 128)
    generator = torch.Generator(device).manual_seed(0)
    tokens = torch.randint(
        config.vocab, (microbatches * rows, sequence + 1), generator=generator, device=device
    )
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def make(correction: str) -> tuple[Callable[[], None], int]:
        before = _live_bytes(device)
        emulator = Emulator(
            build_model(config, seed=0, device=device),
            microbatches,
            _loss,
            lambda master: build("muon", master),
            correction,
            bank_dtype=torch.bfloat16 if on_gpu else None,
        )

        def step() -> None:
            emulator.step(inputs, targets)
            emulator.drain()

        for _ in range(3):
            step()
        return step, _live_bytes(device) - before

    make("none")  # thrown away: whoever comes first would pay for the libraries' workspaces
    made = {name: make(name) for name in CORRECTIONS}
    times = _rotate({name: made[name][0] for name in CORRECTIONS}, rounds, device)
    plain = median(times["none"])
    ratios = [fed / bare for fed, bare in zip(times["error_feedback"], times["none"], strict=True)]
    publish = _publish_seconds(config, device, rounds)
    return {
        "tokens_per_step": microbatches * rows * sequence,
        "step_ms": {name: median(times[name]) * 1e3 for name in CORRECTIONS},
        "step_overhead": median(ratios) - 1,
        "publish_ms": {name: publish[name] * 1e3 for name in CORRECTIONS},
        "publish_overhead": (publish["error_feedback"] - publish["none"]) / plain,
        "lasting_bytes": {name: made[name][1] for name in CORRECTIONS},
        "error_feedback_lasting_bytes": made["error_feedback"][1] - made["none"][1],
    }


def _publish_seconds(config: ModelConfig, device: str, rounds: int) -> dict[str, float]:
    """Publishing alone, z_g kept as the engine keeps it: in the bank itself, or in a copy of the master."""
    new = [parameter.detach() for parameter in matrices(config, device)]
    bank_dtype = torch.bfloat16 if device.startswith("cuda") else new[0].dtype
    banks = [tensor.to(bank_dtype, copy=True) for tensor in new]
    unused = torch.optim.SGD([nn.Parameter(torch.zeros(1))])

    def publish(name: str) -> None:
        correction = build_correction(name)
        old: list[Tensor] | None = None
        if correction.needs_previous:
            old = [
                bank.copy_(z) if bank.dtype == z.dtype else z.clone()
                for bank, z in zip(banks, new, strict=True)
            ]
        correction.publish(Publication(banks, new, old, unused, [], 1))

    runs = {name: lambda name=name: publish(name) for name in CORRECTIONS}
    return {name: median(times) for name, times in _rotate(runs, rounds, device).items()}


def _loss(logits: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def _rotate(
    runs: Mapping[str, Callable[[], None]],
    rounds: int,
    device: str,
    between: Callable[[], None] = lambda: None,
) -> dict[str, list[float]]:
    """Seconds of each run in each round; the order rotates, so that none always follows the same other."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(rounds + 1):  # the first round warms up
        for name in rotated(list(runs), number):
            between()
            settle(torch.device(device))
            start = time.perf_counter()
            runs[name]()
            settle(torch.device(device))
            if number:
                times[name].append(time.perf_counter() - start)
    return times


def _live_bytes(device: str) -> int:
    """Bytes held: by the CUDA allocator, or on a CPU by every tensor alive."""
    gc.collect()
    if device.startswith("cuda"):
        settle(torch.device(device))
        return torch.cuda.memory_stats(device)["requested_bytes.all.current"]  # without rounding to blocks
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in gc.get_objects()
        if type(tensor) in (Tensor, nn.Parameter)  # isinstance would wake lazy objects
    }
    return sum(storages.values())


def _print(result: Mapping[str, Any]) -> None:
    console = Console(highlight=False)
    steps = result["steps"]
    title = f"one step over {steps['matrices']} matrices of {result['preset']}, {result['device']}"
    table = Table("optimizer", "ms", "least ms", "times ours", title=title)
    for name, row in steps["contenders"].items():
        if "error" in row:
            table.add_row(name, row["error"], "", "")
        else:
            table.add_row(name, f"{row['ms']:.2f}", f"{row['least_ms']:.2f}", f"{row['times_ours']:.2f}")
    console.print(table)
    corrections = result["corrections"]
    console.print(
        f"training step: {corrections['step_ms']['none']:.2f} ms, with error feedback "
        f"{corrections['step_ms']['error_feedback']:.2f} ms ({corrections['step_overhead']:+.1%}; "
        f"publishing {corrections['publish_overhead']:+.1%}); "
        f"lasting memory {corrections['error_feedback_lasting_bytes']:+d} bytes"
    )
