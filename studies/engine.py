"""Does the engine's loss curve lie on the emulator's? The same runs through both, twice each.

    python studies/engine.py OUT [--stages 4] [--seeds 0,1,2] [--partitions] [--seconds 900] [KEY=VALUE ...]
    python studies/engine.py OUT --table

On a CPU they are equal to the bit, which the tests check. On a GPU sums come in another order, so that even two equal
runs differ: the engine's may differ from the emulator's by as much. With train.deterministic=true they should not.

With --partitions each stage has its share of one GPU, and the emulator as much: kernels are picked by how many
multiprocessors there are. That takes a CUDA MPS service which is running; all processes share it, so that they run
side by side. (pipeline.partitions=true starts one for each run, and the GPU turns from one service to the other.)

OUT/engine.jsonl has a line for each run, with the losses of its updates and its validations, and what made it: device,
text, versions, commit and fingerprint of the code, changed settings. What it holds is not run again. The emulator's
runs and the engine's wait for their own kind only.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Lock
from typing import Any

from slipstream.metrics.events import read_run
from slipstream.study.results import read_folder

# The 4M rung of ladder.toml at 5 tokens per parameter, in eight microbatches. At the rung's rate, four times this one,
# training is unstable while the rate rises, and drives any two runs apart (docs/notes/engine.md).
SETTINGS = [
    "model.preset=llama-8m", "model.dim=160", "model.layers=5", "model.heads=5", "model.kv_heads=5", "model.ffn=320",
    "data.sequence=512", "pipeline.microbatches=8", "pipeline.microbatch_size=8", "optim.name=muon", "optim.lr=2e-3",
    "optim.weight_decay=0.1", "optim.schedule=cosine", "optim.warmup=0.1", "optim.floor=0.1", "optim.max_grad_norm=1.0",
    "optim.correction=error_feedback", "train.dtype=bfloat16", "train.steps=595", "train.eval_every=35",
    "train.eval_batches=8", "train.log_every=1", "train.report=false", "train.timeline_at=0", "checkpoint.keep=0",
    "health.hash_every=0",
]  # fmt: skip
EMULATOR, EMULATOR_AGAIN = "emulator", "emulator again"
ENGINE, ENGINE_AGAIN = "engine", "engine again"
ENGINES = (ENGINE, ENGINE_AGAIN)
MADE = (
    "device",
    "data",
    "held_out",
    "versions",
    "commit",
    "source",
)  # of a run, as an export of a study has it
PAIRS = ((ENGINE, EMULATOR), (ENGINE_AGAIN, ENGINE), (EMULATOR_AGAIN, EMULATOR))
Line = dict[str, Any]


@dataclass(frozen=True)
class Run:
    kind: str
    cutover: int
    seed: int

    @property
    def name(self) -> str:
        return f"{self.kind.replace(' ', '-')}-c{self.cutover}-{self.seed}"

    @property
    def real(self) -> bool:
        """Whether several processes make it."""
        return self.kind in ENGINES

    def command(self, folder: Path, stages: int, changes: Sequence[str]) -> list[str]:
        schedule = ["pipeline.schedule=emulate"]
        if self.real:
            schedule = ["pipeline.schedule=2bw", f"pipeline.stages={stages}"]
        own = [f"train.seed={self.seed}", f"pipeline.cutover={self.cutover}", f"run.dir={folder}"]
        return [sys.executable, "-m", "slipstream", "train", *SETTINGS, *schedule, *own, *changes]


def curve(folder: Path) -> Line:
    """Of a run that has ended, and that may have been begun before."""
    run, made = read_run(folder), read_folder(folder)
    if made is None:
        raise OSError(f"{folder} holds no run that has ended")
    steps = run.surviving("step")
    return {
        **{key: getattr(made, key) for key in MADE},
        "losses": [event["loss"] for event in steps],
        "validation": [event["loss"] for event in run.surviving("validation")],
        "seconds": steps[-1]["seconds"],
        "tokens": steps[-1]["tokens"],
    }


def measure(run: Run, out: Path, stages: int, partitions: bool, changes: Sequence[str], ends: float) -> Line:
    folder = out / run.name
    share = {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": f"{100 / stages:g}"} if partitions else {}
    with (out / f"{run.name}.log").open("w") as log:
        left = max(1.0, ends - time.monotonic())
        command = run.command(folder, stages, changes)
        subprocess.run(command, stdout=log, stderr=log, timeout=left, check=True, env=os.environ | share)
    given = {"stages": stages if run.real else 1, "partitions": partitions, "changes": list(changes)}
    return asdict(run) | given | curve(folder)


def table(lines: Sequence[Line]) -> str:
    """Over the seeds: how far two curves are apart, in the mean over all updates, and their ends."""
    found = {(line["kind"], line["cutover"], line["seed"]): line for line in lines}
    seeds = sorted({line["seed"] for line in lines})
    rows = [
        "| c | curves | seeds | updates equal at first | training loss apart, mean of updates | validation apart, "
        "at most | final validation |",
        "|---|---|---|---|---|---|---|",
    ]
    for cutover in sorted({line["cutover"] for line in lines}, reverse=True):
        for kind, other in PAIRS:
            both = [(found.get((kind, cutover, seed)), found.get((other, cutover, seed))) for seed in seeds]
            pairs = [(a, b) for a, b in both if a is not None and b is not None]
            if not pairs:
                continue
            cells = [
                f"{cutover}",
                f"{kind} and {other}",
                f"{len(pairs)}",
                ", ".join(f"{_equal(a, b)} of {len(a['losses'])}" for a, b in pairs),
                ", ".join(f"{statistics.fmean(_apart(a, b, 'losses')):.5f}" for a, b in pairs),
                ", ".join(f"{max(_apart(a, b, 'validation')):.5f}" for a, b in pairs),
                ", ".join(f"{a['validation'][-1] - b['validation'][-1]:+.5f}" for a, b in pairs),
            ]
            rows.append("| " + " | ".join(cells) + " |")
    return "\n".join(rows)


def makers(lines: Sequence[Line]) -> str:
    """What made the runs, as far as their lines say it: old ones do not."""
    counts = Counter(map(_maker, lines))
    return "Made by " + "; ".join(f"{maker}: {number} runs" for maker, number in counts.items()) + "."


def _maker(line: Line) -> str:
    if "versions" not in line:
        return "what was not noted"
    code = line["commit"] or f"code {line.get('source', '')[:12] or 'not noted'}"
    return f"{code}, torch {line['versions'].get('torch')}, {line['device']}"


def _equal(a: Line, b: Line) -> int:
    differ = (i for i, (x, y) in enumerate(zip(a["losses"], b["losses"], strict=True)) if x != y)
    return next(differ, len(a["losses"]))


def _apart(a: Line, b: Line, key: str) -> list[float]:
    return [abs(x - y) for x, y in zip(a[key], b[key], strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("changes", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--cutovers", default="8,4")
    parser.add_argument("--seconds", type=float, default=900.0, help="no run is waited for longer than this")
    parser.add_argument("--at-once", type=int, default=4, help="runs of the emulator side by side")
    parser.add_argument("--engines-at-once", type=int, default=1, help="runs of the engine beside them")
    parser.add_argument("--partitions", action="store_true", help="each stage on its share of one GPU")
    parser.add_argument("--table", action="store_true")
    given = parser.parse_intermixed_args()
    if given.partitions and not Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps")).exists():
        parser.error("--partitions: no CUDA MPS service is running. Start one: nvidia-cuda-mps-control -d")
    file, lock = given.out / "engine.jsonl", Lock()
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    if not given.table:
        given.out.mkdir(parents=True, exist_ok=True)
        done = {(line["kind"], line["cutover"], line["seed"]) for line in lines}
        ends = time.monotonic() + given.seconds
        runs = [
            Run(kind, int(cutover), int(seed))
            for kinds in ((EMULATOR, ENGINE), (EMULATOR_AGAIN, ENGINE_AGAIN))
            for seed in given.seeds.split(",")
            for cutover in given.cutovers.split(",")
            for kind in kinds
        ]

        def one(run: Run) -> None:
            try:
                line = measure(run, given.out, given.stages, given.partitions, given.changes, ends)
            except (OSError, subprocess.SubprocessError) as error:  # the others go on
                print(f"{run.name}: {error}; its words are in {run.name}.log", flush=True)
                return
            with lock, file.open("a") as out:
                out.write(json.dumps(line) + "\n")
                lines.append(line)
            print(f"{run.name}: {line['validation'][-1]:.5f} after {line['seconds']:.0f} s", flush=True)

        todo = [run for run in runs if (run.kind, run.cutover, run.seed) not in done]
        with (
            ThreadPoolExecutor(given.at_once) as emulators,
            ThreadPoolExecutor(given.engines_at_once) as engines,
        ):
            waiting = [(engines if run.real else emulators).submit(one, run) for run in todo]
            for future in waiting:
                future.result()
    print(
        f"{table(lines)}\n\n{makers(lines)}"
        if lines
        else f"No run has ended yet: there is nothing in {file}."
    )


if __name__ == "__main__":
    main()
