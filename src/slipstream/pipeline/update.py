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
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from slipstream.distributed import lost
from slipstream.distributed.groups import Wait
from slipstream.errors import UserError
from slipstream.lists import norms
from slipstream.optim.corrections import Correction
from slipstream.pipeline.host_sum import PeerLost
from slipstream.pipeline.peers import Gradients, Peers, RankStatus, RunStatus
from slipstream.pipeline.settled import Settled
from slipstream.pipeline.stepping import Stepping, Written
from slipstream.pipeline.versions import Target, Versions
from slipstream.torch_private import mark_stepped, updating

logger = logging.getLogger("slipstream")
RECENT_GROUPS = 64  # how many groups back norms and skips can be asked for


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
        self.status = RankStatus()
        self.statuses: dict[int, RunStatus] = {}  # what all ranks told, by recent group
        self.after_update: Callable[[int], None] | None = None
        self.wait_for: Callable[[Wait], object] = lambda wait: wait.wait()  # how to block
        self.crowded = False  # no step now
        self.in_hook = False  # while `after_update` runs, inside its update
        self.timing: Callable[[int], AbstractContextManager[None]] = lambda group: contextlib.nullcontext()
        self._copies: list[torch.cuda.Event] = []  # of the live state, under way on other streams
        self._pending: deque[_Transaction] = deque()
        self._gathers: deque[_Transaction] = deque()  # of banks, put off until there is room
        self._reduced = -1  # the last group whose gradients are with their owners
        self._values: dict[int, list[dict[str, Any]]] = {}  # hyperparameters by group, corrected
        self._entered: dict[int, list[dict[str, Any]]] = {}  # as they were given
        self._own_keys: set[str] = set()  # keys of parameter groups that the optimizer itself changes
        self.settled = [Settled(v.module, v.replicas) for v in versions]
        self._held = _count(optimizer)
        self._stepping = Stepping(self.versions, optimizer, correction, peers.owned)
        mark_stepped(optimizer)

    def hold(self, copied: torch.cuda.Event) -> None:
        """The next update writes nothing before `copied`."""
        self._copies.append(copied)

    @property
    def copying(self) -> bool:
        """Whether a captured state is still being copied."""
        return any(not copied.query() for copied in self._copies)

    def await_copies(self) -> None:
        """Before anything that was captured is written: the device waits for its copies."""
        while self._copies:
            device = self.parameters[0].device
            self._copies.pop().wait(torch.cuda.current_stream(device) if device.type == "cuda" else None)

    def forget(self) -> None:
        """Drop what is known of recent groups: a state was loaded, and they may come again."""
        self.grad_norms.clear()
        self.statuses.clear()
        self.awaited = self._reduced = self.completed - 1

    def enter(self, group: int) -> None:
        """Group `group` enters: its update will use the hyperparameters of this moment."""
        for settled in self.settled:
            settled.follow()
        if _count(self.optimizer) != self._held:
            raise UserError(
                f"The optimizer holds {_count(self.optimizer)} parameters, and held {self._held} when the schedule was "
                "made. Put all that is trained into the stage's module before that, and make a new schedule."
            )
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

    def advance(self, crowded: bool = False) -> None:
        """Go on with pending updates, one after the other, as far as that needs no waiting.

        `crowded`: as many microbatches are in flight as ever, one more than in a moment. What a step works on would
        come on top of them, so it waits for that moment; the exchange of norms, which other stages wait for, goes on.
        A lost peer is left for `finish` to report: a receive from a neighbour, which comes first, can name it.
        """
        self.crowded = crowded
        with contextlib.suppress(PeerLost):
            self._advance()
        self.crowded = False

    def _advance(self) -> None:
        for queue in (self._pending, self._gathers):
            while queue and queue[0].ready():
                self._go_on(queue)

    def _go_on(self, queue: deque[_Transaction]) -> None:
        """With the first of a queue, as far as its next wait."""
        queue[0].advance(self.wait_for)
        if queue[0].done:
            queue.popleft()

    def settle(self) -> None:
        """Before a new sum of gradients is begun: those of the update under way go to their owners, and what is not
        owned here is dropped. Where the optimizer is not sharded there is nothing to drop."""
        if len(self.peers.owned) == len(self.parameters):
            return
        while self._pending and self._reduced < self._pending[0].group:
            self._pending[0].advance(self.wait_for)

    def finish_bank(self, group: int) -> None:
        """Block until the bank that update `group` published is whole."""
        self.finish(group)
        while self._gathers and self._gathers[0].group <= group:
            self._go_on(self._gathers)

    def finish(self, group: int) -> None:
        """Block until update `group` and all before it are done."""
        self.awaited = max(self.awaited, group)
        while self._pending and self._pending[0].group <= group:
            try:
                self._go_on(self._pending)
                self._advance()
            except PeerLost as error:
                raise PeerLost(
                    f"waited for the other stages in the update of group {group} in vain: {error}"
                ) from error

    def finish_all(self) -> None:
        self.finish_bank(max((each.group for each in (*self._pending, *self._gathers)), default=-1))

    def _steps(self, group: int, grads: Gradients) -> Iterator[Wait]:
        # Before the reductions of this update on every data rank, also where it began before the update before it was
        # done: they share a process group.
        for gather in self._gathers:
            gather.start()
        yield from self.peers.reduce(grads)
        self._reduced = group
        yield from self.peers.tie(grads)
        if self.correction.corrects_gradient:
            self._correct_gradient(group, grads)
        told = yield from self.peers.exchange(group, self._squares(grads), self.status)
        norm = math.sqrt(total) if math.isfinite(total := _sum(told.squares)) else math.nan
        self.grad_norms[group] = norm
        self.statuses[group] = told
        for recent in (self.grad_norms, self.statuses):
            recent.pop(group - RECENT_GROUPS, None)
        if self.peers.in_step:
            # Sharded matrices travel between data ranks, as FSDP's own collectives do in every microbatch: their order
            # must be the same on all of these ranks, so they start where all of them wait for this update.
            yield _Until(lambda: self.awaited >= group)
        if self.crowded:
            yield _Until(lambda: not self.crowded)
        targets = yield from self._step_and_publish(group, grads, norm)
        for versions, target in targets:
            if self._put_off(versions, target):
                self._gathers.append(_Transaction(group, self._gather_late(versions, target, group)))
            else:
                yield from self._gather(target)
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
        present = [i for i, grad in enumerate(grads) if grad is not None]
        given = [grad for grad in grads if grad is not None]
        self.correction.gradient(given, [masters[i] for i in present], [banks[i] for i in present])

    def _squares(self, grads: Gradients) -> Tensor:
        """This rank's slots of the vector of squared norms; zero where another rank counts the parameter."""
        counted = [grad if self.peers.counted[i] else None for i, grad in enumerate(grads)]
        found = norms([grad for grad in counted if grad is not None])
        if not found:
            device = self.parameters[0].device if self.parameters else torch.device("cpu")
            return torch.zeros(len(grads), dtype=torch.float64, device=device)
        # Slots are filled by stacking: an index made on the host would wait for the device.
        left, zero = iter(found), torch.zeros_like(found[0])
        slots = [zero if grad is None else next(left) for grad in counted]
        return torch.stack(slots).to(torch.float64).square_()

    def _put_off(self, versions: Versions, target: Target) -> bool:
        """A bank is not read before the group after next: until the one before it is dead, its owners keep it."""
        return self.peers.sharded and versions.parks and target.read.kind == "bank" and not self.peers.in_step

    def _gather_late(self, versions: Versions, target: Target, group: int) -> Iterator[Wait]:
        yield _Room(versions, group + 1)
        yield from self._gather(target)

    def _gather(self, target: Target) -> Iterator[Wait]:
        target.replica.allocate()
        yield from self.peers.gather(target.replica.weights)

    def _step_and_publish(
        self, group: int, grads: Gradients, norm: float
    ) -> Generator[Wait, None, list[Written]]:
        self.await_copies()
        finite = math.isfinite(norm)
        targets: list[Written] = []
        for versions in self.versions:
            versions.release(group)
            targets += [(versions, target) for target in versions.targets(group + 1)]
        if not finite:
            self.skipped += 1
            said = "The gradient of group %d is not finite: its update is skipped (%d so far)."
            logger.warning(said, group, self.skipped)
        hyperparameters = partial(self._hyperparameters, group)
        with self.timing(group):
            if finite:
                self._stepping.clip(grads, self.max_grad_norm, norm)
            work = self._stepping.written(grads, targets, finite, hyperparameters)
            waiting = next(work, None)
        if waiting is not None:  # the optimizer works in parts, and some are still under way
            yield waiting
            yield from work
        self._values.pop(group)
        self._entered.pop(group)
        torch.clear_autocast_cache()  # of a caller under autocast: its casts are of the weights before
        return targets

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


