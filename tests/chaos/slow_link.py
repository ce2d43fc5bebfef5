"""Two stages on two sides of a slow line: how much of the line does depth hide? Needs root (`chaos.network`).

    python -m chaos.slow_link --delay 0.05 --cutover 16 --in-flight 8

Stages sleep instead of computing, 10 ms a forward and 20 ms a backward, so other work on the machine matters little.
The bound of an update is 30 ms for each microbatch. Printed: the mean of the updates after the first ones.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import warm
from chaos.cases import make_data
from chaos.network import Line

FORWARD_SECONDS, BACKWARD_SECONDS = 0.010, 0.020
MICROBATCHES, STEPS, SETTLED = 16, 14, 6
SETTINGS = [
    "model.module=chaos.slow_link:layers", "model.vocab=64", "data.sequence=8", f"pipeline.microbatches={MICROBATCHES}",
    "pipeline.microbatch_size=1", "pipeline.stages=2", f"train.steps={STEPS}", "train.eval_every=0", "train.device=cpu",
    "train.report=false", "checkpoint.keep=0", "optim.name=adamw", "train.timeout_seconds=120", "health.hash_every=0",
]  # fmt: skip


class Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        time.sleep(FORWARD_SECONDS)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        time.sleep(BACKWARD_SECONDS)
        return gradient


class Slow(nn.Module):
    def __init__(self, inner: nn.Module, width: int) -> None:
        super().__init__()
        self.inner, self.mix = inner, nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return Sleep.apply(self.mix(self.inner(x)))


def layers(vocab: int) -> list[nn.Module]:
    return [Slow(nn.Embedding(vocab, 8), 8), Slow(nn.Linear(8, vocab), vocab)]


def update_seconds(folder: Path, line: Line, settings: list[str]) -> float:
    """Train there, one stage on each side of the line."""
    ranks = []
    for rank, namespace in enumerate(line.names):
        environment = {
            "RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "MASTER_ADDR": line.addresses[0],
            "MASTER_PORT": 29400, "GLOO_SOCKET_IFNAME": line.interface, "SLIPSTREAM_MACHINE": rank,
        }  # fmt: skip
        spec = {
            "kind": "none", "ranks": [], "place": str(folder), "pause_seconds": 0, "rank": rank, "namespace": namespace,
            "environment": {key: str(value) for key, value in environment.items()}, "arguments": settings,
        }  # fmt: skip
        path = folder / f"spec-{rank}.json"
        path.write_text(json.dumps(spec))
        words = [sys.executable, "-m", "chaos.process", str(path)]
        ranks.append(warm.Popen(words, stdout=subprocess.DEVNULL, cwd=folder))
    if any(rank.wait(300) for rank in ranks):
        raise SystemExit("A rank failed.")
    lines = (folder / "run" / "events.jsonl").read_text().splitlines()
    times = [event["time"] for event in map(json.loads, lines) if event["event"] == "step"]
    return statistics.fmean(b - a for a, b in zip(times[SETTLED:], times[SETTLED + 1 :], strict=False))


def main() -> None:
    parser = argparse.ArgumentParser(description="Two stages on two sides of a slow line.")
    parser.add_argument("--delay", type=float, default=0.05, help="seconds, each way")
    parser.add_argument("--cutover", type=int, default=None)
    parser.add_argument("--in-flight", type=int, default=None)
    given = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as place, Line() as line:
        folder = Path(place)
        warm.use(tempfile.mkdtemp(dir=folder))
        make_data(folder / "data")
        settings = [*SETTINGS, f"run.dir={folder / 'run'}", f"data.path={folder / 'data'}"]
        settings += [f"pipeline.cutover={given.cutover}"] if given.cutover else []
        settings += [f"pipeline.in_flight={given.in_flight}"] if given.in_flight else []
        line.delay_seconds = given.delay
        seconds = update_seconds(folder, line, settings)
        warm.close()
    bound = MICROBATCHES * (FORWARD_SECONDS + BACKWARD_SECONDS)
    print(f"{seconds:.3f} s an update, {bound / seconds:.2f} of the bound; load {os.getloadavg()[0]:.0f}")


if __name__ == "__main__":
    main()
