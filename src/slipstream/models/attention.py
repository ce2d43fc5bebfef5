"""Which of torch's attention kernels is tried first. Invariant: what is computed is the same, up to rounding.

torch takes the first kernel of its order that can do the shapes at hand, and the order depends on the versions of
torch and cuDNN. On Hopper cuDNN's kernels are written for the chip and FlashAttention 2's, which older versions
try first, for the one before it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.nn.attention import SDPBackend, sdpa_kernel

ORDERS = {
    "cudnn": (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION),
    "flash": (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION),
}
_LAST = (SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH)


@contextmanager
def attention_kernel(first: str) -> Iterator[None]:
    """Inside, `first` ("cudnn" or "flash") is preferred; "auto" leaves torch's own order."""
    if first == "auto":
        yield
        return
    with sdpa_kernel([*ORDERS[first], *_LAST], set_priority=True):
        yield
