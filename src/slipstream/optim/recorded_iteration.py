"""An optimizer's iteration on a stack of small matrices as one CUDA graph.

Fifty kernels that run for ten microseconds each take the host longer to call than the device to run. Recorded they are
one launch. The stack lies at a fixed address; so does what comes out, which is good until the next replay. Both stay
allocated, so only small stacks are recorded, and only those that come again.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from math import prod

import torch
from torch import Tensor

from slipstream.cuda_graphs import beside, captured

MOST_ELEMENTS = 2**23  # of a stack; the kernels of a larger one run for longer than they take to call
MOST_RECORDINGS = 32
PLAIN_STEPS = 2  # before a stack is recorded

Kind = tuple[torch.Size, torch.dtype, torch.device, int, int]  # and steps, and the stream

_met: dict[Kind, int] = {}
_recordings: dict[Kind, RecordedIteration | None] = {}


class RecordedIteration:
    """`body`, which may overwrite the stack it is given, on a stack of its own."""

    def __init__(self, kind: Kind, body: Callable[[Tensor], Tensor]) -> None:
        shape, dtype, device = kind[:3]
        self.memory = torch.zeros(shape, dtype=dtype, device=device)
        with beside(torch.cuda.Stream(device)):
            body(self.memory)  # libraries make their workspaces for this stream
            self._graph, self._found = captured(lambda: body(self.memory))

    def replayed(self) -> Tensor:
        """Of what is in `memory`."""
        self._graph.replay()
        return self._found


def worth_recording(kind: Kind, body: Callable[[Tensor], Tensor]) -> RecordedIteration | None:
    """The recording of a kind of stacks that is small and has come up before."""
    if torch.cuda.is_current_stream_capturing():  # someone records a whole step
        return None
    if kind in _recordings:
        return _recordings[kind]
    if prod(kind[0]) > MOST_ELEMENTS or len(_recordings) >= MOST_RECORDINGS:
        return None
    _met[kind] = _met.get(kind, 0) + 1
    if _met[kind] <= PLAIN_STEPS:
        return None
    try:
        _recordings[kind] = RecordedIteration(kind, body)
    except RuntimeError as error:
        _recordings[kind] = None
        warnings.warn(
            f"A stack of shape {tuple(kind[0])} cannot be recorded as a CUDA graph, so its kernels are launched one by "
            f"one: {str(error).splitlines()[0]}",
            stacklevel=2,
        )
    return _recordings[kind]
