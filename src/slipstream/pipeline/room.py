"""How many microbatches more a stage's GPU could hold between forward and backward (`depth.py` asks).

What a forward leaves behind is seen in the allocator's count, which is the host's and waits for nothing. The GPU is
asked what is free once, before anything runs on it: ranks that share it have equal parts of that.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator

import torch
import torch.distributed as dist

MARGIN = 0.05  # of what this process may have: a cache has holes


class Room:
    """Of one stage, after its weights and communicators have been made."""

    def __init__(self, device: torch.device, shared: bool = False) -> None:
        """`shared`: other ranks are on this GPU."""
        self._device, self._on_gpu = device, device.type == "cuda"
        self._left_by_forward = 0
        self.in_pools = False  # microbatches live in memory of recordings, which counts as free between them
        self._budget = _budget(device, shared) if self._on_gpu else 0.0

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        """Around one: what it leaves is what a microbatch in flight takes."""
        if not self._on_gpu:
            yield
            return
        before = torch.cuda.memory_allocated(self._device)
        yield
        left = torch.cuda.memory_allocated(self._device) - before
        self._left_by_forward = max(self._left_by_forward, left)

    def microbatches(self) -> float:
        """How many more than there have been at most. On a host as many as one likes."""
        if not self._on_gpu or not self._left_by_forward:
            return math.inf
        taken = torch.cuda.memory_reserved if self.in_pools else torch.cuda.max_memory_allocated
        free = (1 - MARGIN) * self._budget - taken(self._device)
        return max(0.0, free // self._left_by_forward)


def _budget(device: torch.device, shared: bool) -> float:
    """Bytes that this process may have: what it has, and its part of what is free."""
    free, _ = torch.cuda.mem_get_info(device)
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE") or dist.get_world_size()) if shared else 1
    return torch.cuda.memory_reserved(device) + free / math.ceil(ranks / torch.cuda.device_count())
