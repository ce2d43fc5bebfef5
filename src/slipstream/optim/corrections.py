"""What is done about delay: to a stale gradient, to its learning rate, or to the bank that is published.

Update g takes the gradient G_g at a bank that is `delay` updates old, steps the master z, and publishes

    z_{g+1} = Optimizer(z_g, state, G_g)
    b_{g+1} = z_{g+1}                        unless a correction writes something else.

Invariant: a correction owns no tensors. Whatever it needs (z_g, z_{g+1}, the optimizer's momentum) exists
already, so a correction adds no persistent memory, works with any optimizer, schedule, decay and clipping,
and a checkpoint needs nothing from it but scalars. The one object acts in the runtime and in the emulator
alike.

`nesterov`, the AsyncPP recipe, is not here because it is an optimizer: `build("nadamw", ...)`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, ClassVar

from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from slipstream.errors import UserError
from slipstream.lists import add_, copy_, extrapolate, mul_
from slipstream.optim.velocity import velocity
from slipstream.optimizers import unknown


@dataclass(frozen=True)
class Publication:
    """The moment after update g, and what there is to write the banks from. Lists go by parameter."""

    banks: list[Tensor]
    new: list[Tensor]  # z_{g+1}
    # z_g if a correction `needs_previous`; often the banks, so overwritten with them
    old: list[Tensor] | None
    optimizer: Optimizer
    params: list[Parameter]
    delay: int

    def previous(self) -> list[Tensor]:
        assert self.old is not None, "a correction that publishes from z_g has to say needs_previous"
        return self.old

    def step(self) -> list[Tensor]:
        """z_{g+1} - z_g, in memory of its own."""
        return [after - before for after, before in zip(self.new, self.previous(), strict=True)]

    def look_ahead(self, by: list[Tensor]) -> None:
        """b_{g+1} = z_{g+1} + `by`, which is overwritten."""
        add_(by, self.new)
        copy_(self.banks, by)


class Correction:
    """No correction: b_{g+1} = z_{g+1}. Memory: none."""

    name: ClassVar[str] = "none"
    needs_previous: bool = False  # publish() is given z_g
    corrects_gradient: bool = False  # gradient() is called
    on_pieces: bool = True  # what it does to a piece of a tensor is what it does to the whole

    @property
    def looks_ahead(self) -> bool:
        """Whether a bank is anything but a copy of the master."""
        return type(self).publish is not Correction.publish

    def hyperparameters(self, group: int, values: list[dict[str, Any]]) -> None:
        """Edit the parameter-group values that update `group` will use, in place."""

    def gradient(self, grads: list[Tensor], master: list[Tensor], bank: list[Tensor]) -> None:
        """Correct, in place, `grads` taken at `bank` while the newest weights are `master`."""

    def publish(self, at: Publication) -> None:
        """Write the banks b_{g+1}."""
        copy_(at.banks, at.new)

    def memory_of(self, tensor: Tensor) -> dict[str, float]:
        """What is remembered of one tensor of the master; a checkpoint keeps it under the parameter's name."""
        return {}

    def remember(self, tensor: Tensor, memory: dict[str, float]) -> None:
        """The reverse of `memory_of`, for a tensor that may live in another process than before."""

    def state_dict(self) -> dict[str, Any]:
        """What belongs to no tensor, and is the same on every stage."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert not state, f"correction {self.name!r} keeps no state, got {sorted(state)}"


class ErrorFeedback(Correction):
    """b_{g+1} = z_{g+1} + λ d (z_{g+1} - z_g), d the delay.

    Source: arXiv 2606.30634, whose form x_{t+1} = x_t - 2 u_t + u_{t-1} is this one with x the bank, λ = 1;
    linear weight prediction in weight-difference form (Kosson et al. 2020). Memory: none that lasts. z_g lies
    in the dying bank where banks have the master's dtype, else in a copy that lives during the update.
    """

    name = "error_feedback"
    needs_previous = True

    def __init__(self, lam: float = 1.0) -> None:
        self.lam = _positive("lam", lam)

    def publish(self, at: Publication) -> None:
        extrapolate(at.banks, at.previous(), at.new, 1 + self.lam * at.delay)


class MomentumPrediction(Correction):
    """b_{g+1} = z_{g+1} + λ d v, v the step the optimizer would take next if the gradient brought no news.

    v comes from the momentum alone (`velocity.py`): -lr m for SGD, -lr m̂ / (sqrt(n̂) + eps) for Adam,
    -lr Orthogonal(m) for Muon. Source: SpecTrain (Chen et al. 2018), XPipe (Guan et al. 2019). Memory: none
    that lasts; one stage-sized velocity during the update. Muon pays a second Newton-Schulz for it.
    """

    name = "momentum_prediction"

    def __init__(self, lam: float = 1.0) -> None:
        self.lam = _positive("lam", lam)

    def publish(self, at: Publication) -> None:
        ahead = velocity(at.optimizer, at.params)
        mul_(ahead, self.lam * at.delay)
        at.look_ahead(ahead)


class DelayCompensation(Correction):
    """G ← G + λ G ⊙ G ⊙ (z_g - b), b the bank the gradient was taken at.

    A first-order Taylor step with the diagonal of G Gᵀ in place of the Hessian. Source: DC-ASGD (Zheng et al.
    2017, arXiv 1609.08326), the variant with constant λ; 0.04 is the default of MXNet's `optimizer.DCASGD`.
    Memory: none that lasts; two copies of one tensor at a time.
    """

    name = "delay_compensation"
    corrects_gradient = True

    def __init__(self, lam: float = 0.04) -> None:
        self.lam = _positive("lam", lam)

    def gradient(self, grads: list[Tensor], master: list[Tensor], bank: list[Tensor]) -> None:
        for grad, newest, read in zip(grads, master, bank, strict=True):
            grad.addcmul_(grad.square(), (newest - read).to(grad.dtype), value=self.lam)


class LRScaling(Correction):
    """lr_g ← lr_g (1 + d)^-(1 - p), p = min(1, (g - start) / steps); groups before `start` keep their rate.

    Source: PipeMare (Yang et al. 2021), which divides by d^(1 - p): nothing at delay 1, hence 1 + d.
    `start` is the length of a synchronous start, where there is no delay to scale for. With a cutover of c of m
    microbatches the mean delay is c / m: give that as `delay`. Memory: none.
    """

    name = "lr_scaling"

    def __init__(self, steps: int, delay: float = 1, start: int = 0) -> None:
        self.steps = int(_positive("steps", steps))
        self.delay = delay and _positive("delay", delay)  # 0 scales nothing
        self.start = start

    def factor(self, group: int) -> float:
        if group < self.start:
            return 1.0
        progress = min(1.0, (group - self.start) / self.steps)
        return (1 + self.delay) ** -(1 - progress)

    def hyperparameters(self, group: int, values: list[dict[str, Any]]) -> None:
        for value in values:
            value["lr"] = value["lr"] * self.factor(group)


CORRECTIONS: dict[str, type[Correction]] = {
    kind.name: kind for kind in (Correction, ErrorFeedback, MomentumPrediction, DelayCompensation, LRScaling)
}


def build_correction(spec: str | Correction, **options: Any) -> Correction:
    """A correction by name, or a class of your own by its place: "package.module:Class".

    Options: `lam` for error_feedback, momentum_prediction and delay_compensation; `steps`, `delay` and
    `start` for lr_scaling.
    """
    if isinstance(spec, Correction):
        if options:
            raise UserError(
                f"Options {sorted(options)} come with a ready correction. Give them when it is made."
            )
        return spec
    if spec == "nesterov":
        raise UserError(
            "Nesterov is an optimizer here: set the optimizer to 'nadamw' and the correction to 'none'."
        )
    kind = _own(spec) if ":" in str(spec) else CORRECTIONS.get(spec)
    if kind is None:
        raise UserError(unknown("correction", str(spec), CORRECTIONS))
    try:
        inspect.signature(kind).bind(**options)
    except TypeError as error:
        given = ", ".join(f"{key}={value}" for key, value in options.items()) or "no options"
        raise UserError(f"The correction {spec!r} cannot be made with {given}: {error}.") from error
    return kind(**options)


def check_mixed(correction: Correction) -> None:
    """Refuse a correction that cannot follow a cutover. One that decides what is written into a bank acts on the old
    part of a group; one that changes hyperparameters acts on the update; one that changes the gradient would need it
    apart from that of the fresh part, which is one sum with it."""
    if correction.corrects_gradient:
        raise UserError(
            f"The correction {correction.name!r} changes a gradient that was taken at one bank; with a cutover a part "
            "of the group reads the newest weights. Use error_feedback or none, or a cutover of all microbatches."
        )


def _own(spec: str) -> type[Correction]:
    """The class at "package.module:Class"."""
    module, _, name = spec.partition(":")
    try:
        found = getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise UserError(f"The correction {spec!r} cannot be found: {error}.") from error
    if not (isinstance(found, type) and issubclass(found, Correction)):
        raise UserError(f"{spec!r} is no correction: derive it from slipstream.optim.corrections.Correction.")
    return found


def synchronous_groups(start: int, finish: int, total: int) -> Callable[[int], bool]:
    """Which groups are flushed: the first `start` and the last `finish` of `total`.

    A synchronous start spares the steep first updates from delay, a synchronous finish settles the last ones.
    """
    if start < 0 or finish < 0 or start + finish > total:
        raise UserError(
            f"A synchronous start of {start} and finish of {finish} updates do not fit into a run of {total}."
        )
    return lambda group: group < start or group >= total - finish


def _positive(option: str, value: float) -> float:
    if not value > 0:
        raise UserError(f"{option}={value} must be above 0. For no correction use the correction 'none'.")
    return value
