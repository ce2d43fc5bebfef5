"""What is settled about a module when its replicas are made, and what they go on to follow.

Forwards run on replicas, so nothing that is done to the module itself reaches them. The mode of its parts, train or
eval, is passed on; that a parameter is frozen or thawed would change what an update is made of, and is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress

from torch import nn

from slipstream.errors import UserError


class Settled:
    """A module and the copies that are trained for it."""

    def __init__(self, module: nn.Module, copies: Sequence[nn.Module]) -> None:
        self._parameters = dict(module.named_parameters())
        self._trained = self._which_train()
        self._parts = dict(module.named_modules())
        self._copies = [dict(copy.named_modules()) for copy in copies]
        self._modes: list[bool] = []  # that the copies were given

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
        modes = [part.training for part in self._parts.values()]
        if modes != self._modes:
            for name, mode in zip(self._parts, modes, strict=True):
                for parts in self._copies:
                    if name in parts:
                        parts[name].training = mode
            self._modes = modes

    def _which_train(self) -> list[bool]:
        return [parameter.requires_grad for parameter in self._parameters.values()]
