"""What is settled about a module when its replicas are made, and what they go on to follow.

Forwards run on replicas, so nothing that is done to the module itself reaches them. The mode of its parts, train or
eval, is passed on, a group's for as long as its microbatches are in flight: a backward may compute layers again. That a
parameter is frozen or thawed would change what an update is made of, and is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress

from torch import nn

from slipstream.errors import UserError
from slipstream.pipeline.replica import Replica
from slipstream.pipeline.stage_graphs import Modes, RecordedCall


class Settled:
    """A module and the replicas that are trained for it."""

    def __init__(self, module: nn.Module, replicas: Sequence[Replica]) -> None:
        self._parameters = dict(module.named_parameters())
        self._trained = self._which_train()
        self._parts = dict(module.named_modules())
        self._copies = [dict(replica.module.named_modules()) for replica in replicas]
        self._recorded = [replica.call for replica in replicas if isinstance(replica.call, RecordedCall)]
        self.modes: Modes = ()  # of the group that entered last
        self._of_copies: Modes = ()

    def follow(self) -> None:
        """Before a group."""
        if (now := self._which_train()) != self._trained:
            changed = map(bool.__ne__, self._trained, now)
            name = next(compress(self._parameters, changed))
            raise UserError(
                f"'{name}' was {'thawed' if self._parameters[name].requires_grad else 'frozen'} after the schedule was "
                "made, whose weight versions hold what was trained then. Set requires_grad before, or close this "
                "schedule and make a new one."
            )
        modes = tuple([part.training for part in self._parts.values()])
        if modes != self.modes:
            self.modes = modes
        self.put(self.modes)

    def put(self, modes: Modes) -> None:
        """The replicas into the modes of some group."""
        if modes is self._of_copies:
            return
        for name, mode in zip(self._parts, modes, strict=True):
            for parts in self._copies:
                if name in parts:
                    parts[name].training = mode
        for call in self._recorded:
            call.modes = modes
        self._of_copies = modes

    def _which_train(self) -> list[bool]:
        return [parameter.requires_grad for parameter in self._parameters.values()]
