"""The ranks of a running job: their process group, their place in the pipeline x data mesh, their device.

Rank order is data-major: rank = data_rank * stages + stage; the stages of one pipeline are neighbours.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from slipstream.distributed.affinity import pin
from slipstream.distributed.device_group import (
    SHARED,
    STAGED,
    DeviceGroup,
    can_share,
    register_backends,
)
from slipstream.distributed.groups import close_all
from slipstream.distributed.launch import started_by_torchrun
from slipstream.errors import UserError

DEFAULT_TIMEOUT_SECONDS = 300.0
LEAVING_SECONDS = 60.0  # how long rank 0 waits for the others at the end
FAILED_SECONDS = 3.0  # how long ranks that share a GPU wait for each other when one of them failed


@dataclass(frozen=True)
class World:
    """This process among the ranks of a job."""

    rank: int
    size: int
    local_rank: int
    store: dist.Store

    def mesh(self, stages: int) -> tuple[int, int]:
        """(stage, data rank) of this process when the world is cut into pipelines of `stages`."""
        if self.size % stages:
            raise UserError(
                f"{self.size} processes cannot form pipelines of {stages} stages. "
                f"Start a multiple of {stages} processes or change pipeline.stages."
            )
        return self.rank % stages, self.rank // stages


@contextlib.contextmanager
def initialise(
    rank: int | None = None,
    size: int | None = None,
    *,
    port: int | None = None,
    listener: int | None = None,
    timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
) -> Iterator[World]:
    """Join the default process group: as a rank our own launcher made, or, with no arguments, torchrun's.

    Tensors on the CPU always travel over gloo; CUDA tensors over NCCL where each rank has a GPU of its own, and
    through the memory of the GPU where all ranks share one (`device_group.py`).
    """
    torch.set_num_threads(1)  # another thread count changes the bits of LayerNorm gradients and long sums
    timeout = timedelta(seconds=timeout_seconds)
    if rank is None or size is None:
        if not started_by_torchrun():
            raise UserError(
                "No process group: start this under torchrun, or through slipstream's own launcher."
            )
        local_rank = int(os.environ.get("LOCAL_RANK", os.environ["RANK"]))
        local_size = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]))
        _settle(local_rank, local_size)
        met, rank, size = next(dist.rendezvous("env://", timeout=timeout))
        # A restarted attempt meets at the same store: without a name of its own it would find the addresses of
        # the attempt that died.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store = dist.PrefixStore(f"slipstream/attempt-{attempt}", met)
        backend = _backend(rank, size, local_size, store)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
        world = World(rank, size, local_rank, store)
    else:
        assert port is not None
        _settle(rank, size)
        if listener is None:
            server = dist.TCPStore("127.0.0.1", port, is_master=False)
        else:
            server = dist.TCPStore(
                "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener
            )
        store = dist.PrefixStore("slipstream", server)
        backend = _backend(rank, size, size, store)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
        world = World(rank, size, rank, store)
    failed = True
    try:
        yield world
        failed = False
    finally:
        _settle_together(world, failed)
        if not failed:
            _leave_together(world)
        close_all(failed)
        # A group that lost a peer cannot always be closed.
        with contextlib.suppress(RuntimeError, ValueError):
            dist.destroy_process_group()


def _settle_together(world: World, failed: bool) -> None:
    """Ranks that share a GPU's memory: nobody frees what another rank's device may still have to read."""
    groups = list(DeviceGroup.alive)
    DeviceGroup.alive.clear()
    if not groups:
        return
    deadline = time.monotonic() + (FAILED_SECONDS if failed else LEAVING_SECONDS)
    for group in groups if failed else ():
        group.hang_up()  # the others give up as well, instead of waiting for this rank
    with contextlib.suppress(RuntimeError):  # a device that failed tells nothing more
        if torch.cuda.is_initialized():
            done = torch.cuda.Event()
            done.record()
            while not done.query() and time.monotonic() < deadline:
                time.sleep(0.001)

    def meet() -> None:
        with contextlib.suppress(RuntimeError):  # someone else is gone already, and tells its own story
            world.store.set(f"settled/{world.rank}", "")
            names = [f"settled/{rank}" for rank in range(world.size)]
            world.store.wait(names, timedelta(seconds=max(0.1, deadline - time.monotonic())))

    # The store is another rank's: one that is stopped never answers, and a call to it knows no deadline.
    asking = threading.Thread(target=meet, daemon=True)
    asking.start()
    asking.join(max(0.1, deadline - time.monotonic()) + 1.0)


def _leave_together(world: World) -> None:
    """Rank 0 serves the store: it goes last, so that no rank finds it gone in the middle of a question."""
    with contextlib.suppress(RuntimeError):  # someone else is gone already, and tells its own story
        world.store.set(f"left/{world.rank}", "")
        if world.rank == 0:
            names = [f"left/{rank}" for rank in range(world.size)]
            world.store.wait(names, timedelta(seconds=LEAVING_SECONDS))


def device_for(local_rank: int) -> torch.device:
    """This rank's device: its own GPU, a shared GPU when there are fewer GPUs than ranks, or the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", local_rank % torch.cuda.device_count())


def _settle(local_rank: int, local_size: int) -> None:
    """Take this rank's own device: a GPU, or cores."""
    if torch.cuda.is_available():
        torch.cuda.set_device(device_for(local_rank))
    else:
        pin(local_rank, local_size)


def _backend(rank: int, size: int, local_size: int, store: dist.Store) -> str:
    """NCCL refuses two ranks on one GPU unless it is told not to (from 2.30 on); our own group carries them then."""
    if not torch.cuda.is_available():
        return "gloo"
    if torch.cuda.device_count() >= local_size or os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1":
        return "cpu:gloo,cuda:nccl" if dist.is_nccl_available() else "gloo"
    if size > local_size:
        return "gloo"  # several machines: CUDA tensors are staged through the host, by the engine only
    register_backends()
    one_gpu = torch.cuda.device_count() == 1
    return SHARED if one_gpu and can_share(store, rank, size, device_for(rank)) else STAGED
