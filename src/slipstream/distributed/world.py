"""The ranks of a running job: their process group, their place in the pipeline x data mesh, their device.

Rank order is data-major: rank = data_rank * stages + stage; the stages of one pipeline are neighbours.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from slipstream.distributed import lost
from slipstream.distributed.cores import pin
from slipstream.distributed.device_group import (
    SHARED,
    STAGED,
    DeviceGroup,
    can_share,
    register_backends,
)
from slipstream.distributed.groups import close_all, shares_gpus
from slipstream.distributed.launch import started_by_torchrun
from slipstream.distributed.meeting import agreed_word, torchruns_store, watched
from slipstream.errors import StageError, UserError
from slipstream.torch_private import count_groups_anew

DEFAULT_TIMEOUT_SECONDS = 300.0
STANDING_BY_SECONDS = 0.5
LEAVING_SECONDS = 60.0  # how long rank 0 waits for the others at the end
CLOSING_SECONDS = 10.0  # how long a rank that failed tries to close its groups
FAILED_SECONDS = 3.0  # how long ranks that share a GPU wait for each other when one of them failed


@dataclass(frozen=True)
class World:
    """This process among the ranks of a job."""

    rank: int
    size: int
    local_rank: int
    store: dist.Store

    @property
    def spare(self) -> bool:
        """Whether this process has no part in the job: there are more than it can use."""
        return self.rank >= self.size

    def wait_until_over(self) -> None:
        """A spare rank's part: to be there, in case it is needed next time, until the others are done."""
        with contextlib.suppress(RuntimeError):  # the store is gone, and with it the job
            while not self.store.check(["left/0"]):
                time.sleep(STANDING_BY_SECONDS)

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
    place: int | None = None,
    used: int | None = None,
    timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
) -> Iterator[World]:
    """Join the default process group: as a rank our own launcher made, or, with no arguments, torchrun's.

    Tensors on the CPU always travel over gloo; CUDA tensors over NCCL where each rank has a GPU of its own, and
    through the memory of the GPU where all ranks share one (`device_group.py`). `place`: of the process in its pool,
    which says which GPU is its own. `used`: how many of torchrun's ranks train; the others are spare.
    """
    torch.set_num_threads(1)  # another thread count changes the bits of LayerNorm gradients and long sums
    torchrun = rank is None or size is None
    if torchrun:
        if not started_by_torchrun():
            raise UserError(
                "No process group: start this under torchrun, or through slipstream's own launcher."
            )
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    assert rank is not None
    assert size is not None
    with lost.own_words(rank, size, timeout_seconds), ExitStack() as stack:
        if torchrun:
            world = _meet_at_torchruns(stack, rank, size, used or size, timeout_seconds)
        else:
            assert port is not None
            world = _meet_at_ours(
                stack, rank, size, rank if place is None else place, port, listener, timeout_seconds
            )
        if world.spare:
            yield world
            return
        failed = True
        try:
            yield world
            failed = False
        finally:
            _settle_together(world, failed)
            if failed:
                _at_most(CLOSING_SECONDS, lambda: _close(failed))
            else:
                _leave_together(world)
                _close(failed)


def _close(failed: bool) -> None:
    close_all(failed)
    with contextlib.suppress(RuntimeError, ValueError):  # a group that lost a peer cannot always be closed
        dist.destroy_process_group()


def _meet_at_torchruns(stack: ExitStack, rank: int, size: int, used: int, timeout_seconds: float) -> World:
    local_rank = int(os.environ.get("LOCAL_RANK", rank))
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", size))
    _settle(local_rank, local_rank, local_size)
    met = torchruns_store(rank, timeout_seconds)
    stack.enter_context(watched(met, timeout_seconds))
    # Attempts of one torchrun meet at the same store, and it does not number all of them: without a word of its own
    # a new one would find the addresses of the one that died.
    store = dist.PrefixStore(f"slipstream/{agreed_word(met, rank, size, timeout_seconds)}", met)
    world = World(rank, used, local_rank, store)
    if not world.spare:
        _join(world, min(local_size, used), timeout_seconds)
    return world


