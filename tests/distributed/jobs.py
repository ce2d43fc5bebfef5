"""Jobs that the launcher tests run in worker processes."""

import ctypes
import gc
import mmap
import os
import resource
import signal
import threading
import time
from importlib import import_module

import torch
import torch.distributed as dist

from slipstream.errors import StageError, UserError


def name_a_group_behind_its_back(world):
    """On the last rank torch counts one group more than on the others, as where a group's making failed."""
    if world.rank < world.size - 1:
        return
    destroy = dist.destroy_process_group

    def destroy_and_count():
        dist.destroy_process_group = destroy
        destroy()
        dist.distributed_c10d._world.group_count += 1

    dist.destroy_process_group = destroy_and_count


def total(world, value):
    tensor = torch.tensor([float(value + world.rank)])
    dist.all_reduce(tensor)
    return world.rank, tensor.item(), os.getpid()


def mistake(world):
    if world.rank == 1:
        raise UserError("Set x to 3.")
    dist.barrier()


def death(world):
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def crash(world):
    if world.rank == 1:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        ctypes.string_at(0)
    dist.barrier()


def read_past_the_end(world, path):
    """Of a file that was cut short after it was mapped."""
    if world.rank == 1:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with open(path, "r+b") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            file.truncate(0)
            mapped[5000]
    dist.barrier()


class Lingering:
    """It goes with a collection of garbage only, and slowly."""

    def __init__(self, seconds):
        self.me, self.seconds = self, seconds

    def __del__(self):
        time.sleep(self.seconds)


def leave_behind(world, seconds):
    left = Lingering(seconds)
    raise UserError(f"{left.seconds} s are left behind.")


class Kept:
    """It goes with a collection of garbage only, and leaves word."""

    gone = threading.Event()

    def __init__(self):
        self.me = self

    def __del__(self):
        Kept.gone.set()


def leave_a_cycle(world):
    gc.disable()  # else a collection might happen to come in time
    Kept()
    return Kept.gone.is_set()


def cycle_is_gone(world):
    try:
        return Kept.gone.wait(120)
    finally:
        gc.enable()


def collect(world):
    gc.collect()


def stall(world):
    time.sleep(600)


def pause(world, seconds):
    time.sleep(seconds)


def threads(world):
    return torch.get_num_threads()


def uneven(world):
    """Rank 0 is done at once; the others still talk to the store it serves."""
    if world.rank:
        time.sleep(0.5)
        world.store.set(f"late/{world.rank}", "x")
        return world.store.get(f"late/{world.rank}")
    return b"x"


def variable(world, name):
    return os.environ[name]


def close_slowly(world, seconds):
    """Rank 0 fails, and takes so long to close its groups; rank 1 waited for it in vain."""
    module = import_module("slipstream.distributed.world")
    if world.rank == 0:
        close = module._close

        def slowly(failed):
            module._close = close
            time.sleep(seconds)
            close(failed)

        module._close = slowly
        raise ValueError("the cause")
    raise StageError("Stage 1 waited for stage 0 in vain")
