"""The step an optimizer would take next if the next gradient brought no news: its momentum, scaled as a step.

    SGD            -lr m
    Adam, MARS     -lr (m / (1 - beta1^t)) / (sqrt(n / (1 - beta2^t)) + eps)
    NAdam          -lr (mu_{t+1} m / (1 - mu_1 ... mu_{t+1})) / (sqrt(n / (1 - beta2^t)) + eps)
    Lion           -lr sign(m)
    Muon           -lr scale Orthogonal(m), since the step's size says nothing about the momentum's

Weight decay is left out. An optimizer of our own gives its velocity by a method `velocity(params)`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from slipstream.errors import UserError
from slipstream.optim.sharded import local


@runtime_checkable
class HasVelocity(Protocol):
    def velocity(self, params: Sequence[Parameter]) -> list[Tensor]: ...


def velocity(optimizer: Optimizer, params: Sequence[Parameter]) -> list[Tensor]:
    """One new local tensor for each of `params`."""
    if isinstance(optimizer, HasVelocity):
        return optimizer.velocity(params)
    kind: Any = type(optimizer)
    if kind not in _TORCH:
        raise no_velocity(kind.__name__)
    rule = RULES[_TORCH[kind]]
    return [rule(group, state) for group, state in groups_and_states(optimizer, params)]


def no_velocity(name: str) -> UserError:
    return UserError(
        f"momentum_prediction does not know the momentum of {name}. Use it with muon, normuon, scion, adamw, "
        "nadamw, sgd, lion or mars, or set the correction to 'error_feedback', which fits any optimizer."
    )


def groups_and_states(
    optimizer: Optimizer, params: Sequence[Parameter]
) -> Iterator[tuple[dict[str, Any], Mapping[str, Any]]]:
    """The parameter group and the state of each of `params`, in order."""
    group_of = {parameter: group for group in optimizer.param_groups for parameter in group["params"]}
    for parameter in params:
        state = optimizer.state.get(parameter)
        if not state:
            raise UserError(
                "momentum_prediction needs optimizer state, and there is none for a parameter of shape "
                f"{tuple(parameter.shape)}. Step the optimizer first, or use 'error_feedback'."
            )
        yield group_of[parameter], state


def sgd_velocity(group: Mapping[str, Any], state: Mapping[str, Any]) -> Tensor:
    if state.get("momentum_buffer") is None:
        raise UserError("momentum_prediction needs momentum: set the momentum of sgd above 0.")
    return local(state["momentum_buffer"]) * -group["lr"]


def adam_velocity(group: Mapping[str, Any], state: Mapping[str, Any]) -> Tensor:
    return _adam(group, state, 1 / (1 - group["betas"][0] ** _number(state["step"])))


def nadam_velocity(group: Mapping[str, Any], state: Mapping[str, Any]) -> Tensor:
    decay = 0.96 ** ((_number(state["step"]) + 1) * group["momentum_decay"])
    momentum = group["betas"][0] * (1 - 0.5 * decay)
    return _adam(group, state, momentum / (1 - _number(state["mu_product"]) * momentum))


def _number(value: Tensor | float) -> Any:
    """A counter of a state. What an optimizer keeps on a device stays there: to read it is to wait for all that is
    queued, once for each parameter."""
    return value.double() if isinstance(value, Tensor) and value.device.type != "cpu" else float(value)


def _adam(group: Mapping[str, Any], state: Mapping[str, Any], weight: float | Tensor) -> Tensor:
    second = local(state["exp_avg_sq"]) / (1 - group["betas"][1] ** _number(state["step"]))
    return local(state["exp_avg"]).div(second.sqrt_().add_(group["eps"])).mul_(-group["lr"] * weight)


def lion_velocity(group: Mapping[str, Any], state: Mapping[str, Any]) -> Tensor:
    return torch.sign(local(state["exp_avg"])).mul_(-group["lr"])


RULES: dict[str, Callable[[Mapping[str, Any], Mapping[str, Any]], Tensor]] = {
    "sgd": sgd_velocity,
    "adamw": adam_velocity,
    "nadamw": nadam_velocity,
    "mars": adam_velocity,
    "lion": lion_velocity,
}
_TORCH = {
    torch.optim.SGD: "sgd",
    torch.optim.Adam: "adamw",
    torch.optim.AdamW: "adamw",
    torch.optim.NAdam: "nadamw",
}
