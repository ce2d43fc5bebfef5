"""What `Schedule2BW` and `Emulator` have in common: updates that can be asked about, a state, an end."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Self

import torch
from torch.optim import Optimizer

from slipstream.errors import StageError, UserError
from slipstream.optim.muon import Muon
from slipstream.pipeline import state as states
from slipstream.pipeline.update import Updater


class Engine(ABC):
    """Whoever has an `Updater`. The properties and methods here mean the same of every engine."""

    _updater: Updater
    optimizer: Optimizer
    group: int  # groups handed in

    @abstractmethod
    def drain(self) -> None: ...

    @property
    def after_update(self) -> Callable[[int], None] | None:
        """Called with g right after update g is published on this stage, and before a later one."""
        return self._updater.after_update

    @after_update.setter
    def after_update(self, hook: Callable[[int], None] | None) -> None:
        self._updater.after_update = hook

    @property
    def completed(self) -> int:
        """Updates done on this stage."""
        return self._updater.completed

    @property
    def skipped(self) -> int:
        """Groups skipped, on all stages alike, because their gradient was not finite."""
        return self._updater.skipped

    @property
    def grad_norms(self) -> dict[int, float]:
        """The gradient norm over all stages, before clipping, of recent groups."""
        return self._updater.grad_norms

    def request_stop(self) -> None:
        """Ask all stages to stop; it travels with the next update. See `stopping`."""
        self._updater.status.stop = True

    def state_dict(self) -> states.State:
        """Drain, then the state of this stage: live tensors, as of a module. `merge_states` joins the stages' states,
        `cloned_state` keeps one, `torch.distributed.checkpoint` saves it and loads into it."""
        self.drain()
        return states.capture(self._updater, at_rest=True)

    def load_state_dict(self, state: states.State) -> None:
        """Continue from a state: this stage's own, or the union of all, saved with any number of stages."""
        self.drain()
        states.restore(self._updater, state)
        self.group = state["group"]

    def hold(self, copied: torch.cuda.Event) -> None:
        """What `capture` gave is being copied on another stream until `copied`: later updates wait for it, on the
        device, before they write."""
        self._updater.hold(copied)

    def spread_master(self) -> None:
        """The master was changed from outside (weights loaded, averaged, pruned): the groups to come read it, as after
        a flush. On all ranks together; data ranks and tied weights take the values of the first of them."""
        self.drain()
        self._updater.await_copies()
        with torch.no_grad(), self._whole_master():
            weights = [weight for versions in self._updater.versions for weight in versions.master.weights]
            self._updater.peers.broadcast_initial(weights)
            for versions in self._updater.versions:
                versions.spread()

    def close(self) -> None:
        """Give back what is shared with other ranks, on all of them together."""
        self._give_back(failed=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._give_back(failed=error is not None)

    def _give_back(self, failed: bool) -> None:
        """Process groups and sockets; `failed`: without waiting for the others."""
        peers = self._updater.peers
        peers.close()
        if isinstance(self.optimizer, Muon):
            self.optimizer.close(failed)
        if peers.groups is not None:
            peers.groups.close(failed)

    def _whole_master(self) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext()


def refuse_in_hook(in_hook: bool) -> None:
    if in_hook:
        raise UserError(
            "after_update is called inside an update, which cannot wait for itself: use capture() there, and call "
            "step, drain, eval, state_dict and stopping outside."
        )


class Guard:
    """Around what a schedule does. An error inside is the end of it, and gets this stage's name."""

    def __init__(self, stage: int, in_hook: Callable[[], bool]) -> None:
        """`in_hook`: whether `after_update` runs, which may wait for nothing."""
        self._stage, self._in_hook = stage, in_hook
        self.failed: str | None = None  # why nothing more can be done
        self.closed = False

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        if self.failed is not None:
            raise UserError(
                f"This schedule failed before ({self.failed}) and cannot go on. Make a new one and load a state."
            )
        if self.closed:
            raise UserError("This schedule was closed. Make a new one and load a state.")
        refuse_in_hook(self._in_hook())
        try:
            yield
        except StageError as error:
            if self.failed is not None:  # told by an inner call, with this stage's name
                raise
            self.failed = str(error)
            raise StageError(f"Stage {self._stage} {error}") from error.__cause__
        except BaseException as error:
            self.fail(error)
            raise

    def fail(self, error: BaseException) -> None:
        self.failed = self.failed or f"{type(error).__name__}: {error}"
