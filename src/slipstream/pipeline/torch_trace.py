"""What torch's own schedules do on one rank and when, in the spans that our engine records too.

Torch keeps no record. Every one of its schedules computes through three methods of its stages (a forward, a backward or
its input half, the weight half) and the loss function: those are timed here, and nothing else of torch is touched. The
loss is a part of the last stage's forward, as in our engine. What a stage waits for is waited for before these calls,
on a GPU in the order of its stream, so it is in no span.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.pipelining import PipelineStage

from slipstream.pipeline.trace import Moment, Trace
from slipstream.schedule.actions import Action, Kind

Loss = Callable[[Any, Any], Tensor]


class TorchTrace(Trace):
    """The trace of the stages of one rank. `group` is the one whose actions run; its owner counts it up."""

    def __init__(self, stages: Sequence[PipelineStage], rank: int, device: torch.device) -> None:
        super().__init__(stages[0].stage_index, device, rank)
        self.group = 0
        self._open: tuple[Moment, Action] | None = None  # the last stage's forward, until its loss is there
        for stage in stages:
            self._wrap(stage)

    def update(self, group: int) -> AbstractContextManager[None]:
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

    def _wrap(self, stage: PipelineStage) -> None:
        forward, backward = stage.forward_one_chunk, stage.backward_one_chunk
        weight = stage.backward_weight_one_chunk

        def action(kind: Kind, microbatch: int) -> Action:
            return Action(kind, stage.stage_index, microbatch, self.group, self.group)

        def timed_forward(fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
            began = self.begin()
            output = forward(fwd_chunk_id, *args, **kwargs)
            if stage.is_last:
                self._open = began, action(Kind.FORWARD, fwd_chunk_id)
            else:
                self.end(began, action(Kind.FORWARD, fwd_chunk_id))
            return output

        def timed_backward(
            bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
        ) -> None:
            began = self.begin()
            backward(bwd_chunk_id, loss, full_backward, last_backward)
            self.end(began, action(Kind.BACKWARD if full_backward else Kind.BACKWARD_INPUT, bwd_chunk_id))

        def timed_weight(bwd_chunk_id: int, last_backward: bool = False) -> None:
            began = self.begin()
            weight(bwd_chunk_id, last_backward)
            self.end(began, action(Kind.BACKWARD_WEIGHT, bwd_chunk_id))

        stage.forward_one_chunk = timed_forward
        stage.backward_one_chunk = timed_backward
        stage.backward_weight_one_chunk = timed_weight
