"""What one rank does for one sample: build a contender, warm it up, time its updates, note its peak memory.

Every sample builds its contender anew, so contenders never share memory, and one that fails takes nothing
with it but its own sample.
"""

from __future__ import annotations

import ctypes
import gc
import resource
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist

from slipstream.bench.bound import BoundRun
from slipstream.bench.engine import EngineRun
from slipstream.bench.rivals import RIVALS, RivalRun
from slipstream.bench.work import Work
from slipstream.distributed import World
from slipstream.errors import UserError


class Run(Protocol):
    """One rank of a contender. `step` hands in one group."""

    ends: list[float]  # when this rank was done with each group's work; complete after `drain`
    losses: list[torch.Tensor]  # of the last group, on the rank that computes them

    def step(self) -> None: ...
    def drain(self) -> None: ...


@dataclass(frozen=True)
class RankSample:
    """One rank's clock readings (seconds, one clock for all processes of a machine), memory and losses."""

    start: float
    ends: tuple[float, ...]  # of each group
    finish: float
    cpu_seconds: float  # of all the process's threads
    peak_memory_bytes: int
    losses: tuple[float, ...]


def take_sample(world: World, name: str, work: Work, warmup: int, updates: int) -> RankSample:
    """Time `updates` updates of the contender `name` from an empty pipeline to an empty pipeline."""
    try:
        return _take_sample(world.rank, name, work, warmup, updates)
    except UserError:
        raise
    except Exception as error:  # a contender that fails is a result of the bench, with its own words
        raise UserError(f"{type(error).__name__}: {error}") from error


def _take_sample(rank: int, name: str, work: Work, warmup: int, updates: int) -> RankSample:
    resting_bytes = reset_peak_memory()
    run = build_run(name, work, rank)
    for _ in range(warmup):
        run.step()
    run.drain()
    losses = tuple(float(loss.detach()) for loss in run.losses)
    run.ends.clear()
    dist.barrier()
    start, cpu_start = time.perf_counter(), time.process_time()
    for _ in range(updates):
        run.step()
    run.drain()
    finish, cpu_finish = time.perf_counter(), time.process_time()
    dist.barrier()
    peak = peak_memory_bytes() - resting_bytes
    return RankSample(start, tuple(run.ends), finish, cpu_finish - cpu_start, peak, losses)


def build_run(name: str, work: Work, rank: int) -> Run:
    if name == "bound":
        return BoundRun(work, rank)
    if name == "slipstream":
        return EngineRun(work, rank)
    return RivalRun(RIVALS[name], work, rank)


def reset_peak_memory() -> int:
    """Give freed memory back, forget the process's high-water mark, and return what it holds now."""
    gc.collect()
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)  # else a sample would live in what the last one left behind
        Path("/proc/self/clear_refs").write_text("5")
    return peak_memory_bytes()


def peak_memory_bytes() -> int:
    """High-water mark of the resident set; since the last reset where the system can reset it."""
    status = Path("/proc/self/status")
    if status.exists():
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    scale = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale
