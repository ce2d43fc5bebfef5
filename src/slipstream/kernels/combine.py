"""Lists of tensors combined in one launch, dtypes as they come.

    out = a x + b y        for each tensor of three lists, computed in float32; a second such sum on request

torch's own list operations take the slow way, a launch per tensor, as soon as dtypes differ. That is where a
training step on bf16 weights and an fp32 master needs them: gradients into their sums, momentum into the stacks
of Newton-Schulz, directions into weights, the master into a bank.

The kernel reads addresses from a table that lives for the call; its copy to the device is ordered before the
launch by the stream. How lists of given sizes are cut into blocks is kept.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import lru_cache, reduce
from operator import or_

import torch
from torch import Tensor

from slipstream.kernels.compiler import launching_on, runs_on

Tensors = Sequence[Tensor]

_DTYPES = {torch.float32, torch.bfloat16, torch.float16}
_BLOCK, _PIECE = 8192, 2048  # elements of a program, and of one of its rounds


def can_combine(*lists: Tensors) -> bool:
    """Whether `combine` takes these: one dtype a list, contiguous, on a device with Triton."""
    if not runs_on(lists[0][0].device):
        return False
    dtypes = [{tensor.dtype for tensor in tensors} for tensors in lists]
    return all(len(found) == 1 and found <= _DTYPES for found in dtypes) and all(
        all(map(Tensor.is_contiguous, tensors)) for tensors in lists
    )


@lru_cache(maxsize=64)
def _blocks(sizes: tuple[int, ...], device: torch.device) -> Tensor:
    """(tensor, number of the block in it, size of the tensor) for every block."""
    cut = [
        (tensor, number, size) for tensor, size in enumerate(sizes) for number in range(-(-size // _BLOCK))
    ]
    return _on_device(torch.tensor(cut), device)


def _on_device(table: Tensor, device: torch.device) -> Tensor:
    return table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table


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
    addresses = array("q", [tensor.data_ptr() for tensors in (outs, xs, ys, others) for tensor in tensors])
    blocks = _blocks(sizes, device)
    if not len(blocks):  # a shard may hold nothing of any tensor
        return
    with launching_on(device):
        combine_lists[(len(blocks),)](  # pyright: ignore[reportIndexIssue]
            _on_device(torch.frombuffer(addresses, dtype=torch.int64), device), blocks, len(outs), a, b, c, d,
            out_type=types[outs[0].dtype], x_type=types[xs[0].dtype], y_type=types[ys[0].dtype],
            also_type=types[others[0].dtype] if others else None,
            aligned=reduce(or_, addresses) % 16 == 0 and reduce(or_, sizes) % 16 == 0,
            BLOCK=_BLOCK, PIECE=_PIECE, num_warps=4,
        )  # fmt: skip
