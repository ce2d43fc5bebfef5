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
    """`kind` with `options` over its own groups; AdamW over the groups whose `algorithm` is "adamw"."""

    def __init__(self, kind: str, groups: Sequence[dict[str, Any]], options: dict[str, Any]) -> None:
        self._kind, self._options = kind, options
        self._connect(groups)
        merged = [*self._library.param_groups, *(self._rest.param_groups if self._rest else [])]
        super().__init__([{key: group[key] for key in group if key != "step"} for group in merged], {})

    def _connect(self, groups: Sequence[dict[str, Any]]) -> None:
        own = [dict(group) for group in groups if group["algorithm"] != "adamw"]
        rest = [dict(group) for group in groups if group["algorithm"] == "adamw"]
        self._library = library_class(self._kind)(own, **self._options)
        self._rest = torch.optim.AdamW(rest, fused=True) if rest else None

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_kind": self._kind, "_options": self._options}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._connect(self.param_groups)  # a copy steps with parts of its own

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # pyrefly: ignore[bad-override]
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
