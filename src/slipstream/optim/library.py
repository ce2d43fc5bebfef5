"""Optimizers of the pytorch-optimizer library, with AdamW for the parameters they do not take.

Parameter groups and state are those of one `torch.optim.Optimizer`: the learning rate is set here, a
checkpoint is read and written here, and the library's optimizer sees both just before it steps.

Invariant: everything that changes from step to step lies in `state[parameter]`, as tensors and numbers. The
library counts steps in its parameter groups, where restoring a group's hyperparameters would undo the count,
and SOAP keeps lists of tensors, which no tensor file can hold: both are translated around each step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from slipstream.errors import UserError
from slipstream.optim.velocity import RULES, groups_and_states, no_velocity


def library_class(name: str) -> Callable[..., Optimizer]:
    """Imported on use: most runs need no optimizer from there, and the import takes a second."""
    try:
        import pytorch_optimizer
    except ImportError as error:
        raise UserError(
            f"{name} comes from pytorch-optimizer, which is not installed. Install it, or use muon or adamw."
        ) from error
    return getattr(pytorch_optimizer, name)


class LibraryOptimizer(Optimizer):
    """`library` over its own groups, then `rest` over the others; `algorithm` tells them apart."""

    def __init__(self, library: Optimizer, rest: Optimizer | None = None) -> None:
        self._library, self._rest = library, rest
        groups = [*library.param_groups, *(rest.param_groups if rest else [])]
        super().__init__([{key: group[key] for key in group if key != "step"} for group in groups], {})

    def __getstate__(self) -> dict[str, Any]:  # a deep copy must keep its parts
        return {**super().__getstate__(), "_library": self._library, "_rest": self._rest}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        remaining = iter(self.param_groups)
        for part in (self._library, self._rest):
            if part is not None:
                part.state = self.state
                for group in part.param_groups:
                    group.update(next(remaining))
        self._step_library()
        if self._rest is not None:
            self._rest.step()
        return loss

    def _step_library(self) -> None:
        for group in self._library.param_groups:
            states = [self.state[parameter] for parameter in group["params"] if parameter in self.state]
            group["step"] = max((int(state.pop("step")) for state in states), default=0)
            for state in states:
                _unpack(state)
        self._library.step()
        for group in self._library.param_groups:
            for parameter in group["params"]:
                if parameter in self.state:
                    _pack(self.state[parameter])
                    self.state[parameter]["step"] = group["step"]

    @torch.no_grad()
    def velocity(self, params: Sequence[Parameter]) -> list[Tensor]:
        ahead = []
        for group, state in groups_and_states(self, params):
            if group["algorithm"] not in RULES:
                raise no_velocity(group["algorithm"])
            ahead.append(RULES[group["algorithm"]](group, state))
        return ahead


def _pack(state: dict[str, Any]) -> None:
    """{"Q": [A, []]} -> {"Q.0": A, "Q.length": 2}: SOAP's empty list stands for a side it leaves alone."""
    for key in [key for key in state if isinstance(state[key], list)]:
        values = state.pop(key)
        state[f"{key}.length"] = len(values)
        state.update({f"{key}.{i}": value for i, value in enumerate(values) if isinstance(value, Tensor)})


def _unpack(state: dict[str, Any]) -> None:
    for length in [key for key in state if key.endswith(".length")]:
        key = length.removesuffix(".length")
        state[key] = [state.pop(f"{key}.{i}", []) for i in range(int(state.pop(length)))]
