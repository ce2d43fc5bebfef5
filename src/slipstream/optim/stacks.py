"""Many matrices orthogonalised, equal shapes stacked. How they are stacked follows from their shapes and is kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from slipstream.optim.newton_schulz import STEPS, compute_dtype, orthogonalise

Fill = Callable[[list[int], list[Tensor]], None]

# Elements of one stack: enough to fill the device, few enough for the cache (CPU) or for the scratch (GPU).
_STACK_ELEMENTS = {"cpu": 2**21, "cuda": 2**27}


@dataclass(frozen=True)
class Stack:
    """Tensors [R, C] or [E, R, C] (E matrices) of equal R and C that are orthogonalised together."""

    indices: list[int]
    shapes: list[torch.Size]
    dtype: torch.dtype
    device: torch.device

    @cached_property
    def shape(self) -> torch.Size:
        count = sum(shape[:-2].numel() for shape in self.shapes)
        return torch.Size((count, *self.shapes[0][-2:]))

    def empty(self) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=self.device)

    def views(self, stack: Tensor) -> list[Tensor]:
        """The part of each tensor in memory of this shape."""
        first = self.shapes[0]
        if all(shape == first for shape in self.shapes):
            return list(stack.view(-1, *first).unbind())
        parts = stack.split([shape[:-2].numel() for shape in self.shapes])
        return [part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)]


def stacks(like: Sequence[Tensor]) -> list[Stack]:
    """Tensors that share a stack, in lists of about equal size near the device's limit."""
    groups: dict[tuple[object, ...], list[int]] = {}
    for i, tensor in enumerate(like):
        if tensor.numel():
            groups.setdefault((tensor.shape[-2:], tensor.dtype, tensor.device), []).append(i)
    found = []
    for indices in groups.values():
        first = like[indices[0]]
        limit = _STACK_ELEMENTS.get(first.device.type, _STACK_ELEMENTS["cuda"])
        pieces = max(1, round(sum(like[i].numel() for i in indices) / limit))
        size = -(-len(indices) // pieces)
        for start in range(0, len(indices), size):
            part = indices[start : start + size]
            found.append(Stack(part, [like[i].shape for i in part], compute_dtype(first), first.device))
    return found


def orthogonal_stacks(
    stacks: Sequence[Stack], fill: Fill, steps: int = STEPS
) -> Iterator[tuple[list[int], list[Tensor]]]:
    """`fill(indices, outs)` writes those tensors into their places in a stack.

    Yields the indices of a stack and, for each, its orthogonalised tensor.
    """
    for stack in stacks:
        memory = stack.empty()
        fill(stack.indices, stack.views(memory))
        yield stack.indices, stack.views(orthogonalise(memory, steps))
