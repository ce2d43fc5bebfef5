"""What a master in halves costs in time: one stage in one process, the same updates with it and with a plain one.

    python studies/halves.py OUT.jsonl [--models smollm2-360m,smollm2-1.7b] [--turns 6]

A line of OUT is a model: milliseconds of an update in each turn, both ways, and the ratio of their medians. Muon, error
feedback, clipping, half of a group old. Without a GPU it is only tried out, on a tiny model.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage

from slipstream import Schedule2BW
from slipstream.models.loss import TokenLoss, with_group_count
from slipstream.models.sizes import PRESETS, ModelConfig, preset
from slipstream.models.stages import build_stage
from slipstream.optim import build

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if ON_GPU else torch.device("cpu")
MICROBATCHES, SEQUENCE = (8, 1024) if ON_GPU else (4, 4)
ROWS = (
    {"smollm2-360m": 24, "smollm2-1.7b": 8} if ON_GPU else {}
)  # so many that the GPU is never waiting for the host
UPDATES = 3  # of a turn


def shape(model: str) -> ModelConfig:
    config = preset(model)
    return config if ON_GPU else replace(config, dim=16, layers=1, heads=1, kv_heads=1, ffn=16, vocab=64)


def schedule_of(config: ModelConfig, compact: bool) -> Schedule2BW:
    module = build_stage(config, 0, config.layers, embedding=True, head=True, seed=0, device=DEVICE)
    return Schedule2BW(
        PipelineStage(module, 0, 1, DEVICE, group=dist.group.WORLD), MICROBATCHES, TokenLoss(shares=MICROBATCHES),
        lambda master: build("muon", master, lr=1e-3), "error_feedback", 1.0, cutover=MICROBATCHES // 2,
        bank_dtype=torch.bfloat16, scale_grads=False, compact_master=compact,
    )  # fmt: skip


def turn(schedule: Schedule2BW, inputs: torch.Tensor, targets: torch.Tensor) -> float:
    """Seconds of an update."""
    if ON_GPU:
        torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(UPDATES):
        schedule.step(inputs, target=targets, return_outputs=False)
    schedule.drain()
    if ON_GPU:
        torch.cuda.synchronize()
    return (time.perf_counter() - began) / UPDATES


def measure(model: str, turns: int) -> dict:
    config = shape(model)
    tokens = torch.randint(config.vocab, (MICROBATCHES * ROWS.get(model, 1), SEQUENCE + 1), device=DEVICE)
    batch = tokens[:, :-1].contiguous(), with_group_count(tokens[:, 1:].contiguous())
    took: dict[str, list[float]] = {"halves": [], "plain": []}
    with schedule_of(config, True) as halves, schedule_of(config, False) as plain:
        ways = {"halves": halves, "plain": plain}
        for number in range(turns + 1):
            for name in sorted(ways, reverse=number % 2 == 1):
                seconds = turn(ways[name], *batch)
                if number:  # the first turn compiles kernels
                    took[name].append(seconds)
    medians = {name: statistics.median(seconds) for name, seconds in took.items()}
    shown = {name: [round(1000 * second, 2) for second in seconds] for name, seconds in took.items()}
    return {"model": model, **shown, "ratio": round(medians["halves"] / medians["plain"], 4)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--models", default="smollm2-360m,smollm2-1.7b")
    parser.add_argument("--turns", type=int, default=6)
    given = parser.parse_args()
    if unknown := set(given.models.split(",")) - set(PRESETS):
        parser.error(f"--models: {', '.join(sorted(unknown))} is none of {', '.join(PRESETS)}")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with given.out.open("a") as file:
        for model in given.models.split(","):
            line = json.dumps(measure(model, given.turns))
            print(line, flush=True)
            file.write(line + "\n")
            file.flush()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
