"""What the training loop drives, and the emulator of a run.

One loop drives them all: `Emulator`, `Schedule2BW`, and torch's synchronous schedules (`synchronous.py`).
Invariant: `after_update(g)` is called when update g is done on this rank and before a later one is, so that a
`capture` inside it is the state at that boundary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
    def busy_seconds(self) -> float: ...

    @property
    def grad_norms(self) -> Mapping[int, float]:
        """The norms of recent updates before clipping; not finite: skipped."""
        ...

    @property
    def step(self) -> Callable[..., Any]:
        """Takes one group as torch's schedules do; see `losses_of`."""
        ...

    @property
    def eval(self) -> Callable[..., Any]:
        """The same at the master, without gradients."""
        ...

    def drain(self) -> None: ...

    def capture(self) -> dict[str, Any]:
        """The state at the boundary just reached: live tensors, good until the next step (`Copier` to keep)."""
        ...

    def hold(self, copied: torch.cuda.Event) -> None:
        """Live tensors are being copied until then: later updates wait, on the device, before they write."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...

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


def losses_of(call: Callable[..., Any], batch: Batch) -> list[Tensor]:
    """Hand a group to an engine's `step` or `eval`; the losses of its microbatches on a rank that has them."""
    losses: list[Tensor] = []
    inputs = () if batch.inputs is None else (batch.inputs,)
    targets = {} if batch.targets is None else {"target": batch.targets, "losses": losses}
    call(*inputs, **targets, return_outputs=False)  # a group's logits would fill a GPU
    return losses


def emulated(config: Config, model: build.Model, device: torch.device) -> Emulator:
    """One process for the whole model."""
    delay, cutover = config.pipeline.delay, config.pipeline.cutover
    count = max(len(of) if isinstance(of, list) else 1 for of in (delay, cutover))
    assert not isinstance(cutover, float)  # resolved
    if config.train.cuda_graphs and device.type != "cuda":
        raise UserError("train.cuda_graphs needs a GPU, and torch sees none. Drop it.")
    modules = build.stage_modules(config, model, count, list(range(count)), device)
    if isinstance(model, ModelConfig) and model.tied:
        share_embedding(modules)
    return Emulator(
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


def share_embedding(modules: list[Any]) -> None:
    """One Parameter for embedding and head where one process holds both: the engine then ties them."""
    modules[-1].head.weight = modules[0].embedding.weight
