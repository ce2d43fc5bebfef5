"""Torch's pipeline stage as this package runs it under torch's own schedules: the one class that overrides it.

Every schedule of torch computes through three methods of its stages: a forward, a backward or its input half, the
weight half. They have no underscore and are no public interface either; a test holds their signatures.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage

from slipstream.pipeline.torch_trace import TorchTrace
from slipstream.schedule.actions import Kind


class WatchedStage(PipelineStage):
    """A stage whose actions are timed by `trace`, and which calls `collect` when a microbatch has its gradients."""

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
    ) -> None:
        super().__init__(module, index, count, device, group=group)
        self._watching, self._collect = trace, collect

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
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
