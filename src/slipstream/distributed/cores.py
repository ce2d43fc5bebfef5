"""The cores of ranks that work on processors. Stages wake each other up, and a kernel likes to wake a process where its
waker runs: then two stages share a core while another one idles, and caches are lost on the way back. So each rank
keeps to cores of its own.
"""

from __future__ import annotations

import os
from pathlib import Path

SYSTEM = Path("/sys/devices/system/cpu")


def environment(device: str) -> dict[str, str]:
    """What ranks are started with. Those for "cpu" see no GPU: they would make a context on it, and take no cores."""
    return {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}


def allowed() -> set[int]:
    """The processors this process may use, by the numbers the system gives them."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def pin(rank: int, ranks: int) -> None:
    """Keep this process, and the threads it makes from now on, on its share. Where the system cannot, do nothing."""
    if not hasattr(os, "sched_setaffinity"):
        return
    global _given
    if _given is None:  # a worker serves jobs of several sizes: each divides what the process was given
        _given = together(allowed())
    os.sched_setaffinity(0, share(_given, rank, ranks))


_given: list[list[int]] | None = None


def share(cores: list[list[int]], rank: int, ranks: int) -> set[int]:
    """The processors of local rank `rank` of `ranks`: whole cores where there are enough of them, else the threads that
    cores run at once; all where there are too few of those as well.
    """
    parts = cores if ranks <= len(cores) else [[thread] for core in cores for thread in core]
    if ranks <= len(parts):
        parts = parts[rank * len(parts) // ranks : (rank + 1) * len(parts) // ranks]
    return {thread for core in parts for thread in core}


def together(processors: set[int], system: Path = SYSTEM) -> list[list[int]]:
    """The processors a system numbers, core by core, those of one socket side by side: its numbers follow no rule."""
    cores: dict[tuple[int, int, int], list[int]] = {}
    for number in sorted(processors):
        cores.setdefault(_core(system / f"cpu{number}" / "topology", number), []).append(number)
    return [cores[core] for core in sorted(cores)]


def _core(topology: Path, number: int) -> tuple[int, int, int]:
    """Socket, die and core of a processor; by itself where the system does not tell."""
    try:
        socket, core = (int((topology / name).read_text()) for name in ("physical_package_id", "core_id"))
    except (OSError, ValueError):
        return 0, 0, number
    try:
        die = int((topology / "die_id").read_text())
    except (OSError, ValueError):  # older kernels
        die = 0
    return socket, die, core
