"""What travels between two stages: some tensors of known shapes. The shapes are told once, host to host."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.errors import UserError

_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16,
        torch.int8, torch.uint8, torch.bool,
    )
}  # fmt: skip


class TensorSpec(NamedTuple):
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool


Spec = tuple[TensorSpec, ...]


def spec_of(tensors: Sequence[Tensor]) -> Spec:
    return tuple(TensorSpec(tuple(t.shape), t.dtype, t.requires_grad) for t in tensors)


def differentiable(spec: Spec) -> Spec:
    """The part of a message that gradients come back for."""
    return tuple(s for s in spec if s.requires_grad)


def blank(spec: Spec, device: torch.device) -> list[Tensor]:
    return [torch.zeros(s.shape, dtype=s.dtype, device=device) for s in spec]


def encode(spec: Spec) -> bytes:
    rows = []
    for shape, dtype, requires_grad in spec:
        name = str(dtype).removeprefix("torch.")
        if name not in _DTYPES:
            raise UserError(f"A stage returned a tensor of {dtype}, which cannot be sent to the next stage.")
        rows.append([list(shape), name, requires_grad])
    return json.dumps(rows).encode()


def decode(message: bytes) -> Spec:
    rows = json.loads(message)
    return tuple(
        TensorSpec(tuple(shape), _DTYPES[name], requires_grad) for shape, name, requires_grad in rows
    )


def on_host(tensor: Tensor) -> Tensor:
    """A copy in host memory. A GPU's goes into pinned memory, and is there when its stream has come so far."""
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    return host.copy_(tensor.detach(), non_blocking=tensor.is_cuda)
