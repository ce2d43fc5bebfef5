"""What a stage takes of a GPU: measured peaks, beside the planner's figures and torch's 1F1B.

    python studies/memory.py OUT [--at-once N] [--only TEXT,TEXT]

Trains every setting below for a few updates through `slipstream train`, and writes OUT/memory.jsonl: peaks by stage and
what the planner says of them. `sharded 1F1B` is torch's own schedule with a sharded optimizer written out below, since
the trainer shards that of 2BW only. Ranks share one GPU, by CUDA's Multi-Process Service: over NCCL where it can do
so (docs/engine.md), with `--at-once 1` only; else through the project's own group, whose rings are in the peaks.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from threading import Lock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from slipstream.distributed import RankPool, World, partitioned
from slipstream.models.loss import TokenLoss, with_group_count
from slipstream.models.sizes import preset
from slipstream.models.stages import build_stage
from slipstream.optim import build
from slipstream.plan.candidates import Cut, Fitter
from slipstream.plan.devices import Cluster, find_device
from slipstream.plan.layout import Job
from slipstream.plan.memory import BF16, NARROW
from slipstream.plan.throughput import Shape

STEPS = 6
SECONDS = 240.0


@dataclass(frozen=True)
class Setting:
    """One layout of one model."""

    model: str
    schedule: str = "2bw"
    stages: int = 4
    data_ranks: int = 1
    shard: bool = False
    microbatches: int = 8
    rows: int = 4  # of a microbatch, on one data rank
    sequence: int = 1024
    optimizer: str = "muon"
    cutover: int | None = None
    checkpointing: bool = False
    narrow: bool = False  # momentum in bfloat16 and, where they are the engine's, sums of gradients

    @property
    def name(self) -> str:
        parts = [self.model, self.schedule, f"{self.stages}x{self.data_ranks}", f"m{self.microbatches}"]
        parts += [f"rows{self.rows}", f"seq{self.sequence}", self.optimizer]
        parts += ["sharded"] * self.shard + ["checkpointing"] * self.checkpointing
        parts += [] if self.cutover is None else [f"c{self.cutover}"]
        parts += ["narrow"] * self.narrow
        return "-".join(parts)

    @property
    def shape(self) -> Shape:
        schedule = "pipedream_2bw" if self.schedule == "2bw" else "1f1b"
        return Shape(
            schedule, self.stages, self.data_ranks, self.microbatches, self.rows,
            checkpointing=self.checkpointing, shard_optimizer=self.shard, cutover=self.cutover,
        )  # fmt: skip

    def fitter(self) -> Fitter:
        devices = self.stages * self.data_ranks
        tokens = self.microbatches * self.rows * self.data_ranks * self.sequence
        cluster = Cluster(find_device("h200"), devices)
        gradient = NARROW.gradient if self.schedule == "2bw" else BF16.gradient
        precision = replace(NARROW, gradient=gradient) if self.narrow else BF16
        return Fitter(
            Job(
                preset(self.model),
                cluster,
                tokens,
                self.sequence,
                optimizer=self.optimizer,
                precision=precision,
            )
        )

    def overrides(self, cut: Cut) -> list[str]:
        given = {
            "model.preset": self.model,
            "model.vocab": preset(self.model).vocab,
            "data.sequence": self.sequence,
            "pipeline.schedule": self.schedule,
            "pipeline.stages": self.stages,
            "pipeline.data_ranks": self.data_ranks,
            "pipeline.microbatches": self.microbatches,
            "pipeline.microbatch_size": self.rows * self.data_ranks,
            "pipeline.boundaries": [layers.start for layers in cut[1:]],
            "optim.name": self.optimizer,
            "train.steps": STEPS,
            "train.dtype": "bfloat16",
            "train.device": "cuda",
            "train.activation_checkpointing": str(self.checkpointing).lower(),
            "train.eval_every": 0,
            "train.eval_batches": 1,
            "train.log_every": 1,
            "train.timeline_at": 0,
            "train.report": "false",
            "health.hash_every": 0,
            "checkpoint.keep": 0,
        }
        if self.schedule == "2bw":
            given["pipeline.in_flight"] = self.stages  # as many as 1F1B holds; more hide a slow link
        if self.shard:
            given["pipeline.shard_optimizer"] = "true"
        if self.cutover is not None:
            given["pipeline.cutover"] = self.cutover
        if self.narrow:
            given["optim.options.state_dtype"] = "bfloat16"
            if self.schedule == "2bw":
                given["train.gradient_dtype"] = "bfloat16"
        return [f"{key}={value}" for key, value in given.items()]


SMALL, LARGE = "smollm2-135m", "smollm2-360m"
SETTINGS = [
    Setting(SMALL),
    Setting(SMALL, "1f1b"),
    Setting(SMALL, cutover=8),
    Setting(LARGE),
    Setting(LARGE, "1f1b"),
    Setting(SMALL, data_ranks=2, shard=True),
    Setting(SMALL, "sharded 1f1b", data_ranks=2, shard=True),
    Setting(LARGE, data_ranks=2, shard=True),
    Setting(LARGE, "sharded 1f1b", data_ranks=2, shard=True),
    Setting(SMALL, optimizer="adamw", cutover=8),
    Setting(LARGE, stages=2, microbatches=6, rows=2, optimizer="adamw"),
    Setting(LARGE, rows=8, checkpointing=True),
    Setting(SMALL, stages=2, data_ranks=2, shard=True, rows=2, sequence=2048),
    Setting(SMALL, "1f1b", stages=2, rows=8),
    Setting(LARGE, data_ranks=2),
    Setting(LARGE, narrow=True),
    Setting(SMALL, narrow=True),
    Setting(LARGE, data_ranks=2, shard=True, narrow=True),
    Setting(SMALL, data_ranks=2, shard=True, narrow=True),
    Setting(LARGE, "1f1b", narrow=True),
    Setting(SMALL, "1f1b", narrow=True),
    Setting(LARGE, "sharded 1f1b", data_ranks=2, shard=True, narrow=True),
    Setting(SMALL, "sharded 1f1b", data_ranks=2, shard=True, narrow=True),
]


def measure(setting: Setting, out: Path) -> dict:
    fitter = setting.fitter()
    cut = fitter.cut(setting.shape)
    assert cut is not None
    planned = [rank.total - rank.communicators for rank in fitter.memory(setting.shape, cut)]
    if setting.schedule == "sharded 1f1b":
        with RankPool(setting.stages * setting.data_ranks) as pool:
            job = "memory:sharded_1f1b"  # ranks import it: this script's folder is on their path
            peaks = pool.run(job, asdict(setting), [[c.start, c.stop] for c in cut], timeout=SECONDS)
        measured = peaks[: setting.stages]  # of the first data rank, as the trainer's
    else:
        folder = out / setting.name
        command = [sys.executable, "-m", "slipstream", "train", *setting.overrides(cut), f"run.dir={folder}"]
        with (out / f"{setting.name}.log").open("w") as log:
            subprocess.run(command, stdout=log, stderr=log, timeout=SECONDS, check=True)
        events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
        measured = [event for event in events if event["event"] == "step"][-1]["memory_bytes"]
    sizes = stage_parameters(setting.model, cut)
    return {
        "setting": setting.name,
        "measured_bytes": measured,
        "planned_bytes": [round(total) for total in planned],
        "parameters": sizes,
        "bytes_per_parameter": [round(m / n, 2) for m, n in zip(measured, sizes, strict=True)],
        "planned_over_measured": [round(p / m, 3) for p, m in zip(planned, measured, strict=True)],
    }


def stage_parameters(model: str, cut: Iterable[range]) -> list[int]:
    stages = list(cut)
    last = len(stages) - 1
    modules = [
        build_stage(preset(model), c.start, c.stop, embedding=i == 0, head=i == last, seed=0, device="meta")
        for i, c in enumerate(stages)
    ]
    return [sum(p.numel() for p in module.parameters()) for module in modules]


def sharded_1f1b(world: World, fields: dict, cut: list[list[int]]) -> int:
    """bf16 weights, float32 sums; each data rank has the float32 master and the state of half of the matrices."""
    setting = Setting(**fields)
    device, stages = torch.device("cuda", 0), setting.stages
    index, column = world.mesh(stages)
    pipelines = [dist.new_group(list(range(d * stages, (d + 1) * stages))) for d in range(setting.data_ranks)]
    columns = [dist.new_group(list(range(s, world.size, stages))) for s in range(stages)]
    module = build_stage(
        preset(setting.model),
        *cut[index],
        embedding=index == 0,
        head=index == stages - 1,
        seed=0,
        device=device,
    )
    parameters = list(module.parameters())
    largest_first = sorted(range(len(parameters)), key=lambda i: -parameters[i].numel())
    owner = {number: turn % setting.data_ranks for turn, number in enumerate(largest_first)}
    master = nn.Module()
    for number, parameter in enumerate(parameters):
        if owner[number] == column:
            master.register_parameter(str(number), nn.Parameter(parameter.detach().clone()))
    state = {"state_dtype": "bfloat16"} if setting.narrow else {}
    optimizer = build(setting.optimizer, master, lr=1e-3, **state)
    module.to(torch.bfloat16)
    sums = [torch.zeros_like(p, dtype=torch.float32) for p in parameters]

    def add(number: int, parameter: Tensor) -> None:
        assert parameter.grad is not None
        sums[number].add_(parameter.grad)
        parameter.grad = None

    for number, parameter in enumerate(parameters):
        parameter.register_post_accumulate_grad_hook(lambda p, number=number: add(number, p))
    m = setting.microbatches
    stage = PipelineStage(module, index, stages, device, group=pipelines[column])
    loss = TokenLoss(shares=m)
    schedule = Schedule1F1B(stage, m, loss_fn=lambda y, target: loss(y, target) / m, scale_grads=False)
    tokens = torch.randint(
        preset(setting.model).vocab, (m * setting.rows, setting.sequence + 1), device=device
    )
    inputs, targets = tokens[:, :-1].contiguous(), with_group_count(tokens[:, 1:].contiguous())
    ranks = dist.get_process_group_ranks(columns[index])
    for step in range(4):
        if step == 2:
            torch.cuda.reset_peak_memory_stats()
        schedule.step(
            *((inputs,) if index == 0 else ()),
            target=targets if index == stages - 1 else None,
            return_outputs=False,
        )
        for number, total in enumerate(sums):
            dist.reduce(total, ranks[owner[number]], group=columns[index])
        for name, parameter in master.named_parameters():
            parameter.grad = sums[int(name)]
        optimizer.step()
        for name, parameter in master.named_parameters():
            parameters[int(name)].data.copy_(parameter.data)
            parameter.grad = None
        for number, parameter in enumerate(parameters):
            dist.broadcast(parameter.data, ranks[owner[number]], group=columns[index])
            sums[number].zero_()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--at-once", type=int, default=1, help="settings that run side by side")
    parser.add_argument("--only", default="", help="parts of the names of settings, joined by commas")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    chosen = [setting for setting in SETTINGS if any(part in setting.name for part in given.only.split(","))]
    if not chosen:
        parser.error(
            f"no setting has any of '{given.only}' in its name; they are {', '.join(s.name for s in SETTINGS)}"
        )
    served = nullcontext() if "CUDA_MPS_PIPE_DIRECTORY" in os.environ else partitioned(1)
    with served as service:  # processes of one GPU at work at the same time
        os.environ.update(service.environment if service else {})
        run(chosen, given.out, given.at_once)


def run(settings: list[Setting], out: Path, at_once: int) -> None:
    lock = Lock()

    def one(setting: Setting) -> None:
        try:
            found = measure(setting, out)
        except Exception as error:  # the others go on
            found = {"setting": setting.name, "error": f"{type(error).__name__}: {error}"}
        with lock, (out / "memory.jsonl").open("a") as file:
            file.write(json.dumps(found) + "\n")
            print(json.dumps(found), flush=True)

    with ThreadPoolExecutor(at_once) as executor:
        list(executor.map(one, settings))


if __name__ == "__main__":
    main()
