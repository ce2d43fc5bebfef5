"""What a kernel over a list of tensors reads: where each tensor lies, and which block of which tensor is a program's.

Lists come again from update to update, at the same addresses as a rule, so what was copied to the device is kept: a
copy takes the host as long as the launch. It is kept by stream, which orders the copy before every launch that reads
it.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, reduce
from operator import or_

import torch
from torch import Tensor

Tensors = Sequence[Tensor]

_keeping: list[Tensor] | None = None

BLOCK, PIECE = 8192, 2048  # elements of a program, and of one of its rounds


@lru_cache(maxsize=64)
def _blocks(sizes: tuple[int, ...], device: torch.device, stream: int) -> Tensor:
    """(tensor, number of the block in it, size of the tensor) for every block."""
    cut = [(tensor, number, size) for tensor, size in enumerate(sizes) for number in range(-(-size // BLOCK))]
    return _on_device(torch.tensor(cut), device)


def _on_device(table: Tensor, device: torch.device) -> Tensor:
    if device.type != "cuda":
        return table
    if _keeping is not None and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("a table of addresses is not on the device yet.")
    return table.pin_memory().to(device, non_blocking=True)


def tables(*lists: Tensors) -> tuple[Tensor, Tensor, bool] | None:
    """Addresses of the tensors of all lists one after the other, the blocks, and whether everything begins on 16 bytes.

    The lists are of equal sizes; None where they hold no element (a shard may have nothing of any tensor).
    """
    device, sizes = lists[0][0].device, tuple(tensor.numel() for tensor in lists[0])
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    blocks_of, addresses_of = _blocks, _addresses
    if _keeping is None and device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        # What is copied now is there when the recording runs, and not before.
        blocks_of, addresses_of = _blocks.__wrapped__, _addresses.__wrapped__
    blocks = blocks_of(sizes, device, stream)
    if not len(blocks):
        return None
    addresses = tuple(tensor.data_ptr() for tensors in lists for tensor in tensors)
    aligned = reduce(or_, addresses) % 16 == 0 and reduce(or_, sizes) % 16 == 0
    found = addresses_of(addresses, device, stream)
    if _keeping is not None:
        _keeping.extend((found, blocks))
    return found, blocks, aligned


@lru_cache(maxsize=128)
def _addresses(addresses: tuple[int, ...], device: torch.device, stream: int) -> Tensor:
    return _on_device(torch.frombuffer(array("q", addresses), dtype=torch.int64), device)


@contextmanager
def kept_tables() -> Iterator[list[Tensor]]:
    """All tables that are handed out meanwhile, for whoever records launches: they are needed for as long as those.
    They have to be there already when a capture asks for them, or it fails: what is copied inside it is not kept."""
    global _keeping
    before, _keeping = _keeping, []
    try:
        yield _keeping
    finally:
        _keeping = before
