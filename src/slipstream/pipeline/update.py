"""The only update: reduce, tie, correct, norm, finite?, clip, step, publish. One transaction per group.

    G_g      the mean gradient of group g, summed over tied weights, corrected
    n        the square root of the exactly rounded sum of squared per-parameter norms over all stages
    z_{g+1}  Optimizer(z_g, state, G_g min(1, c / n))      or z_g, state untouched, when n is not finite
    b_{g+1}  what the correction publishes                 or z_{g+1} when the group was skipped

The transaction is a generator: it yields what it waits for, so that the runtime advances it between actions
while the emulator simply runs it through. Hyperparameters are those that held when the group entered, whenever
the update runs. The norm is summed with `math.fsum`, whose result does not depend on the order of the terms, so
that it does not depend on how many stages there are.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import chain
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from slipstream.distributed import lost
from slipstream.errors import UserError
from slipstream.lists import copy_, mul_, norms
from slipstream.optim.corrections import Correction, Publication
from slipstream.pipeline.board import PeerLost
from slipstream.pipeline.peers import Gradients, Heard, Peers, Tally, Wait
from slipstream.pipeline.versions import Target, Versions, sharded_as
from slipstream.torch_private import mark_stepped, run_step_hooks

logger = logging.getLogger("slipstream")
RECENT_GROUPS = 64  # how many groups back norms and skips can be asked for


@runtime_checkable
class InParts(Protocol):
    """An optimizer that hands out what its step waits for (sharded matrices under way) instead of blocking."""

    def step_in_parts(self) -> Iterator[Wait]: ...


class Updater:
    """Master, optimizer and correction of one process; pending updates in the order of their groups."""

    def __init__(
        self,
        versions: Sequence[Versions],
        optimizer: Optimizer,
        correction: Correction,
        max_grad_norm: float | None,
        peers: Peers,
    ) -> None:
        self.versions = list(versions)
        self.optimizer = optimizer
        self.correction = correction
        self.max_grad_norm = max_grad_norm
        self.peers = peers
        self.parameters = [p for v in self.versions for p in v.master.parameters]
        self.completed = 0
        self.awaited = -1  # the last group whose update someone waits for
        self.skipped = 0
        self.grad_norms: dict[int, float] = {}  # of recent groups; a skipped group's is not finite
        self.tally = Tally()
        self.heard: dict[int, Heard] = {}  # what all ranks told, by recent group
        self.after_update: Callable[[int], None] | None = None
        self.wait_for: Callable[[Wait], object] = lambda wait: wait.wait()  # how to block
        self.in_hook = False  # while `after_update` runs, inside its update
        self.timing: Callable[[int], AbstractContextManager[None]] = lambda group: contextlib.nullcontext()
        self._copies: list[torch.cuda.Event] = []  # of the live state, under way on other streams
        self._pending: deque[_Transaction] = deque()
        self._values: dict[int, list[dict[str, Any]]] = {}  # hyperparameters by group, corrected
        self._entered: dict[int, list[dict[str, Any]]] = {}  # as they were given
        self._own_keys: set[str] = set()  # keys of parameter groups that the optimizer itself changes
        mark_stepped(optimizer)

    def hold(self, copied: torch.cuda.Event) -> None:
        """The next update writes nothing before `copied`."""
        self._copies.append(copied)

    def forget(self) -> None:
        """Drop what is known of recent groups: a state was loaded, and they may come again."""
        self.grad_norms.clear()
        self.heard.clear()
        self.awaited = self.completed - 1

    def enter(self, group: int) -> None:
        """Group `group` enters: its update will use the hyperparameters of this moment."""
        self._entered[group] = [_frozen(entry) for entry in self.optimizer.param_groups]
        self._values[group] = [dict(entry) for entry in self._entered[group]]
        self.correction.hyperparameters(group, self._values[group])

    def hyperparameters(self) -> list[dict[str, Any]]:
        """Those of the next group to be updated, by parameter group; those of now if it has not entered."""
        given = self._entered.get(self.completed, [{}] * len(self.optimizer.param_groups))
        return [
            {**_frozen(entry), **{key: value for key, value in kept.items() if key not in self._own_keys}}
            for entry, kept in zip(self.optimizer.param_groups, given, strict=True)
        ]

    def begin(self, group: int, grads: Gradients) -> None:
        """The last backward of `group` is done; `grads` now belong to its update."""
        self._pending.append(_Transaction(group, self._steps(group, grads)))
        self.advance()

    def advance(self) -> None:
        """Go on with pending updates, one after the other, as far as that needs no waiting.

        A lost peer is left for `finish` to report: a receive from a neighbour, which comes first, can name it.
        """
        with contextlib.suppress(PeerLost):
            self._advance()

    def _advance(self) -> None:
        while self._pending and self._pending[0].ready():
            self._pending[0].advance(self.wait_for)
            if self._pending[0].done:
                self._pending.popleft()

    def finish(self, group: int) -> None:
        """Block until update `group` and all before it are done."""
        self.awaited = max(self.awaited, group)
        while self._pending and self._pending[0].group <= group:
            transaction = self._pending[0]
            try:
                transaction.advance(self.wait_for)
                if transaction.done:
                    self._pending.popleft()
                self._advance()
            except PeerLost as error:
                raise PeerLost(
                    f"waited for the other stages in the update of group {group} in vain: {error}"
                ) from error

    def finish_all(self) -> None:
        if self._pending:
            self.finish(self._pending[-1].group)

    def _steps(self, group: int, grads: Gradients) -> Iterator[Wait]:
        yield from self.peers.reduce(grads)
        yield from self.peers.tie(grads)
        if self.correction.corrects_gradient:
            self._correct_gradient(group, grads)
        heard = yield from self.peers.exchange(self._squares(grads), self.tally)
        norm = math.sqrt(total) if math.isfinite(total := _sum(heard.squares)) else math.nan
        self.grad_norms[group] = norm
        self.heard[group] = heard
        for recent in (self.grad_norms, self.heard):
            recent.pop(group - RECENT_GROUPS, None)
        if self.peers.in_step:
            # Sharded matrices travel between data ranks, as FSDP's own collectives do in every microbatch: their order
            # must be the same on all of these ranks, so they start where all of them wait for this update.
            yield _Awaited(self, group)
        yield from self._step_and_publish(group, grads, norm)
        self.completed = group + 1
        if self.after_update is not None:
            self.in_hook = True
            try:
                self.after_update(group)
            finally:
                self.in_hook = False

    def _correct_gradient(self, group: int, grads: Gradients) -> None:
        banks = [w for v in self.versions for w in v.replica(group).weights]
        masters = [w for v in self.versions for w in v.master.weights]
        present = [(g, m, b) for g, m, b in zip(grads, masters, banks, strict=True) if g is not None]
        self.correction.gradient(
            [g for g, _, _ in present], [m for _, m, _ in present], [b for *_, b in present]
        )

    def _squares(self, grads: Gradients) -> Tensor:
        """This rank's slots of the vector of squared norms; zero where another rank counts the parameter."""
        counted = [grad is not None and self.peers.counted[i] for i, grad in enumerate(grads)]
        found = norms(
            [grad for grad, counts in zip(grads, counted, strict=True) if counts and grad is not None]
        )
        if not found:
            device = self.parameters[0].device if self.parameters else torch.device("cpu")
            return torch.zeros(len(grads), dtype=torch.float64, device=device)
        # Slots are filled by stacking: an index made on the host would wait for the device.
        left, zero = iter(found), torch.zeros_like(found[0])
        return torch.stack([next(left) if counts else zero for counts in counted]).to(torch.float64).square_()

    def _step_and_publish(self, group: int, grads: Gradients, norm: float) -> Iterator[Wait]:
        while self._copies:
            self._copies.pop().wait(torch.cuda.current_stream(self.parameters[0].device))
        finite = math.isfinite(norm)
        targets = []
        for versions in self.versions:
            versions.release(group)
            targets += [(versions, target) for target in versions.targets(group + 1)]
        rest: Iterator[Wait] = iter(())
        with self.timing(group):
            # z_g must outlive the step where the correction extrapolates from it: in the dying bank if it can.
            previous = [self._previous(*target) if finite else None for target in targets]
            if finite:
                rest = self._step(group, grads, norm)
            else:
                self.skipped += 1
                logger.warning(
                    "The gradient of group %d is not finite: its update is skipped (%d so far).",
                    group, self.skipped,
                )  # fmt: skip
            waiting = next(rest, None)
            if waiting is None:
                self._spend(grads)
                self._publish(group, targets, previous, finite)
        if waiting is not None:  # the optimizer works in parts, and some are still under way
            yield from chain([waiting], rest)
            with self.timing(group):
                self._spend(grads)
                self._publish(group, targets, previous, finite)
        del previous
        self._values.pop(group)
        self._entered.pop(group)
        torch.clear_autocast_cache()  # of a caller under autocast: its casts are of the weights before
        for _, target in targets:
            yield from self.peers.gather(target.replica.weights)

    def _spend(self, grads: Gradients) -> None:
        """The gradients have been used: their memory is free for the weights that are now written."""
        for index in self.peers.owned:
            self.parameters[index].grad = None
        grads.clear()

    def _publish(
        self,
        group: int,
        targets: Sequence[tuple[Versions, Target]],
        previous: Sequence[list[Tensor] | None],
        finite: bool,
    ) -> None:
        """Write z_{g+1} or b_{g+1} into every replica that will be read, as far as this rank owns it."""
        for (versions, target), old in zip(targets, previous, strict=True):
            target.replica.allocate()
            banks = [target.replica.weights[i] for i in versions.owned]
            new = [versions.master.weights[i] for i in versions.owned]
            if finite and target.read.kind == "bank":
                params = [versions.master.parameters[i] for i in versions.owned]
                with self._hyperparameters(group):  # a correction may predict with the learning rate
                    self.correction.publish(
                        Publication(banks, new, old, self.optimizer, params, versions.delay)
                    )
            else:
                copy_(banks, new)

    def _previous(self, versions: Versions, target: Target) -> list[Tensor] | None:
        if target.read.kind != "bank" or not self.correction.needs_previous:
            return None
        weights = versions.master.weights
        target.replica.allocate()
        banks = target.replica.weights
        old = []
        for i in versions.owned:
            same = banks[i].dtype == weights[i].dtype
            old.append(banks[i] if same else torch.empty_like(weights[i]))
        copy_(old, [weights[i] for i in versions.owned])
        return old

    def _step(self, group: int, grads: Gradients, norm: float) -> Iterator[Wait]:
        """Step the master; what an optimizer that works in parts still waits for is returned."""
        if self.max_grad_norm is not None:
            factor = self.max_grad_norm / (norm + 1e-6)
            if factor < 1.0:
                mul_([g for i in self.peers.owned if (g := grads[i]) is not None], factor)
        for index in self.peers.owned:
            parameter, grad = self.parameters[index], grads[index]
            parameter.grad = None if grad is None else sharded_as(parameter, grad)
        rest: Iterator[Wait] = iter(())
        first = None
        with self._hyperparameters(group):
            if isinstance(self.optimizer, InParts):
                # Gradients and hyperparameters are taken at the first part, so the live values return at once.
                rest = _with_hooks(self.optimizer, self.optimizer.step_in_parts())
                first = next(rest, None)
            else:
                with torch.no_grad():
                    self.optimizer.step()
        return rest if first is None else chain([first], rest)

    @contextlib.contextmanager
    def _hyperparameters(self, group: int) -> Iterator[None]:
        """Inside, the optimizer's hyperparameters are those that held when `group` entered."""
        live = [dict(entry) for entry in self.optimizer.param_groups]
        for entry, values in zip(self.optimizer.param_groups, self._values[group], strict=True):
            entry.update({key: value for key, value in values.items() if key not in self._own_keys})
        before = [dict(entry) for entry in self.optimizer.param_groups]
        yield
        for entry, start, now in zip(self.optimizer.param_groups, before, live, strict=True):
            for key in list(entry):
                if key == "params":
                    continue
                if key not in start or not _same(entry[key], start[key]):
                    self._own_keys.add(key)  # a step counter, say: the optimizer's own business
                elif key in now and key not in self._own_keys:
                    entry[key] = now[key]


