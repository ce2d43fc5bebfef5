"""What delay does to the hidden matrices: trains AdamW and Muon in three modes and compares singular values.

    python studies/spectra.py OUT [KEY=VALUE ...]

The runs are those of studies/cpu-optimizers.toml (about a minute each on one core); runs in OUT that have finished are
not made again. Prints a Markdown table and writes OUT/spectra.csv: one line for each run, step and matrix.

    stable rank = (sum of squared singular values) / (largest squared): how many directions share the matrix
"""

from __future__ import annotations

import csv
import subprocess
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from statistics import fmean, geometric_mean
from typing import NamedTuple

import torch
from safetensors import safe_open

OPTIMIZERS = {"adamw": 1e-3, "muon": 8e-3}  # with the rates that cpu-optimizers chose
MODES = {
    "sync": ["pipeline.delay=0"],
    "delay": ["optim.correction=none"],
    "ef": ["optim.correction=error_feedback"],
}
SEEDS = (0, 1, 2)
STEPS = (100, 600)
WHAT = {"norm": "norm", "largest singular value": "largest", "stable rank": "stable_rank"}
BASE = [
    "model.preset=cpu-default",
    "data.sequence=64",
    "pipeline.schedule=emulate",
    "pipeline.microbatches=1",
    "pipeline.microbatch_size=4",
    "optim.weight_decay=0.1",
    "optim.warmup=0.1",
    "optim.floor=0.1",
    "train.steps=600",
    "train.device=cpu",
    "train.eval_every=50",
    "train.eval_batches=64",
    "train.sample_tokens=0",
    "checkpoint.every=100",
    "checkpoint.keep=6",
]


class Row(NamedTuple):
    optimizer: str
    mode: str
    seed: int
    step: int
    matrix: str
    norm: float
    largest: float
    stable_rank: float


def main(out: Path, overrides: list[str]) -> None:
    rows: list[Row] = []
    for optimizer, mode, seed in product(OPTIMIZERS, MODES, SEEDS):
        folder = out / f"{optimizer}-{mode}-{seed}"
        own = [
            f"optim.name={optimizer}",
            f"optim.lr={OPTIMIZERS[optimizer]}",
            f"train.seed={seed}",
            *MODES[mode],
        ]
        command = [sys.executable, "-m", "slipstream", "train", *BASE, *own, f"run.dir={folder}", *overrides]
        subprocess.run(command, check=True, stdout=sys.stderr)
        rows += [
            Row(optimizer, mode, seed, step, *values) for step in STEPS for values in spectra(folder, step)
        ]
    with (out / "spectra.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(Row._fields)
        writer.writerows([*row[:5], *(f"{value:.4g}" for value in row[5:])] for row in rows)
    print(table(rows))


def spectra(folder: Path, step: int) -> Iterator[tuple[str, float, float, float]]:
    """Name, norm, largest singular value and stable rank of every hidden matrix of the master."""
    file = folder / "checkpoints" / f"step-{step:08d}" / "stage-000.safetensors"
    with safe_open(file, framework="pt") as tensors:
        for name in sorted(tensors.keys()):
            if not name.startswith("master/layers.") or len(tensors.get_slice(name).get_shape()) != 2:
                continue
            values = torch.linalg.svdvals(tensors.get_tensor(name).float())
            square = values.square().sum()
            yield (
                name.removeprefix("master/"),
                float(square.sqrt()),
                float(values[0]),
                float(square / values[0] ** 2),
            )


def table(rows: list[Row]) -> str:
    """Geometric means over the matrices, of the mean over the seeds."""
    header = ["optimizer", "mode", *(f"{what}, update {step}" for step in STEPS for what in WHAT)]
    lines = [header, ["---"] * len(header)]
    for optimizer, mode in product(OPTIMIZERS, MODES):
        cells = [optimizer, mode]
        for step, what in product(STEPS, WHAT.values()):
            seeds = [
                geometric_mean(getattr(row, what) for row in rows if row[:4] == (optimizer, mode, seed, step))
                for seed in SEEDS
            ]
            cells.append(f"{fmean(seeds):.2f} ({min(seeds):.2f} to {max(seeds):.2f})")
        lines.append(cells)
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    if len(sys.argv) < 2 or "=" in sys.argv[1] or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    main(Path(sys.argv[1]), sys.argv[2:])