def _meet_at_ours(
    stack: ExitStack,
    rank: int,
    size: int,
    place: int,
    port: int,
    listener: int | None,
    timeout_seconds: float,
) -> World:
    _settle(place, rank, size)
    serving: dict[str, Any] = {"is_master": False}
    if listener is not None:
        serving = {"is_master": True, "wait_for_workers": False, "master_listen_fd": listener}
    server = dist.TCPStore("127.0.0.1", port, timeout=timedelta(seconds=timeout_seconds), **serving)
    if rank > 0:
        stack.enter_context(watched(server, timeout_seconds))
    world = World(rank, size, place, dist.PrefixStore("slipstream", server))
    _join(world, size, timeout_seconds)
    return world


def _join(world: World, local_size: int, timeout_seconds: float) -> None:
    """Make the default process group. Who does not come is named."""
    store, rank, size = world.store, world.rank, world.size
    store.set(f"here/{rank}", "")
    backend = _backend(world, local_size)
    # Else a thread of torch's asks the store each second whether to write down what NCCL did. A store whose rank is
    # stopped does not answer, and whoever closes the group waits for that thread.
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "0")
    timeout = timedelta(seconds=timeout_seconds)
    if not dist.is_initialized():  # if it is, torch says so
        count_groups_anew()
    try:
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
    except RuntimeError as error:
        if not lost.is_lost_peer(error):
            raise
        missing = [str(other) for other in range(size) if not store.check([f"here/{other}"])]
        who = f"rank {', '.join(missing)}" if missing else "the others"
        raise StageError(
            f"Rank {rank} waited for {who} at the start: {lost.words(error)} ({timeout_seconds:g} s)."
        ) from error


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

    _at_most(
        max(0.1, deadline - time.monotonic()) + 1.0,
        lambda: _meet(world, "settled", max(0.1, deadline - time.monotonic())),
    )


def _leave_together(world: World) -> None:
    """Rank 0 serves the store: it goes last, so that no rank finds it gone in the middle of a question."""
    if world.rank == 0:
        _at_most(LEAVING_SECONDS + 1.0, lambda: _meet(world, "left", LEAVING_SECONDS))
    else:
        _at_most(LEAVING_SECONDS, lambda: world.store.set(f"left/{world.rank}", ""))


def _meet(world: World, where: str, seconds: float) -> None:
    world.store.set(f"{where}/{world.rank}", "")
    names = [f"{where}/{rank}" for rank in range(world.size)]
    world.store.wait(names, timedelta(seconds=seconds))


def _at_most(seconds: float, ask: Callable[[], object]) -> None:
    """The store is another rank's: one that is stopped never answers, and a call to it knows no deadline."""

    def asking() -> None:
        with contextlib.suppress(RuntimeError):  # someone else is gone already, and tells its own story
            ask()

    thread = threading.Thread(target=asking, daemon=True)
    thread.start()
    thread.join(seconds)


def device_for(local_rank: int) -> torch.device:
    """This rank's device: its own GPU, a shared GPU when there are fewer GPUs than ranks, or the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", local_rank % torch.cuda.device_count())


def comes_up(place: int) -> bool:
    """Whether a process can use the device of its place."""
    try:
        torch.zeros(1, device=device_for(place)).item()
    except RuntimeError:
        return False
    return True


def _settle(place: int, local_rank: int, local_size: int) -> None:
    """Take this rank's own device: a GPU, or cores."""
    if torch.cuda.is_available():
        torch.cuda.set_device(device_for(place))
        # torch's own backward thread has no context at its first product, takes one, and tells everyone.
        warnings.filterwarnings(
            "ignore", message="Attempting to run cuBLAS, but there was no current CUDA context"
        )
    else:
        pin(local_rank, local_size)


def _backend(world: World, local_size: int) -> str:
    """NCCL refuses two ranks on one GPU unless it is told not to (from 2.30 on); our own group carries them then."""
    if not torch.cuda.is_available():
        return "gloo"
    if torch.cuda.device_count() >= local_size or shares_gpus():
        return "cpu:gloo,cuda:nccl" if dist.is_nccl_available() else "gloo"
    if world.size > local_size:
        return "gloo"  # several machines: CUDA tensors are staged through the host, by the engine only
    register_backends()
    one_gpu = torch.cuda.device_count() == 1
    shared = one_gpu and can_share(world.store, world.rank, world.size, device_for(world.local_rank))
    return SHARED if shared else STAGED