class _Awaited:
    """Until an update is waited for."""

    def __init__(self, updater: Updater, group: int) -> None:
        self._updater, self._group = updater, group

    def is_completed(self) -> bool:
        return self._updater.awaited >= self._group

    def wait(self) -> None:
        assert self.is_completed()


def _with_hooks(optimizer: Optimizer, parts: Iterator[Wait]) -> Iterator[Wait]:
    """A step in parts, with the hooks that torch calls before and after `step`."""
    run_step_hooks(optimizer, before=True)
    yield from parts
    run_step_hooks(optimizer, before=False)


class _Transaction:
    """An update under way: a generator of what it waits for."""

    def __init__(self, group: int, steps: Iterator[Wait]) -> None:
        self.group = group
        self.done = False
        self._steps = steps
        self._waiting: Wait | None = None

    def ready(self) -> bool:
        return not self.done and (self._waiting is None or self._waiting.is_completed())

    def advance(self, wait_for: Callable[[Wait], object]) -> None:
        """Run to the next wait. Where this one is completed, waiting only collects an error or orders CUDA streams."""
        if self._waiting is not None:
            try:
                wait_for(self._waiting)
            except RuntimeError as error:  # gloo and NCCL report a lost peer so
                if not isinstance(self._waiting, dist.Work):
                    raise
                raise PeerLost(lost.words(error)) from error
        try:
            self._waiting = next(self._steps)
        except StopIteration:
            self._waiting = None
            self.done = True


