"""What torch's own schedules do on one rank and when, in the spans that our engine records too.

Torch keeps no record: its stages (`watched_stage.py`) and the loss function are timed. The loss is a part of the last
stage's forward, as in our engine. What a stage waits for is waited for before these calls, on a GPU in the order of its
stream, so it is in no span.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

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
