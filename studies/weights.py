"""Do fresh microbatches deserve more weight than old ones?

    python studies/weights.py OUT [--seeds 0,1,2] [--weights 1,0.5,0]

Half of each update is old (c = m/2). Its gradients get the weight given, and the fresh half 2 minus that, so that the
rate keeps its meaning: 1 is the plain mean, 0 trains on the fresh half alone. Everything else is `cpu-cutover`'s
"ef 1/2" (the 1M-parameter default model, batches of 1,024 tokens, 600 updates). A run takes two to three minutes on a
core; OUT/weights.jsonl has a line for each, and what it holds is not run again.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from slipstream.config import load, resolve
from slipstream.data.tokens import Prefetch
from slipstream.train import batches
from slipstream.train.session import run_rank
from slipstream.train.sources import Dataset

MICROBATCHES, OLD = 16, 8
SETTINGS = [
    "model.preset=cpu-default", "data.sequence=64", "optim.name=muon", "optim.lr=12e-3", "optim.weight_decay=0.1",
    "optim.schedule=cosine", "optim.warmup=0.1", "optim.floor=0.1", "optim.max_grad_norm=1.0",
    "optim.correction=error_feedback", "pipeline.schedule=emulate", f"pipeline.microbatches={MICROBATCHES}",
    "pipeline.microbatch_size=1", f"pipeline.cutover={OLD}", "train.fuse=true", "train.steps=600", "train.device=cpu",
    "train.eval_every=50", "train.eval_batches=64", "train.quiet=true", "checkpoint.keep=0",
]  # fmt: skip


def weighted(batch: batches.Batch, old: float) -> batches.Batch:
    """Rows of old microbatches count `old` times: a row's loss is divided by the count in its last column."""
    assert batch.targets is not None
    rows = batch.targets.shape[0] * OLD // MICROBATCHES
    for part, weight in ((batch.targets[:rows], old), (batch.targets[rows:], 2 - old)):
        part[:, -1] = (part[:, -1].double() / weight).round().long() if weight else NEVER
    return batch


NEVER = 1 << 60  # divided by it, a loss is nothing


def run(folder: Path, seed: int, old: float) -> dict[str, float]:
    def ahead(dataset: Dataset, share: batches.Share, start: int) -> Prefetch[batches.Batch]:
        return Prefetch(lambda group: weighted(batches.load(dataset, group, share), old), start)

    plain, batches.ahead = batches.ahead, ahead  # of training alone; validations load their own
    try:
        config = resolve(load(None, [*SETTINGS, f"train.seed={seed}", f"run.dir={folder}"]))
        outcome = run_rank(None, config.model_dump())
    finally:
        batches.ahead = plain
    return {"seed": seed, "old": old, "loss": outcome["validation_loss"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--weights", default="1,0.5,0")
    given = parser.parse_args()
    torch.set_num_threads(1)
    given.out.mkdir(parents=True, exist_ok=True)
    lines = given.out / "weights.jsonl"
    known = [json.loads(line) for line in lines.read_text().splitlines()] if lines.exists() else []
    done = {(line["seed"], line["old"]) for line in known}
    for seed in map(int, given.seeds.split(",")):
        for old in map(float, given.weights.split(",")):
            if (seed, old) in done:
                continue
            found = run(given.out / f"seed-{seed}-old-{old:g}", seed, old)
            print(found, flush=True)
            with lines.open("a") as file:
                file.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
