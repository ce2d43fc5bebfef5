"""What is settled about a module when its replicas are made, and what they go on to follow.

Forwards run on replicas, so nothing that is done to the module itself reaches them. The mode of its parts, train or
eval, is passed on; that a parameter is frozen or thawed would change what an update is made of, and is refused.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from slipstream.errors import UserError


class Settled:
    """A module and the copies that are trained for it."""

    def __init__(self, module: nn.Module, copies: Sequence[nn.Module]) -> None:
        self._trained = [(name, p, p.requires_grad) for name, p in module.named_parameters()]
        named = [dict(copy.named_modules()) for copy in copies]
        self._parts = [
            (part, [parts[name] for parts in named if name in parts]) for name, part in module.named_modules()
        ]

    def follow(self) -> None:
        """Before a group."""
        for name, parameter, trained in self._trained:
            if parameter.requires_grad is not trained:
                raise UserError(
                    f"'{name}' was {'frozen' if trained else 'thawed'} after the schedule was made, whose weight "
                    "versions hold what was trained then. Set requires_grad before, or close this schedule and make a "
                    "new one."
                )
        for part, copies in self._parts:
            for each in copies:
                each.training = part.training
