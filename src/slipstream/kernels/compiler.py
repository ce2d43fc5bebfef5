"""Where kernels can run. Triton comes with torch's CUDA builds; its interpreter serves the tests on a CPU."""

from __future__ import annotations

import contextlib
import os
from functools import lru_cache
from importlib.util import find_spec

import torch

HAS_TRITON = find_spec("triton") is not None
INTERPRETED = HAS_TRITON and os.environ.get("TRITON_INTERPRET") == "1"

MOST_MATRICES = 65_535  # of a stack: each is a row of the grid of programs, and CUDA allows no more rows


@lru_cache(maxsize=16)
def runs_on(device: torch.device) -> bool:
    """Whether a kernel may be launched on tensors of `device`: NVIDIA, with tensor cores for bf16."""
    if not HAS_TRITON:
        return False
    return INTERPRETED or (device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0))


def launching_on(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Inside, Triton launches where the tensors are: it takes the current device, whatever it is given."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