def no_optimizer() -> Optimizer:
    """Of a stage that has no parameters, where torch's optimizers refuse: something for a learning-rate scheduler."""
    return torch.optim.SGD([{"params": []}])


def check_covers(
    optimizer: Optimizer, module: nn.Module, names: Sequence[str], parameters: Sequence[nn.Parameter]
) -> None:
    """Every trainable parameter must be the optimizer's, and nothing that is not in the master may be."""
    held = [p for entry in optimizer.param_groups for p in entry["params"]]
    own, found = {id(p) for p in module.parameters()}, {id(p) for p in held}
    foreign = [tuple(p.shape) for p in held if id(p) not in own]
    if foreign:
        raise UserError(
            f"The optimizer holds {len(foreign)} parameters that are not the master's (shape {foreign[0]}). "
            "No update would see their gradients: put what is trained (of a loss, say) into the stage's module."
        )
    missing = [name for name, p in zip(names, parameters, strict=True) if id(p) not in found]
    if missing:
        shown = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
        raise UserError(
            f"The optimizer misses {len(missing)} trainable parameters of the master: {shown}. "
            "Build it from module.parameters() of the module it is given, or freeze them with requires_grad_(False)."
        )


def _sum(squared: Sequence[float]) -> float:
    """The exactly rounded sum; `fsum` refuses infinities of both signs and overflow, which here mean 'skip'."""
    try:
        return math.fsum(squared)
    except (OverflowError, ValueError):
        return math.nan


def _frozen(entry: dict[str, Any]) -> dict[str, Any]:
    """The hyperparameters of a parameter group, as they are now."""
    return {
        key: value.clone() if isinstance(value, Tensor) else value
        for key, value in entry.items()
        if key != "params"
    }


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return one is other
    return bool(one == other)
