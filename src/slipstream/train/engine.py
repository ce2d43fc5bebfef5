"""What the training loop needs of whatever computes the updates, and the emulator in that shape.

One loop drives them all: the emulator, `Schedule2BW`, and torch's synchronous schedules (`synchronous.py`).
Invariant: `after_update(g)` is called when update g is done on this rank and before a later one is, so that a
`capture` inside it is the state at that boundary.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from slipstream.config import Config
from slipstream.errors import UserError
from slipstream.models.sizes import ModelConfig
from slipstream.pipeline.emulator import Emulator
from slipstream.pipeline.graphs import CudaGraphs
from slipstream.schedule.timeline import Span
from slipstream.train import build
from slipstream.train.batches import Batch

AfterUpdate = Callable[[int], None]


class Engine(Protocol):
    """One rank of a run."""

    @property
    def after_update(self) -> AfterUpdate | None: ...

    @after_update.setter
    def after_update(self, hook: AfterUpdate | None) -> None: ...

    @property
    def optimizer(self) -> Optimizer: ...

    @property
    def names(self) -> set[str]:
        """The parameters of this rank."""
        ...

    @property
    def busy_seconds(self) -> float: ...

    def step(self, batch: Batch) -> list[Tensor]:
        """Submit one group; the losses of its microbatches on a rank that has them, else nothing."""
        ...

    def evaluate(self, batch: Batch) -> list[Tensor]: ...

    def drain(self) -> None: ...

    def grad_norm(self, group: int) -> float | None:
        """The norm of update `group` before clipping, None while it is under way; not finite: skipped."""
        ...

    def capture(self) -> dict[str, Any]:
        """The state at the boundary just reached: live tensors, good until the next step (`Copier` to keep)."""
        ...

    def hold(self, copied: torch.cuda.Event) -> None:
        """Live tensors are being copied until then: later updates wait, on the device, before they write."""
        ...

    def load(self, state: dict[str, Any]) -> None: ...

    def trace(self, on: bool) -> None:
        """Record the actions of this rank, or stop recording."""
        ...

    def take_trace(self) -> list[Span]:
        """What was recorded since the last call."""
        ...

    def request_stop(self) -> None: ...

    def stopping(self) -> bool:
        """Whether to submit no further group: the same answer at the same group on every rank."""
        ...


class Emulated:
    """The emulator, one process for the whole model."""

    def __init__(self, config: Config, model: build.Model, device: torch.device) -> None:
        delay, cutover = config.pipeline.delay, config.pipeline.cutover
        count = max(len(of) if isinstance(of, list) else 1 for of in (delay, cutover))
        assert not isinstance(cutover, float)  # resolved
        if config.train.cuda_graphs and device.type != "cuda":
            raise UserError("train.cuda_graphs needs a GPU, and torch sees none. Drop it.")
        modules = build.stage_modules(config, model, count, list(range(count)), device)
        if isinstance(model, ModelConfig) and model.tied:
            share_embedding(modules)
        self._config = config
        self._emulator = Emulator(
            modules[0] if count == 1 else None,
            config.pipeline.microbatches,
            build.loss_function(config),
            build.optimizer_factory(config),
            build.correction(config),
            config.optim.max_grad_norm or None,
            delay,
            synchronous=build.flushed(config),
            cutover=cutover,
            stages=modules if count > 1 else None,
            mismatch=config.pipeline.mismatch,
            bank_dtype=torch.bfloat16 if config.train.dtype == "bfloat16" else None,
            gradient_dtype=torch.bfloat16 if config.train.gradient_dtype == "bfloat16" else None,
            prepare=build.preparation(config),
            recorder=CudaGraphs() if config.train.cuda_graphs else None,
            fuse=config.train.fuse,
        )
        self.after_update: AfterUpdate | None = None
        self._stop = False
        self.names = {name for module in modules for name, _ in module.named_parameters()}
        self.optimizer = self._emulator.optimizer
        self.busy_seconds = math.nan  # one process that never waits for another

    def step(self, batch: Batch) -> list[Tensor]:
        losses = self._emulator.step(batch.inputs, batch.targets)
        if self.after_update is not None:
            self.after_update(self._emulator.group - 1)
        return losses

    def evaluate(self, batch: Batch) -> list[Tensor]:
        return self._emulator.eval(batch.inputs, batch.targets)

    def drain(self) -> None:
        self._emulator.drain()

    def grad_norm(self, group: int) -> float | None:
        return self._emulator.grad_norms.get(group)

    def capture(self) -> dict[str, Any]:
        return self._emulator.capture()

    def hold(self, copied: torch.cuda.Event) -> None:
        self._emulator.hold(copied)

    def load(self, state: dict[str, Any]) -> None:
        self._emulator.load_state_dict(state)

    def trace(self, on: bool) -> None:
        """There is no pipeline to draw."""

    def take_trace(self) -> list[Span]:
        return []

    def request_stop(self) -> None:
        self._stop = True

    def stopping(self) -> bool:
        return self._stop


def share_embedding(modules: list[Any]) -> None:
    """One Parameter for embedding and head where one process holds both: the engine then ties them."""
    modules[-1].head.weight = modules[0].embedding.weight
