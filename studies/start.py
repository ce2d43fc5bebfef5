"""What a snapshot of the state and the start of a large stage take of a GPU's memory.

    python studies/start.py OUT.jsonl [--model smollm2-360m] [--large smollm2-1.7b]

*capture*: one process trains a model and takes its state, by pinned memory beside the computation as the trainer does,
and as clones on the device, as it once did: what each adds to the peak, and how long an update takes with it.
*start*: two ranks make one stage under FSDP2, from the meta device and from whole modules: the peak until the first
update, in bytes per parameter of the whole stage. Both ranks are on one GPU, over NCCL where it can do that.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage

from slipstream import Schedule2BW, cloned_state
from slipstream.distributed import RankPool, World, partitioned
from slipstream.models.loss import TokenLoss, with_group_count
from slipstream.models.sizes import preset
from slipstream.models.stages import build_stage
from slipstream.optim import build
from slipstream.train.state import Copier

MICROBATCHES, ROWS = 4, 2
ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if ON_GPU else torch.device("cpu")


def peak(reset: bool = False) -> int:
    """Bytes that were allocated at most since the last reset; 0 without a GPU, where this is only tried out."""
    if not ON_GPU:
        return 0
    torch.cuda.synchronize()
    found = torch.cuda.max_memory_allocated()
    if reset:
        torch.cuda.reset_peak_memory_stats()
    return found


def schedule_of(module: nn.Module, model: str, group: dist.ProcessGroup, **options) -> Schedule2BW:
    loss = TokenLoss(shares=MICROBATCHES)
    stage = PipelineStage(module, 0, 1, DEVICE, group=group)
    return Schedule2BW(
        stage, MICROBATCHES, loss, lambda master: build("muon", master, lr=1e-3), cutover=MICROBATCHES // 2,
        bank_dtype=torch.bfloat16 if ON_GPU else None, scale_grads=False, **options,
    )  # fmt: skip


def batch(model: str, sequence: int) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(preset(model).vocab, (MICROBATCHES * ROWS, sequence + 1), device=DEVICE)
    return tokens[:, :-1].contiguous(), with_group_count(tokens[:, 1:].contiguous())


def whole(model: str, device: torch.device | str) -> nn.Module:
    layers = preset(model).layers
    return build_stage(preset(model), 0, layers, embedding=True, head=True, seed=0, device=device)


def capture(world: World, model: str, sequence: int) -> dict:
    """A state every third update, taken in each of three ways; peaks and seconds of the updates with one."""
    module = whole(model, DEVICE)
    parameters = sum(p.numel() for p in module.parameters())
    schedule = schedule_of(module, model, dist.group.WORLD)
    x, y = batch(model, sequence)
    copier = Copier(DEVICE)
    kept: list = []

    def pinned(_: int) -> None:
        snapshot = copier.copy(schedule.capture())
        if snapshot.copied is not None:
            schedule.hold(snapshot.copied)
        kept.append(snapshot)

    def cloned(_: int) -> None:
        kept.append(cloned_state(schedule.capture()))

    for _ in range(4):
        schedule.step(x, target=y, return_outputs=False)
    found: dict = {"measured": "capture", "model": model, "parameters": parameters}
    for name, take in (("none", None), ("pinned", pinned), ("clones", cloned)):
        peak(reset=True)
        seconds = []
        for update in range(6):
            schedule.after_update = take if update % 3 == 1 else None
            began = time.perf_counter()
            schedule.step(x, target=y, return_outputs=False)
            peak()  # synchronises
            seconds.append(time.perf_counter() - began)
            kept.clear()
        found[name] = {"peak_bytes": peak(), "seconds": [round(value, 4) for value in seconds]}
    schedule.after_update = None
    schedule.close()
    return found


def start(world: World, model: str, sequence: int, from_meta: bool) -> dict:
    alone = [dist.new_group([rank]) for rank in range(world.size)][world.rank]
    mesh = dist.init_device_mesh(DEVICE.type, (world.size,), mesh_dim_names=("dp",))

    def shard(module: nn.Module) -> nn.Module:
        for layer in module.layers.values():
            fully_shard(layer, mesh=mesh)
        fully_shard(module, mesh=mesh)
        if from_meta:
            module.to_empty(device=DEVICE)
            with torch.no_grad():
                for parameter in module.parameters():
                    parameter.normal_(std=0.02)
        return module

    gc.collect()  # what the job before left in a circle
    peak(reset=True)
    module = whole(model, "meta" if from_meta else DEVICE)
    parameters = sum(p.numel() for p in module.parameters())
    schedule = schedule_of(module, model, alone, mesh=mesh, prepare=shard)
    made = peak(reset=True)
    x, y = batch(model, sequence)
    schedule.step(x, target=y, return_outputs=False)
    schedule.drain()
    trained = peak()
    schedule.close()
    return {
        "measured": "start", "model": model, "from": "meta" if from_meta else "whole modules", "parameters": parameters,
        "made_bytes": made, "trained_bytes": trained, "made_per_parameter": round(made / parameters, 2),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", default="smollm2-360m")
    parser.add_argument("--large", default="smollm2-1.7b")
    parser.add_argument("--sequence", type=int, default=512)
    given = parser.parse_args()

    def note(found: dict) -> None:
        with given.out.open("a") as file:
            file.write(json.dumps(found) + "\n")
        print(json.dumps(found), flush=True)

    with partitioned(1) as service, RankPool(2, service.environment) as pool:
        note(pool.run("start:capture", given.model, given.sequence, ranks=1, timeout=300)[0])
        for from_meta in (True, False):
            for found in pool.run("start:start", given.large, given.sequence, from_meta, timeout=300):
                note(found)


if __name__ == "__main__":
    main()
