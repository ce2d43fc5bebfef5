"""An optimizer's step on small matrices as one CUDA graph.

Two hundred kernels that run for ten microseconds each take the host longer to call than the device to run. Recorded
they are one launch, whatever they are. A recording holds for the places of everything it reads and writes. Weights and
state stay where they are; gradients lie elsewhere in every update of a pipeline, which has two or three sums of them
under way, so they are copied to one place first. What else changes between steps (the learning rate) is read from the
device. Recordings work in one another's memory, one after the other on one stream, and that memory stays allocated: so
only steps on small matrices are recorded, and only those that come again.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.cuda_graphs import beside, captured
from slipstream.kernels.compiler import runs_on
from slipstream.kernels.tables import kept_tables
from slipstream.lists import copy_
from slipstream.optim.newton_schulz import Stack

MOST_ELEMENTS = 2**25  # of a step; the kernels of a larger one run for longer than they take to call
MOST_RECORDINGS = 8  # of an optimizer
MOST_MET = 256  # kinds of steps that are remembered: places that never come again are forgotten
PLAIN_STEPS = 2  # of a kind, before it is recorded

Numbers = list[tuple[float, float]]
# The step, with its numbers, its gradients, and memory for its stacks.
Body = Callable[[Tensor, list[Tensor], list[Tensor]], object]


class Memory(NamedTuple):
    """What recordings of steps on the same shapes work in."""

    numbers: Tensor
    grads: list[Tensor]
    stacks: list[Tensor]


class RecordedStep:
    """`body`, which writes to `changed`. Making it changes nothing there."""

    def __init__(self, body: Body, changed: Sequence[Tensor], memory: Memory, pool: object) -> None:
        self._memory = memory
        before = [tensor.clone() for tensor in changed]
        with beside(torch.cuda.Stream(changed[0].device)), kept_tables() as self._tables:
            # Libraries make their workspaces for this stream, and addresses are copied to the device.
            try:
                body(*memory)
            finally:  # it may run out of memory in the middle
                copy_(changed, before)
            self._graph, _ = captured(lambda: body(*memory), pool)

    def replay(self, numbers: Numbers, grads: Sequence[Tensor]) -> None:
        on_host = torch.tensor(numbers, pin_memory=self._memory.numbers.is_cuda)
        self._memory.numbers.copy_(on_host, non_blocking=True)
        copy_(self._memory.grads, grads)
        self._graph.replay()


class RecordedSteps:
    """Of one optimizer, by what tells them apart."""

    def __init__(self) -> None:
        self._met: Counter[Hashable] = Counter()
        self._recordings: dict[Hashable, RecordedStep] = {}
        self._pool: object = None
        self._memories: dict[Hashable, Memory] = {}
        self._broken = False

    def run(
        self,
        kind: Hashable,
        body: Body,
        changed: Sequence[Tensor],
        grads: Sequence[Tensor],
        stacks: Sequence[Stack],
        numbers: Numbers,
    ) -> bool:
        """Whether the step was done; False: do it plainly. `kind` tells everything but the gradients and numbers."""
        device = changed[0].device
        if self._broken or not worth_recording(device, changed):
            return False
        stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
        recording = self._recordings.get((kind, stream))
        if recording is None:
            recording = self._recorded((kind, stream), body, changed, grads, stacks)
        if recording is None:
            return False
        recording.replay(numbers, grads)
        return True

    def _recorded(
        self,
        kind: tuple[Hashable, int],
        body: Body,
        changed: Sequence[Tensor],
        grads: Sequence[Tensor],
        stacks: Sequence[Stack],
    ) -> RecordedStep | None:
        if len(self._met) >= MOST_MET:
            self._met.clear()
        self._met[kind] += 1
        if self._met[kind] <= PLAIN_STEPS or len(self._recordings) >= MOST_RECORDINGS:
            return None
        if self._pool is None and changed[0].is_cuda:
            self._pool = torch.cuda.graph_pool_handle()
        try:
            memory = self._memory(kind[1], grads, stacks)
            copy_(memory.grads, grads)
            self._recordings[kind] = RecordedStep(body, changed, memory, self._pool)
        except RuntimeError as error:
            self._broken = True
            self._memories.clear()
            warnings.warn(
                "An optimizer's step cannot be recorded as a CUDA graph, so its kernels are launched one by one: "
                f"{str(error).splitlines()[0]}",
                stacklevel=2,
            )
        return self._recordings.get(kind)

    def _memory(self, stream: int, grads: Sequence[Tensor], stacks: Sequence[Stack]) -> Memory:
        shapes = (stream, *((grad.shape, grad.dtype) for grad in grads), *(stack.shape for stack in stacks))
        if shapes not in self._memories:
            numbers = torch.zeros(len(stacks), 2, device=grads[0].device)
            own = [torch.empty_like(grad) for grad in grads]
            self._memories[shapes] = Memory(numbers, own, [stack.empty() for stack in stacks])
        return self._memories[shapes]


def worth_recording(device: torch.device, changed: Sequence[Tensor]) -> bool:
    """Whether it is so small that the host takes longer to call it than a GPU to run it, and can be recorded."""
    if device.type != "cuda" or not runs_on(device):
        return False
    # Someone else records a whole step.
    return sum(t.numel() for t in changed) <= MOST_ELEMENTS and not torch.cuda.is_current_stream_capturing()