def _count(optimizer: Optimizer) -> int:
    return sum(len(entry["params"]) for entry in optimizer.param_groups)


@dataclass(frozen=True)
class _Room:
    """Until nothing reads the bank of a group any more: a place in the program, the same on all data ranks, or one that
    began its gather before the others could would hold up a device. Whoever has to go on goes on without."""

    versions: Versions
    group: int

    def is_completed(self) -> bool:
        return self.versions.is_spent(self.group)

    def wait(self) -> None:
        pass


@dataclass(frozen=True)
class _Until:
    """A place in the caller's own program: nobody else brings it about, so there is nothing to block for."""

    reached: Callable[[], bool]

    def is_completed(self) -> bool:
        return self.reached()

    def wait(self) -> None:
        assert self.is_completed()


class _Transaction:
    """An update under way: a generator of what it waits for."""

    def __init__(self, group: int, steps: Iterator[Wait]) -> None:
        self.group = group
        self.done = False
        self._steps = steps
        self._waiting: Wait | None = None

    def ready(self) -> bool:
        return not self.done and (self._waiting is None or self._waiting.is_completed())

    def start(self) -> None:
        """Past what a put-off gather waits for: its collectives are queued."""
        while not self.done and (self._waiting is None or isinstance(self._waiting, _Room)):
            self.advance(lambda wait: wait.wait())

    def advance(self, wait_for: Callable[[Wait], object]) -> None:
        """Run to the next wait. Where this one is completed, waiting only collects an error or orders CUDA streams."""
        if self._waiting is not None and not isinstance(self._waiting, _Room):
            try:
                wait_for(self._waiting)
            except RuntimeError as error:  # gloo and NCCL report a lost peer so
                if not isinstance(self._waiting, dist.Work):
                    raise
                raise PeerLost(lost.words(error)) from error
        try:
            with updating():
                self._waiting = next(self._steps)
        except StopIteration:
            self._waiting = None
            self.done = True


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
