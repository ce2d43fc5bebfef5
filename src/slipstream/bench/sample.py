"""What one rank does for a sample: build a contender, warm it up, time its updates, note its peak memory.

`take_sample` builds one contender anew, so it shares memory with no other, and one that fails takes nothing with it but
its own sample. `take_turns` keeps several side by side and times them a few updates each, in turn: cores are slow for a
second at a time, and what is compared must fit into one such stretch.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import resource
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist

from slipstream.bench.contenders import Run, build_run
from slipstream.bench.work import Work
from slipstream.distributed import World
from slipstream.distributed.groups import carrier
from slipstream.errors import UserError

MOST_WARM_UP = 120  # updates, for a schedule that tries depths on a GPU


@dataclass(frozen=True)
class RankSample:
    """One rank's clock readings (seconds, one clock for all processes of a machine), memory and losses."""

    start: float
    ends: tuple[float, ...]  # of each group
    finish: float
    cpu_seconds: float  # of all the process's threads
    peak_memory_bytes: int = 0
    held_bytes: int = 0  # of a GPU's memory, when nothing is in flight
    losses: tuple[float, ...] = ()
    carrier: str = ""  # of the device's tensors: gloo, nccl, or a group of ours
    in_flight: int | None = None


def take_sample(world: World, name: str, work: Work, warmup: int, updates: int) -> RankSample:
    """Time `updates` updates of the contender `name` from an empty pipeline to an empty pipeline."""
    device = work.device_of(world.rank)
    with _told():
        resting_bytes = _reset_peak_memory(device)
        run = build_run(name, work, world.rank)
        losses = warm_up(run, warmup)
        if device.type == "cuda":  # not of a depth that was tried and not taken
            torch.cuda.reset_peak_memory_stats(device)
        sample = replace(
            _timed(run, device, updates),
            peak_memory_bytes=_peak_memory_bytes(device) - resting_bytes,
            held_bytes=torch.cuda.memory_allocated(device) - resting_bytes if device.type == "cuda" else 0,
            losses=losses,
            carrier=carrier(None, device),
        )
        run.close()
        return sample


def take_turns(
    world: World, names: Sequence[str], work: Work, warmup: int, updates: int, rounds: int
) -> list[dict[str, RankSample]]:
    """Round by round, `updates` updates of every contender, in an order that rotates. Memory is not looked at."""
    device = work.device_of(world.rank)
    with _told():
        runs = {name: build_run(name, work, world.rank) for name in names}
        for run in runs.values():
            warm_up(run, warmup)
        samples = [
            {name: _timed(runs[name], device, updates) for name in rotated(names, turn)}
            for turn in range(rounds)
        ]
        for run in runs.values():
            run.close()
        return samples


def rotated(names: Sequence[str], turn: int) -> list[str]:
    """Nobody always comes first."""
    shift = turn % max(1, len(names))
    return [*names[shift:], *names[:shift]]


@contextlib.contextmanager
def _told() -> Iterator[None]:
    """A contender that fails is a result of the bench, with its own words."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{type(error).__name__}: {error}") from error


def warm_up(run: Run, updates: int) -> tuple[float, ...]:
    """The losses of its last group, on the rank that has them."""
    done = 0
    while done < updates or (not run.settled and done < MOST_WARM_UP):
        run.step()
        done += 1
    run.drain()
    return tuple(float(loss.detach()) for loss in run.losses)


def _timed(run: Run, device: torch.device, updates: int) -> RankSample:
    run.ends.clear()
    settle(device)
    dist.barrier()
    start, cpu_start = time.perf_counter(), time.process_time()
    for _ in range(updates):
        run.step()
    run.drain()
    settle(device)
    finish, cpu_finish = time.perf_counter(), time.process_time()
    dist.barrier()
    return RankSample(start, tuple(run.ends), finish, cpu_finish - cpu_start, in_flight=run.in_flight)


def settle(device: torch.device) -> None:
    """Let a GPU finish what is queued; only at the ends of a sample."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _reset_peak_memory(device: torch.device) -> int:
    """Give freed memory back, forget the high-water mark, and return what is held now."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.ipc_collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    elif sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)  # else a sample would live in what the last one left behind
        Path("/proc/self/clear_refs").write_text("5")
    return _peak_memory_bytes(device)


def _peak_memory_bytes(device: torch.device) -> int:
    """High-water mark of the GPU's memory, or of the resident set; since the last reset where there is one."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    status = Path("/proc/self/status")
    if status.exists():
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    scale = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale
