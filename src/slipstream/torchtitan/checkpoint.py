"""torchtitan's checkpoints, with the engine's banks beside the master, by full name.

Master, optimizer, schedulers, data and counters are saved by torchtitan as ever, so stock torchtitan loads the master
from our checkpoints. Under the key "slipstream" lie the two banks and what the engine counts: with them a run goes on
exactly, with another number of stages and ranks too. A checkpoint without that key (a stock one, or weights alone) is
loaded as after a flush: the groups to come read the master, until there is a bank.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.stateful import Stateful
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.checkpointer.utils import canonical_fqn
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.tools import filesystem
from torchtitan.tools.logging import logger

from slipstream.pipeline.runtime import Schedule2BW

KEY = "slipstream"
# torchtitan saves the rest.
OURS = ("format", "group", "skipped", "published", "banks", "memory", "correction")


class Banks(Stateful):
    """The part of the engine's state that torchtitan does not know."""

    def __init__(
        self,
        engine: Schedule2BW,
        optimizers: OptimizersContainer,
        step: Callable[[], int],
        context: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._engine, self._optimizers, self._step, self._context = engine, optimizers, step, context
        self._loaded: dict[str, Any] | None = None

    def land(self) -> None:
        """Let every step that was handed in update the master."""
        with self._context():  # microbatches in flight run their backwards here
            self._engine.drain()

    def state_dict(self) -> dict[str, Any]:
        return _renamed({key: value for key, value in self._whole().items() if key in OURS}, canonical_fqn)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._loaded = state_dict  # until master and optimizer are loaded too

    def settle(self, with_optimizer: bool) -> bool:
        """After torchtitan has loaded what is its own: put the banks in, or the master where there are none. Says
        which. `with_optimizer`: the optimizer and the step were loaded."""
        loaded, self._loaded = self._loaded, None
        if not with_optimizer:
            with self._context():
                self._engine.spread_master()
            return False
        state = self._whole()
        if loaded is None:
            state |= {"group": self._step(), "banks": {}, "published": {}}
        else:
            own = {canonical_fqn(name): name for name in state["master"]}
            state |= _renamed(loaded, lambda name: own.get(name, name))
        self._engine.load_state_dict(state)
        return loaded is not None

    def _whole(self) -> dict[str, Any]:
        self._optimizers.state_dict()  # makes what the first step would make, as torchtitan does before it loads
        with self._context():
            return self._engine.state_dict()


def _renamed(state: dict[str, Any], name: Callable[[str], str]) -> dict[str, Any]:
    """Banks and memory under other names of their parameters."""
    banks = {bank: {name(key): value for key, value in held.items()} for bank, held in state["banks"].items()}
    return state | {"banks": banks, "memory": {name(key): value for key, value in state["memory"].items()}}


class CheckpointManager2BW(CheckpointManager):
    """torchtitan's manager; `attach` gives it the engine."""

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):
        pass

    _banks: Banks | None = None

    def attach(self, banks: Banks) -> None:
        self._banks = banks
        if self.enable:
            self.states[KEY] = banks

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        if self._banks is not None and self._should_save(curr_step, last_step):
            self._banks.land()
        return super()._save(curr_step, last_step)

    def dcp_load(
        self, state_dict: dict[str, Any], checkpoint_id: str, from_hf: bool, from_quantized: bool
    ) -> None:
        with_optimizer = "optimizer" in state_dict
        if KEY in state_dict and not _has_banks(checkpoint_id):
            state_dict = {key: value for key, value in state_dict.items() if key != KEY}
        super().dcp_load(state_dict, checkpoint_id, from_hf, from_quantized)
        if self._banks is not None and not self._banks.settle(with_optimizer):
            logger.warning(
                f"slipstream: {checkpoint_id} was loaded without banks, which only a checkpoint of 2BW has. Training "
                "goes on as after a flush: the next steps read the newest weights."
            )


def _has_banks(checkpoint_id: str) -> bool:
    if filesystem.is_remote(checkpoint_id):  # not asked over the network: exclude_from_loading tells
        return True
    names = dcp.FileSystemReader(checkpoint_id).read_metadata().state_dict_metadata
    return any(name == KEY or name.startswith(f"{KEY}.") for name in names)
