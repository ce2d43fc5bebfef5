"""Jobs that hold one stage up in each of its actions and look how far the others come."""

import time

import numpy as np
import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage

from slipstream import Schedule2BW
from slipstream.schedule.actions import Kind

WIDTH = 4
PATIENCE_SECONDS = 120.0  # only a stage that will never come takes as long


class Gate:
    """The actions each rank has begun, where all can read them; `held` begins none before the others are there."""

    def __init__(self, path, rank, held, reach):
        self._begun = np.memmap(path, dtype=np.int64, mode="r+")  # one number a rank
        self._rank = rank
        self._reach = reach if rank == held else None

    def begin(self):
        own = int(self._begun[self._rank])
        if self._reach is not None:
            self._wait(own, self._reach[own])
        self._begun[self._rank] = own + 1

    def _wait(self, own, reach):
        deadline = time.monotonic() + PATIENCE_SECONDS
        while (begun := self._begun.tolist()) != reach:
            ahead = [rank for rank, (is_, may) in enumerate(zip(begun, reach, strict=True)) if is_ > may]
            assert not ahead, f"before its action {own}: {begun} begun, which data allows to {reach} only"
            assert time.monotonic() < deadline, f"before its action {own}: {begun} begun, data allows {reach}"
            time.sleep(0.0005)


class _Gated(torch.autograd.Function):
    """The identity, which passes the gate on its way down and on its way back."""

    @staticmethod
    def forward(ctx, value, gate):
        ctx.gate = gate
        gate.begin()
        return value.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.gate.begin()
        return grad, None


class Stage(nn.Module):
    gate = None  # of this process: the engine copies a module, and copies share it

    def __init__(self):
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, hidden):
        return _Gated.apply(hidden + self.shift, Stage.gate)


def run(world, path, held, reach, microbatches, groups, **options):
    """`groups` groups, while `held` waits before its i-th action until the others have begun `reach[i]`.

    Returns the forwards and backwards this rank executed, in order.
    """
    Stage.gate = Gate(path, world.rank, held, reach)
    schedule = Schedule2BW(
        PipelineStage(Stage(), world.rank, world.size, torch.device("cpu")), microbatches,
        lambda output, target: (output - target).square().mean(),
        lambda module: torch.optim.SGD(module.parameters(), lr=0.1),
        timeout=2 * PATIENCE_SECONDS, **options,
    )  # fmt: skip
    schedule.trace(True)
    batch = torch.ones(microbatches, WIDTH)
    for _ in range(groups):
        schedule.step(
            *((batch,) if world.rank == 0 else ()),
            **({"target": batch} if world.rank == world.size - 1 else {}),
        )
    schedule.drain()
    return [span.action for span in schedule.take_trace() if span.action.kind is not Kind.UPDATE]
