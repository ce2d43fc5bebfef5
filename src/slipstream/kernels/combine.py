"""Lists of tensors combined in one launch, dtypes as they come.

    out = a x + b y        for each tensor of three lists, computed in float32; a second such sum on request

torch's own list operations take the slow way, a launch per tensor, as soon as dtypes differ. That is where a
training step on bf16 weights and an fp32 master needs them: gradients into their sums, momentum into the stacks
of Newton-Schulz, directions into weights, the master into a bank.

The kernel reads addresses from a table. A table lives as long as the lists it was made for are used again, and
its copy to the device is ordered before the launch by the stream.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from slipstream.kernels.compiler import runs_on

Tensors = Sequence[Tensor]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_TABLES = 128  # kept: a few for each list operation of a training step
_BLOCK, _PIECE = 8192, 2048  # elements of a program, and of one of its rounds


def can_combine(*lists: Tensors) -> bool:
    """Whether `combine` takes these: one dtype a list, contiguous, all on one device with Triton."""
    first = lists[0][0]
    if not runs_on(first.device):
        return False
    return all(
        tensors[0].dtype in _DTYPES
        and all(
            t.dtype == tensors[0].dtype and t.device == first.device and t.is_contiguous() for t in tensors
        )
        for tensors in lists
    )


class _Tables:
    """Tables on the device by what they were made from; the least recently used go first."""

    def __init__(self, make: Callable[[tuple[int, ...]], list[int]]) -> None:
        self.make = make
        self.kept: OrderedDict[tuple[object, ...], Tensor] = OrderedDict()

    def get(self, values: tuple[int, ...], device: torch.device) -> Tensor:
        key = (device, values)
        if (table := self.kept.pop(key, None)) is None:
            table = torch.tensor(self.make(values), dtype=torch.int64)
            if device.type == "cuda":
                table = table.pin_memory().to(device, non_blocking=True)
            if len(self.kept) >= _TABLES:
                self.kept.popitem(last=False)
        self.kept[key] = table
        return table


def _cut(sizes: tuple[int, ...]) -> list[int]:
    """(tensor, number of the block in it, size of the tensor) for every block."""
    return [
        value
        for tensor, size in enumerate(sizes)
        for number in range(-(-size // _BLOCK))
        for value in (tensor, number, size)
    ]


_addresses, _blocks = _Tables(list), _Tables(_cut)


def combine(
    outs: Tensors,
    a: float,
    xs: Tensors,
    b: float,
    ys: Tensors,
    also: tuple[Tensors, float, float] | None = None,
) -> None:
    """outs ← a xs + b ys and, given `also` = (others, c, d), others ← c xs + d ys. `outs` may be `xs` or `ys`."""
    import triton.language as tl

    from slipstream.kernels.programs import combine_lists

    types = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
    others, c, d = also or ((), 0.0, 0.0)
    device, sizes = outs[0].device, tuple(out.numel() for out in outs)
    addresses = tuple(t.data_ptr() for tensors in (outs, xs, ys, others) for t in tensors)
    blocks = _blocks.get(sizes, device)
    combine_lists[(len(blocks) // 3,)](  # pyright: ignore[reportIndexIssue]
        _addresses.get(addresses, device), blocks, len(outs), a, b, c, d,
        out_type=types[outs[0].dtype], x_type=types[xs[0].dtype], y_type=types[ys[0].dtype],
        also_type=types[others[0].dtype] if others else None,
        aligned=all(value % 16 == 0 for value in addresses + sizes),
        BLOCK=_BLOCK, PIECE=_PIECE, num_warps=4,
    )  # fmt: skip
