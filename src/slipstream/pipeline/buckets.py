"""What travels in one message of a reduction or a broadcast: a large tensor as it is, small ones of a dtype together.

A message of a megabyte fills a link; below that its fixed cost counts. So only small tensors are copied side by side,
at most `BUCKET_BYTES` at a time, and the extra memory is that of norms and biases, not of the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.lists import copy_

SMALL_BYTES = 1 << 20
BUCKET_BYTES = 25 << 20


@dataclass(frozen=True)
class Bucket:
    """`flat` is what travels; `tensors` are what it was packed from, none where it is the tensor itself."""

    flat: Tensor
    tensors: tuple[Tensor, ...] = ()

    def unpack(self) -> None:
        """Back into the tensors."""
        parts = self.flat.split([tensor.numel() for tensor in self.tensors]) if self.tensors else ()
        pairs = zip(parts, self.tensors, strict=True)
        copy_(list(self.tensors), [part.view(tensor.shape) for part, tensor in pairs])


def buckets(tensors: Sequence[Tensor], small: int | None = None, limit: int = BUCKET_BYTES) -> list[Bucket]:
    """In an order that follows from sizes and dtypes alone, so that all ranks have the same."""
    small = SMALL_BYTES if small is None else small
    found: list[Bucket] = []
    packed: dict[torch.dtype, list[Tensor]] = {}
    filled: dict[torch.dtype, int] = {}
    for tensor in tensors:
        if tensor.nbytes >= small and tensor.is_contiguous():
            found.append(Bucket(tensor))
            continue
        if packed.get(tensor.dtype) and filled[tensor.dtype] + tensor.nbytes > limit:
            found.append(_pack(packed.pop(tensor.dtype)))
        packed.setdefault(tensor.dtype, []).append(tensor)
        filled[tensor.dtype] = sum(member.nbytes for member in packed[tensor.dtype])
    return found + [_pack(members) for members in packed.values()]


def _pack(tensors: list[Tensor]) -> Bucket:
    return Bucket(torch.cat([tensor.reshape(-1) for tensor in tensors]), tuple(tensors))
