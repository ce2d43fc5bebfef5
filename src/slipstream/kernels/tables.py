"""What a kernel over a list of tensors reads: where each tensor lies, and which block of which tensor is a program's.

Addresses live for the call; their copy to the device is ordered before the launch by the stream. How lists of given
sizes are cut into blocks is kept.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import lru_cache, reduce
from operator import or_

import torch
from torch import Tensor

Tensors = Sequence[Tensor]

BLOCK, PIECE = 8192, 2048  # elements of a program, and of one of its rounds


@lru_cache(maxsize=64)
def _blocks(sizes: tuple[int, ...], device: torch.device) -> Tensor:
    """(tensor, number of the block in it, size of the tensor) for every block."""
    cut = [(tensor, number, size) for tensor, size in enumerate(sizes) for number in range(-(-size // BLOCK))]
    return _on_device(torch.tensor(cut), device)


def _on_device(table: Tensor, device: torch.device) -> Tensor:
    return table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table


def tables(*lists: Tensors) -> tuple[Tensor, Tensor, bool] | None:
    """Addresses of the tensors of all lists one after the other, the blocks, and whether everything begins on 16 bytes.

    The lists are of equal sizes; None where they hold no element (a shard may have nothing of any tensor).
    """
    device, sizes = lists[0][0].device, tuple(tensor.numel() for tensor in lists[0])
    blocks = _blocks(sizes, device)
    if not len(blocks):
        return None
    addresses = array("q", [tensor.data_ptr() for tensors in lists for tensor in tensors])
    aligned = reduce(or_, addresses) % 16 == 0 and reduce(or_, sizes) % 16 == 0
    return _on_device(torch.frombuffer(addresses, dtype=torch.int64), device), blocks, aligned
