"""A rank's stage, cut and laid out by torchtitan: the master, and copies of it for the banks.

torchtitan's `pipelining_fn` cuts a model that has no values yet and hands each piece to `parallelize_fn`. There the
piece is copied, and every copy is laid out as the piece itself is (tensor parallel, activation checkpointing, compile,
FSDP2). So no rank ever holds a whole stage that is to be sharded, and random numbers initialise the master alone.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage
from torchtitan.distributed import ParallelDims


class Copies:
    """`parallelize_fn`, applied to copies of a piece too. `made` holds them, laid out and without values."""

    def __init__(self, parallelize: Callable[..., nn.Module], count: int) -> None:
        self._parallelize, self._count = parallelize, count
        self.made: list[nn.Module] = []

    def __call__(self, piece: nn.Module, **how: Any) -> nn.Module:
        self.made += [self._parallelize(copy.deepcopy(piece), **how) for _ in range(self._count)]
        return self._parallelize(piece, **how)

    def materialise(self, device: torch.device) -> list[nn.Module]:
        """With memory; the engine gives them their values, the master's."""
        for module in self.made:
            module.to_empty(device=device)
            module.train()
        return self.made


def stage_of(master: nn.Module, dims: ParallelDims, device: torch.device) -> PipelineStage:
    pipeline = dims.get_mesh("pp")
    return PipelineStage(master, pipeline.get_local_rank(), dims.pp, device, group=pipeline.get_group("pp"))


def mesh_of(dims: ParallelDims) -> DeviceMesh | None:
    """The ranks that hold this rank's stage; None where it is alone."""
    shard = "fsdp" if dims.spmd_backend == "partial_dtensor" else "dp_shard"
    return dims.get_activated_mesh(["dp_replicate", shard, "tp"])
