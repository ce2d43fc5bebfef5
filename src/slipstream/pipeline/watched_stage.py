"""Torch's pipeline stage as this package runs it under torch's own schedules: the one class that overrides it.

Every schedule of torch computes through three methods of its stages: a forward, a backward or its input half, the
weight half. They have no underscore and are no public interface either; a test holds their signatures.

Torch keeps no record of what its schedules do: `TorchTrace` times these calls and the loss, which is a part of the last
stage's forward, as in our engine. What a stage waits for is waited for before them, on a GPU in the order of its
stream, so it is in no span.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from slipstream.pipeline.trace import Moment, Trace
from slipstream.schedule.actions import Action, Kind

Loss = Callable[[Any, Any], Tensor]


class TorchTrace(Trace):
    """The trace of the stages of one rank. `group` is the one whose actions run; its owner counts it up."""

    def __init__(self, stage: int, rank: int, device: torch.device) -> None:
        super().__init__(stage, device, rank)
        self.group = 0
        self._open: tuple[Moment, Action] | None = None  # the last stage's forward, until its loss is there

    @contextlib.contextmanager
    def timed(self, kind: Kind, stage: int, microbatch: int, until_loss: bool = False) -> Iterator[None]:
        """An action of one of the stages; `until_loss`: a forward ends with its loss."""
        began = self.begin()
        yield
        action = Action(kind, stage, microbatch, self.group, self.group)
        if until_loss and kind is Kind.FORWARD:
            self._open = began, action
        else:
            self.end(began, action)

    def update(self, group: int) -> contextlib.AbstractContextManager[None]:
        return self.action(Kind.UPDATE, group, version=group + 1)

    def with_loss(self, loss: Loss) -> Loss:
        """`loss`, as the end of the last stage's forward."""

        def timed(output: Any, target: Any) -> Tensor:
            value = loss(output, target)
            if self._open is not None:
                began, action = self._open
                self._open = None
                self.end(began, action)
            return value

        return timed


class WatchedStage(PipelineStage):
    """A stage whose actions are timed by `trace`, and which calls `prepare` before a microbatch's forward and `collect`
    when it has its gradients."""

    def __init__(
        self,
        module: nn.Module,
        index: int,
        count: int,
        device: torch.device,
        group: dist.ProcessGroup | None = None,
        *,
        trace: TorchTrace | None = None,
        collect: Callable[[], None] | None = None,
        prepare: Callable[[int], None] | None = None,
    ) -> None:
        super().__init__(module, index, count, device, group=group)
        self._watching, self._collect, self._prepare = trace, collect, prepare

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        if self._prepare is not None:
            self._prepare(fwd_chunk_id)
        with self._timed(Kind.FORWARD, fwd_chunk_id):
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        with self._timed(Kind.BACKWARD if full_backward else Kind.BACKWARD_INPUT, bwd_chunk_id):
            super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
            if full_backward and self._collect is not None:
                self._collect()

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        with self._timed(Kind.BACKWARD_WEIGHT, bwd_chunk_id):
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward)
            if self._collect is not None:
                self._collect()

    def _timed(self, kind: Kind, microbatch: int) -> contextlib.AbstractContextManager[None]:
        if self._watching is None:
            return contextlib.nullcontext()
        return self._watching.timed(kind, self.stage_index, microbatch, until_loss=self.is_last)

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        """Not to its own rank.

        Torch 2.11 opens the connections of a stage with a message to and from both neighbours, also where a neighbour
        is on the same rank, as the two at the tip of a V are. gloo has no connection of a rank with itself ("Pair is
        not connected"). Every later message between such two is handed over in memory. Later torches do not send it.
        """
        greetings = getattr(super(), "_get_init_p2p_neighbors_ops", list)()
        return [op for op in greetings if op.group_peer != self.group_rank]
