"""An idea about error feedback, for studies: correct the next look-ahead by how far the last one missed.

Use it by its place: optim.correction = "slipstream.optim.innovation:InnovationFeedback".

Error feedback predicts that the next step repeats the last. With d_g = z_g - z_{g-1} and p_g = b_g - z_g the look-ahead
that was published, the miss is known when update g begins, because the bank its gradient was taken at is at hand:

    e_g     = z_g - b_{g-1} = d_g - p_{g-1}
    p_{g+1} = d_{g+1} + κ e_g

κ = 0 is error feedback. Where steps repeat, e vanishes and nothing changes. Where they alternate in sign, as they do
across a narrow valley, looking ahead by a whole step is the wrong way: there p = (1 - κ) / (1 + κ) d, half a step at
κ = 1/3. Noise in the steps is what it costs, so a κ well below 1 is the one to try.
"""

from __future__ import annotations

from torch import Tensor

from slipstream.errors import UserError
from slipstream.lists import add_
from slipstream.optim.corrections import Correction, Publication


class InnovationFeedback(Correction):
    """b_{g+1} = z_{g+1} + (z_{g+1} - z_g) + κ (z_g - b_{g-1}). Delay 1 only.

    Memory: nothing that lasts. The miss lives from the start of an update to its end, and so does a copy of the step.
    """

    name = "innovation_feedback"
    needs_previous = True
    corrects_gradient = True  # not changed: gradient() is where z_g meets b_{g-1}

    def __init__(self, lam: float = 0.3) -> None:
        if not -1 < lam < 1:
            raise UserError(
                f"lam={lam} must lie between -1 and 1: beyond, misses would grow from step to step."
            )
        self.lam = lam
        self._misses: dict[int, Tensor] = {}  # by the address of the master's tensor, during one update

    def gradient(self, grads: list[Tensor], master: list[Tensor], bank: list[Tensor]) -> None:
        self._misses = {
            newest.data_ptr(): newest - read.to(newest.dtype)
            for newest, read in zip(master, bank, strict=True)
        }

    def publish(self, at: Publication) -> None:
        if at.delay != 1:
            raise UserError(f"Innovation feedback knows a delay of 1, not {at.delay}. Use error_feedback.")
        ahead = at.step()
        misses = [self._misses.pop(z.data_ptr(), None) for z in at.new]
        known = [(step, miss) for step, miss in zip(ahead, misses, strict=True) if miss is not None]
        add_([step for step, _ in known], [miss for _, miss in known], alpha=self.lam)
        at.look_ahead(ahead)
