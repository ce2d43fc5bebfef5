"""The bubble-free bound: our schedule's own actions on every rank at the same time, with nothing to wait for.

    bound = max over stages of  m (t_F + t_B) + t_update + t_publish

measured, not computed: all ranks run together, so they share caches and memory bandwidth as a pipeline would,
and each stage keeps as many microbatches between forward and backward as it does in the pipeline (P-1-s, one of
the reasons why a stage is slower than a loop of F, B, F, B). Inputs and gradients are local tensors. The update is
ours too: a norm (the rank's own), clipping where asked for, the step, and the copy into the bank that nobody reads any
more. Whether the norms were finite is looked at when the device is done.
"""

from __future__ import annotations

from collections import deque
from copy import deepcopy
from typing import NamedTuple

import torch
from torch import Tensor, nn

from slipstream.bench.stopwatch import Stopwatch
from slipstream.bench.work import (
    Work,
    build_module,
    build_optimizer,
    group_input,
    group_target,
    loss_of,
    prepare,
)
from slipstream.lists import copy_


class _InFlight(NamedTuple):
    """A microbatch between its forward and its backward."""

    bank: nn.Module
    output: Tensor  # on the last stage, the loss
    gradient: Tensor | None
    ends_group: bool


class BoundRun:
    """One rank of the bound: `step` hands in one group, whose last backwards may run in a later call."""

    def __init__(self, work: Work, rank: int) -> None:
        device = work.device_of(rank)
        self.is_first, self.is_last = rank == 0, rank == work.stages - 1
        self.master = build_module(work, rank, work.stages, device=device)
        self.banks = [deepcopy(self.master), deepcopy(self.master)]
        if (prepared := prepare(work)) is not None:
            for bank in self.banks:
                prepared(bank)
        self.optimizer = build_optimizer(self.master)
        self.inputs = group_input(work, self.is_first, device).chunk(work.microbatches)
        self.targets = group_target(work, self.is_last, device).chunk(work.microbatches)
        self.loss = loss_of(work)
        self.work = work
        self.warm_up = work.stages - 1 - rank
        self.flight: deque[_InFlight] = deque()
        self.norms: list[Tensor] = []
        self.watch = Stopwatch(device)
        self.losses: list[Tensor] = []

    @property
    def ends(self) -> list[float]:
        return self.watch.moments

    def step(self) -> None:
        bank = self.banks[0]
        self.losses.clear()
        for index in range(self.work.microbatches):
            self._forward(bank, index)
            if len(self.flight) > self.warm_up:
                self._backward()
        self.banks.reverse()

    def drain(self) -> None:
        while self.flight:
            self._backward()
        self.watch.read()
        assert all(torch.isfinite(norm) for norm in self.norms), "the bench's own work diverged"
        self.norms.clear()

    def close(self) -> None:
        """It talks to nobody."""

    def _forward(self, bank: nn.Module, index: int) -> None:
        value, target = self.inputs[index], self.targets[index]
        output = bank(value if self.is_first else value.detach().requires_grad_())
        gradient: Tensor | None = target  # costs what the next stage's gradient would cost
        if self.is_last:
            loss = self.loss(output, target)
            self.losses.append(loss.detach())
            output, gradient = loss / self.work.microbatches, None
        self.flight.append(_InFlight(bank, output, gradient, index + 1 == self.work.microbatches))

    def _backward(self) -> None:
        bank, output, gradient, ends_group = self.flight.popleft()
        output.backward(gradient)
        if ends_group:
            self._update(bank)
            self.watch.mark()

    def _update(self, bank: nn.Module) -> None:
        read, newest = list(bank.parameters()), list(self.master.parameters())
        for source, parameter in zip(read, newest, strict=True):
            parameter.grad, source.grad = source.grad, None
        norm = nn.utils.get_total_norm([p.grad for p in newest if p.grad is not None])
        self.norms.append(norm)
        if self.work.max_grad_norm is not None:
            nn.utils.clip_grads_with_norm_(newest, self.work.max_grad_norm, norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        with torch.no_grad():
            copy_(read, newest)
