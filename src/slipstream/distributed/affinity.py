"""Each rank on cores of its own.

Stages wake each other up, and a kernel likes to wake a process where its waker runs: then two stages share a core
while another one idles, and caches are lost on the way back. So ranks that compute on the CPU divide the cores
this process may use into equal shares. With fewer cores than ranks the kernel decides.
"""

from __future__ import annotations

import os


def share(cores: list[int], rank: int, ranks: int) -> set[int]:
    """The cores of local rank `rank` of `ranks`; all of them where there are too few to divide."""
    if ranks > len(cores):
        return set(cores)
    return set(cores[rank * len(cores) // ranks : (rank + 1) * len(cores) // ranks])


def pin(rank: int, ranks: int) -> None:
    """Keep this process, and the threads it makes from now on, on its share. Where the system cannot, do nothing."""
    if not hasattr(os, "sched_setaffinity"):
        return
    global _allowed
    if _allowed is None:  # a worker serves jobs of several sizes: each divides what the process was given
        _allowed = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, share(_allowed, rank, ranks))


_allowed: list[int] | None = None
