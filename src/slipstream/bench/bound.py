"""The bubble-free bound: one update's own work on every rank at the same time, with no communication.

    bound = max over stages of  m (t_F + t_B) + t_update + t_publish

measured, not computed: all ranks run together, so they share caches and memory bandwidth as a pipeline
would. The weights are held as 2BW holds them (a master and two banks used in turn); clipping, where asked
for, uses the rank's own norm.
"""

from __future__ import annotations

import time
from copy import deepcopy

import torch
from torch import Tensor, nn

from slipstream.bench.work import Work, build_module, build_optimizer, group_input, group_target, loss_fn
from slipstream.torch_private import copy_


class BoundRun:
    """One rank of the bound: `step` is one update, computed from local tensors only."""

    def __init__(self, work: Work, rank: int) -> None:
        self.master = build_module(work, rank, work.stages)
        self.banks = [deepcopy(self.master), deepcopy(self.master)]
        self.optimizer = build_optimizer(self.master)
        self.inputs = group_input(work).chunk(work.microbatches)
        self.targets = group_target(work).chunk(work.microbatches)
        self.work = work
        self.is_first, self.is_last = rank == 0, rank == work.stages - 1
        self.ends: list[float] = []
        self.losses: list[Tensor] = []

    def step(self) -> None:
        bank = self.banks[0]
        self.losses.clear()
        for value, target in zip(self.inputs, self.targets, strict=True):
            self._forward_backward(bank, value, target)
        self._update(bank)
        self.banks.reverse()
        self.ends.append(time.perf_counter())

    def drain(self) -> None:
        pass

    def _forward_backward(self, bank: nn.Module, value: Tensor, target: Tensor) -> None:
        value = value.detach().requires_grad_(not self.is_first)
        output = bank(value)
        if self.is_last:
            loss = loss_fn(output, target)
            (loss / self.work.microbatches).backward()
            self.losses.append(loss.detach())
        else:
            output.backward(target)  # any tensor of the right shape costs what the real gradient costs

    def _update(self, bank: nn.Module) -> None:
        read, newest = list(bank.parameters()), list(self.master.parameters())
        for source, parameter in zip(read, newest, strict=True):
            parameter.grad, source.grad = source.grad, None
        if self.work.max_grad_norm is not None:
            nn.utils.clip_grad_norm_(newest, self.work.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        with torch.no_grad():
            copy_(read, newest)
