"""Which of torch's attention kernels is tried first. Invariant: what is computed is the same, up to rounding.

torch takes the first kernel of its order that can do the shapes at hand, and the order depends on the versions of
torch and cuDNN. On Hopper cuDNN's kernels are written for the chip and FlashAttention 2's, which older versions
try first, for the one before it.

In compiled code the kernel is chosen when the code is made. torch keeps such code, in the process and on disk, and
finds it again by what was to be computed, whatever order held when it was made. So code made under one order is kept
apart from that made under another.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.compiler.config
from torch.nn.attention import SDPBackend, sdpa_kernel

ORDERS = {
    "cudnn": (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION),
    "flash": (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION),
}
_LAST = (SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH)
_compiler: Any = torch.compiler.config  # its `patch` is made at run time
_entered: list[str] = []  # the order under which this process compiled last


@contextmanager
def attention_kernel(first: str) -> Iterator[None]:
    """Inside, `first` ("cudnn" or "flash") is preferred; "auto" leaves torch's own order."""
    _forget_code_of_others(first)
    if first == "auto":
        yield
        return
    tag = f"{_compiler.cache_key_tag} attention={first}"
    with (
        sdpa_kernel([*ORDERS[first], *_LAST], set_priority=True),
        _compiler.patch(cache_key_tag=tag),  # of what lies on disk
    ):
        yield


def _forget_code_of_others(first: str) -> None:
    """What this process has compiled itself is known by no tag."""
    if _entered and _entered[0] != first and "torch._dynamo" in sys.modules:  # else nothing was compiled
        torch.compiler.reset()
    _entered[:] = [first]
