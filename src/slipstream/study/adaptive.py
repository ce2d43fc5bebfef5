"""Two ideas about error feedback, for studies: a λ that each tensor measures, and a λ of its own for the rest.

Use them by their place: optim.correction = "slipstream.study.adaptive:AdaptiveErrorFeedback".

The best λ for a tensor is the one that predicts its next step best. With d_g = z_g - z_{g-1},

    λ* = <d_g, d_{g-1}> / |d_{g-1}|²        minimises |d_g - λ d_{g-1}|

Keeping d_{g-1} would take a buffer, but the bank that a gradient was taken at holds it: when update g begins,

    e_g = z_g - b_{g-1} = d_g - λ_{g-1} d_{g-1}
    <d_g, d_{g-1}> = (|d_g|² + λ_{g-1}² |d_{g-1}|² - |e_g|²) / (2 λ_{g-1})

so three norms give the inner product. Invariant: per tensor a few scalars, no buffer, no synchronisation with
the host, and a result that depends on that tensor alone.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from slipstream.errors import UserError
from slipstream.lists import mul_, norms
from slipstream.optim.corrections import Correction, Publication


@dataclass
class _Step:
    """What one tensor remembers; scalars on its device, `count` of published banks on the host."""

    lam: Tensor  # of the newest bank
    lam_before: Tensor  # of the bank before it
    size: Tensor  # |d|² of the newest step
    size_before: Tensor
    inner: Tensor  # running means of <d_g, d_{g-1}> and of |d_{g-1}|²
    square: Tensor
    count: int = 0


class AdaptiveErrorFeedback(Correction):
    """b_{g+1} = z_{g+1} + λ (z_{g+1} - z_g), λ = mean <d_g, d_{g-1}> / mean |d_{g-1}|² within [low, high].

    The means forget with rate `memory`. λ starts at `lam`. Delay 1 only. Memory: during an update one difference
    of the size of the stage.
    """

    name = "adaptive_error_feedback"
    needs_previous = True
    corrects_gradient = True  # not changed: gradient() is where z_g meets b_{g-1}
    on_pieces = False  # λ is measured on whole tensors

    def __init__(self, lam: float = 1.0, memory: float = 0.95, low: float = 0.1, high: float = 1.5) -> None:
        if not 0 < low <= lam <= high or not 0 <= memory < 1:
            raise UserError(
                f"Adaptive feedback needs 0 < low <= lam <= high, not {low}, {lam}, {high}, {memory=}."
            )
        self.lam, self.memory, self.low, self.high = lam, memory, low, high
        self._steps: dict[int, _Step] = {}  # by the address of the master's tensor

    def gradient(self, grads: list[Tensor], master: list[Tensor], bank: list[Tensor]) -> None:
        for newest, read in zip(master, bank, strict=True):
            step = self._step(newest)
            if step.count < 2:
                continue
            error, lam = (newest - read).norm().float().square(), step.lam_before
            inner = (step.size + lam**2 * step.size_before - error) / (2 * lam)
            most = (step.size * step.size_before).sqrt()  # holds |inner| down whatever a skipped group left
            keep = torch.where(error > 0, self.memory, 1.0)  # a flushed group reads z_g itself: no news
            step.inner.lerp_(inner.clamp(-most, most), 1 - keep)
            step.square.lerp_(step.size_before, 1 - keep)

    def publish(self, at: Publication) -> None:
        if at.delay != 1:
            raise UserError(f"Adaptive feedback measures a delay of 1, not {at.delay}. Use error_feedback.")
        ahead = at.step()
        factors = []
        for tensor, size in zip(at.new, norms(ahead), strict=True):
            step = self._step(tensor)
            step.lam_before, step.size_before = step.lam, step.size
            step.size = size.float().square()
            known = step.square > 0
            measured = (step.inner / torch.where(known, step.square, 1.0)).clamp(self.low, self.high)
            step.lam = torch.where(known, measured, self.lam)
            step.count += 1
            factors.append(step.lam.to(tensor.dtype))
        mul_(ahead, factors)
        at.look_ahead(ahead)

    def strengths(self) -> list[float]:
        """λ of each tensor now, in the order of the parameters."""
        return [float(step.lam) for step in self._steps.values()]

    def memory_of(self, tensor: Tensor) -> dict[str, float]:
        step = self._step(tensor)
        return {item.name: float(getattr(step, item.name)) for item in fields(_Step)}

    def remember(self, tensor: Tensor, memory: dict[str, float]) -> None:
        self._steps.pop(tensor.data_ptr(), None)
        if memory:
            self._steps[tensor.data_ptr()] = _made(tensor, **memory)

    def _step(self, tensor: Tensor) -> _Step:
        if tensor.data_ptr() not in self._steps:
            self._steps[tensor.data_ptr()] = _made(tensor, lam=self.lam, lam_before=self.lam)
        return self._steps[tensor.data_ptr()]


def _made(tensor: Tensor, count: float = 0, **scalars: float) -> _Step:
    """With what is known of a tensor, on its device; the rest is 0."""
    names = [item.name for item in fields(_Step) if item.name != "count"]
    values = {name: torch.tensor(scalars.get(name, 0.0), device=tensor.device) for name in names}
    return _Step(**values, count=int(count))


class SplitErrorFeedback(Correction):
    """b = z + d (z - z_before) for hidden matrices, z + λ d (z - z_before) for the rest, d the delay.

    Delay harms the matrices most; embedding, head and norms follow AdamW, whose stability suffers from looking
    ahead. λ = 0 leaves the rest uncorrected. Memory: as error feedback.
    """

    name = "split_error_feedback"
    needs_previous = True

    def __init__(self, lam: float = 0.0) -> None:
        if lam < 0:
            raise UserError(f"lam={lam} must not be negative.")
        self.lam = lam

    def publish(self, at: Publication) -> None:
        matrices = {
            id(parameter)
            for group in at.optimizer.param_groups
            if group.get("role") == "matrices"
            for parameter in group["params"]
        }
        ahead = at.step()
        for step, parameter in zip(ahead, at.params, strict=True):
            step.mul_((1.0 if id(parameter) in matrices else self.lam) * at.delay)
        at.look_ahead(ahead)
