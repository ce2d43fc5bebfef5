"""Gradients of one group, summed over its microbatches in the master's precision.

Where banks have the master's dtype, autograd's own accumulation in `.grad` is the sum. Where they are narrower
(bf16), each microbatch's gradient is added to an accumulator of the master's dtype and `.grad` is dropped: a sum
kept in bf16 would lose the small terms. Where a group's fresh part reads another replica than its old part, the sum
goes over to it: microbatch after microbatch, one sum, in their order.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from slipstream.lists import add_, copy_
from slipstream.optim.sharded import local  # a gradient has no graph to be detached from
from slipstream.pipeline.peers import Gradients
from slipstream.pipeline.replica import Replica


class Accumulator:
    """Collects the gradients of the group whose backwards run now; groups never interleave on a stage."""

    def __init__(self, master: Replica) -> None:
        self._dtypes = [p.dtype for p in master.parameters]
        self._at: Replica | None = None  # the replica whose `.grad` holds the sum so far
        self._wide: dict[int, Tensor] = {}
        self._narrow: dict[int, list[int]] = {}  # by the replica's id: which of its parameters are narrower

    def enter(self, replica: Replica) -> None:
        """Before the backward of a microbatch that read `replica`."""
        if self._at is not None and self._at is not replica:
            for before, now in zip(self._at.parameters, replica.parameters, strict=True):
                now.grad, before.grad = before.grad, None
        self._at = replica

    def add(self, replica: Replica) -> None:
        """After the backward of a microbatch that read `replica`."""
        narrow = self._narrow.get(id(replica))
        if narrow is None:
            dtypes = enumerate(zip(replica.parameters, self._dtypes, strict=True))
            narrow = self._narrow[id(replica)] = [i for i, (p, dtype) in dtypes if p.dtype != dtype]
        if not narrow:
            return
        sums, terms, firsts, first_terms = [], [], [], []
        for i in narrow:
            grad, replica.parameters[i].grad = replica.parameters[i].grad, None
            if grad is None:
                continue
            term = _as_laid_out(grad, replica.parameters[i])
            if (wide := self._wide.get(i)) is None:
                self._wide[i] = torch.empty_like(term, dtype=self._dtypes[i])
                firsts.append(self._wide[i])
                first_terms.append(term)
            else:
                sums.append(wide)
                terms.append(term)
        with torch.no_grad():
            copy_(firsts, first_terms)
            add_(sums, terms)

    def take(self, replica: Replica | None = None) -> Gradients:
        """The group's gradients; what follows starts from nothing. `replica`: of the last microbatch, for those who
        never call `enter`."""
        replica, self._at = self._at or replica, None
        wide, self._wide = self._wide, {}
        if replica is None:
            return [None] * len(self._dtypes)
        grads: Gradients = []
        for i, parameter in enumerate(replica.parameters):
            grad, parameter.grad = parameter.grad, None
            grads.append(_as_laid_out(grad, parameter) if grad is not None else wide.get(i))
        return grads


def _as_laid_out(grad: Tensor, parameter: Tensor) -> Tensor:
    """This rank's part of a gradient. Tensor parallelism may leave a sum over its ranks to be made (`Partial`), of a
    norm's weight, say, when each rank saw some of the tokens."""
    if (
        isinstance(grad, DTensor)
        and isinstance(parameter, DTensor)
        and grad.placements != parameter.placements
    ):
        grad = grad.redistribute(parameter.device_mesh, parameter.placements)
    part = local(grad)
    wait = getattr(part, "wait", None)  # of a tensor that is still on its way
    return part if wait is None else wait()
