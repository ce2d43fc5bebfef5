"""A training loop on torch.distributed.pipelining with one schedule class swapped for ours.

torchrun --nproc-per-node=2 examples/drop_in.py
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage

from slipstream import Schedule2BW

WIDTH, MICROBATCHES, ROWS = 64, 4, 32


def block() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.LayerNorm(WIDTH))


def main(steps: int) -> None:
    dist.init_process_group("gloo")
    rank, stages = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    stage = PipelineStage(block(), rank, stages, torch.device("cpu"))
    schedule = Schedule2BW(
        stage,
        n_microbatches=MICROBATCHES,
        loss_fn=nn.functional.mse_loss,
        optimizer=lambda module: torch.optim.AdamW(module.parameters(), lr=1e-2),
        correction="error_feedback",
        max_grad_norm=1.0,
    )
    data = torch.Generator().manual_seed(0)
    for step in range(steps):
        x = torch.randn(ROWS, WIDTH, generator=data)
        losses: list[torch.Tensor] = []
        inputs = (x,) if rank == 0 else ()
        targets = {"target": x.roll(1, dims=1), "losses": losses} if rank == stages - 1 else {}
        schedule.step(*inputs, **targets)  # returns with microbatches still in flight
        if losses and step % 20 == 0:
            print(f"step {step}  loss {torch.stack(losses).mean():.4f}", flush=True)
    schedule.drain()  # schedule.master now holds the newest weights of this stage
    print(f"stage {rank}: {schedule.completed} updates", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100)
    main(parser.parse_args().steps)
