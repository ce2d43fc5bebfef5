"""The part of an update that writes: clip, step the master, publish the banks.

Two ways. The whole master at once; an optimizer may then hand out what its step waits for. Or bucket by bucket, where
the master is kept in halves (`compact.py`): made whole, stepped, published from, taken apart, its gradients dropped.
Both write the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import chain
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.optim import Optimizer

from slipstream.distributed.groups import Wait
from slipstream.lists import copy_, mul_, round_into
from slipstream.optim.corrections import Correction, Publication
from slipstream.pipeline.peers import Gradients
from slipstream.pipeline.replica import sharded_as
from slipstream.pipeline.versions import Target, Versions
from slipstream.torch_private import run_step_hooks

Written = tuple[Versions, Target]
Hyperparameters = Callable[[], AbstractContextManager[None]]  # inside, those that held when the group entered


@runtime_checkable
class InParts(Protocol):
    """An optimizer that hands out what its step waits for (sharded matrices under way) instead of blocking."""

    def step_in_parts(self) -> Iterator[Wait]: ...


class Stepping:
    """The master, optimizer and correction of one process. `owned`: the parameters that are stepped here."""

    def __init__(
        self, versions: Sequence[Versions], optimizer: Optimizer, correction: Correction, owned: Sequence[int]
    ) -> None:
        self._optimizer, self._correction, self._owned = optimizer, correction, owned
        self._parameters = [p for v in versions for p in v.master.parameters]
        self._versions = versions
        self._factor = 1.0  # by which the gradients of the update under way are clipped

    @property
    def in_buckets(self) -> bool:
        return any(versions.compact is not None for versions in self._versions)

    def clip(self, grads: Gradients, most: float | None, norm: float) -> None:
        """Narrow sums are scaled when they are widened (`_give`)."""
        self._factor = 1.0 if most is None else min(1.0, most / (norm + 1e-6))
        if self._factor < 1.0:
            mul_(
                [g for i in self._owned if (g := grads[i]) is not None and self._is_wide(i, g)], self._factor
            )

    def _is_wide(self, index: int, grad: Tensor) -> bool:
        return grad.dtype == self._parameters[index].dtype

    def written(
        self, grads: Gradients, targets: Sequence[Written], finite: bool, hyperparameters: Hyperparameters
    ) -> Iterator[Wait]:
        """Step and publish (where the gradient is not finite, publish what there is); yields what has to be waited
        for in between."""
        if self.in_buckets:
            self._bucket_by_bucket(grads, targets, finite, hyperparameters)
            return
        # z_g must outlive the step where the correction extrapolates from it: in the dying bank if it can.
        previous = [self._previous(*target) if finite else None for target in targets]
        if finite:
            yield from self._step(grads, hyperparameters)
        self._publish(grads, targets, previous, finite, hyperparameters)

    def _step(self, grads: Gradients, hyperparameters: Hyperparameters) -> Iterator[Wait]:
        """Step the master; what an optimizer that works in parts still waits for is returned."""
        self._give(grads, self._owned)
        rest: Iterator[Wait] = iter(())
        first = None
        with hyperparameters():
            if isinstance(self._optimizer, InParts):
                # Gradients and hyperparameters are taken at the first part, so the live values return at once.
                rest = _with_hooks(self._optimizer, self._optimizer.step_in_parts())
                first = next(rest, None)
            else:
                with torch.no_grad():
                    self._optimizer.step()
        return rest if first is None else chain([first], rest)

    def _give(self, grads: Gradients, indices: Sequence[int]) -> None:
        for index in indices:
            parameter, grad = self._parameters[index], grads[index]
            if grad is not None and not self._is_wide(index, grad):
                grad = grad.to(parameter.dtype).mul_(self._factor)
            parameter.grad = None if grad is None else sharded_as(parameter, grad)

    def _spend(self, grads: Gradients, indices: Sequence[int]) -> None:
        """They have been used: their memory is free for the weights that are now written."""
        for index in indices:
            self._parameters[index].grad = grads[index] = None

    def _previous(self, versions: Versions, target: Target) -> list[Tensor] | None:
        """z_g, kept where a bank is made from it."""
        if target.read.kind != "bank" or not self._correction.needs_previous:
            return None
        target.replica.allocate(versions.owned)
        weights, banks = versions.master.weights, target.replica.weights
        old = []
        for i in versions.owned:
            same = banks[i].dtype == weights[i].dtype
            old.append(banks[i] if same else torch.empty_like(weights[i]))
        copy_(old, [weights[i] for i in versions.owned])
        return old

    def _publish(
        self,
        grads: Gradients,
        targets: Sequence[Written],
        previous: Sequence[list[Tensor] | None],
        finite: bool,
        hyperparameters: Hyperparameters,
    ) -> None:
        """Write z_{g+1} or b_{g+1} into every replica that will be read, as far as this rank owns it."""
        self._spend(grads, self._owned)
        grads.clear()
        for (versions, target), old in zip(targets, previous, strict=True):
            target.replica.allocate(versions.owned)
            if finite and target.read.kind == "bank":
                with hyperparameters():  # a correction may predict with the learning rate
                    self._correct(versions, target, versions.owned, old)
            else:
                round_into(
                    [target.replica.weights[i] for i in versions.owned],
                    [versions.master.weights[i] for i in versions.owned],
                )

    def _correct(
        self, versions: Versions, target: Target, indices: Sequence[int], old: list[Tensor] | None
    ) -> None:
        banks = [target.replica.weights[i] for i in indices]
        new = [versions.master.weights[i] for i in indices]
        params = [versions.master.parameters[i] for i in indices]
        self._correction.publish(Publication(banks, new, old, self._optimizer, params, versions.delay))

    def _bucket_by_bucket(
        self, grads: Gradients, targets: Sequence[Written], finite: bool, hyperparameters: Hyperparameters
    ) -> None:
        """All of it, for a compact master."""
        (versions,) = self._versions
        compact = versions.compact
        assert compact is not None
        high = next(target.replica for _, target in targets if target.read.kind == "master")
        banks = [target for _, target in targets if target.read.kind == "bank"]
        if not finite:
            self._spend(grads, self._owned)
            grads.clear()
            compact.repeat(high, [target.replica for target in banks])
            return
        in_parts = isinstance(self._optimizer, InParts)
        if in_parts:
            run_step_hooks(self._optimizer, before=True)
        with hyperparameters(), torch.no_grad():
            for bucket in compact.opened(high):
                old = None
                if banks and self._correction.needs_previous:
                    old = [versions.master.weights[i].clone() for i in bucket]
                self._give(grads, bucket)
                if isinstance(self._optimizer, InParts):
                    for wait in self._optimizer.step_in_parts():
                        wait.wait()
                else:
                    self._optimizer.step()
                self._spend(grads, bucket)
                for target in banks:
                    target.replica.allocate(bucket)
                    self._correct(versions, target, bucket, old)
        if in_parts:
            run_step_hooks(self._optimizer, before=False)
        grads.clear()


def _with_hooks(optimizer: Optimizer, parts: Iterator[Wait]) -> Iterator[Wait]:
    """A step in parts, with the hooks that torch calls before and after `step`."""
    run_step_hooks(optimizer, before=True)
    yield from parts
    run_step_hooks(optimizer, before=False)
