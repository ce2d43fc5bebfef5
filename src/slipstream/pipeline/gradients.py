"""Gradients of one group, summed over its microbatches in the master's precision.

Where banks have the master's dtype, autograd's own accumulation in `.grad` is the sum. Where they are narrower
(bf16), each microbatch's gradient is added to an accumulator of the master's dtype and `.grad` is dropped: a sum
kept in bf16 would lose the small terms. On request all sums are in bf16, each addition rounded up or down at random
(`kernels/dither.py`: one rounded to the nearest would stand still once its terms fall below half a unit in its last
place). Where a group's fresh part reads another replica than its old part, the sum goes over to it:
microbatch after microbatch, one sum, in their order.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from slipstream.kernels.dither import add_dithered
from slipstream.lists import add_, copy_
from slipstream.optim.sharded import local
from slipstream.pipeline.peers import Gradients
from slipstream.pipeline.replica import Replica
from slipstream.pipeline.stage_graphs import RecordedCall
from slipstream.torch_late import is_dtensor
from slipstream.torch_private import updating

AT_ONCE_BYTES = 16 << 20  # enough for one launch to be worth its while


class Accumulator:
    """Collects the gradients of the group whose backwards run now; groups never interleave on a stage.

    `at_once`: a narrow gradient is added as soon as the backward has made it, a few megabytes at a time, and dropped;
    else all of a microbatch's wait for `add`. `dtype`: bfloat16 for sums that are rounded at random; None: the
    master's.
    """

    def __init__(
        self,
        master: Replica,
        names: Sequence[str] = (),
        *,
        at_once: bool = False,
        dtype: torch.dtype | None = None,
    ) -> None:
        self._names, self._dithered = names, dtype is not None
        self._turn = 0  # of the microbatch whose backward runs
        self._dtypes = [dtype or p.dtype for p in master.parameters]
        self._at: Replica | None = None  # the replica whose `.grad` holds the sum so far
        self._wide: dict[int, Tensor] = {}
        self._narrow: dict[int, list[int]] = {}  # by the replica's id: which of its parameters are narrower
        self._at_once = at_once
        self._made: list[tuple[int, Tensor]] = []  # by the backward that runs, and not added yet
        self._made_bytes = 0

    def enter(self, replica: Replica, turn: int) -> None:
        """Before the backward of a microbatch that read `replica`, the `turn`-th of the run."""
        self._turn = turn
        if self._at is not None and self._at is not replica:
            for before, now in zip(self._at.parameters, replica.parameters, strict=True):
                now.grad, before.grad = before.grad, None
        self._at = replica
        self._meet(replica)

    def _meet(self, replica: Replica) -> None:
        if id(replica) in self._narrow:
            return
        pairs = enumerate(zip(replica.parameters, self._dtypes, strict=True))
        narrow = [i for i, (p, dtype) in pairs if p.dtype != dtype or self._dithered]
        hooked: list[int] = []
        if self._at_once:  # FSDP2 writes its gradients itself, and late
            hooked = [i for i in narrow if not is_dtensor(replica.parameters[i])]
        for i in hooked:
            replica.parameters[i].register_post_accumulate_grad_hook(partial(self._on_grad, i))
        self._narrow[id(replica)] = [i for i in narrow if i not in set(hooked)]

    def _on_grad(self, index: int, parameter: Tensor) -> None:
        assert parameter.grad is not None
        self._made.append((index, parameter.grad))
        self._made_bytes += parameter.grad.nbytes
        parameter.grad = None
        if self._made_bytes > AT_ONCE_BYTES:
            self._add_made()

    def _add_made(self) -> None:
        made, self._made, self._made_bytes = self._made, [], 0
        self._add(made)

    def add(self, replica: Replica) -> None:
        """After the backward of a microbatch that read `replica`."""
        self._meet(replica)
        self._add_made()
        found = []
        for i in self._narrow[id(replica)]:
            parameter = replica.parameters[i]
            grad, parameter.grad = parameter.grad, None
            if grad is not None:
                found.append((i, _as_laid_out(grad, parameter)))
        self._add(found)

    def _add(self, terms: Sequence[tuple[int, Tensor]]) -> None:
        with torch.no_grad(), updating():
            first = [(i, term) for i, term in terms if i not in self._wide]
            more = [(i, term) for i, term in terms if i in self._wide]
            for i, term in first:
                self._wide[i] = torch.empty_like(term, dtype=self._dtypes[i])
            copy_([self._wide[i] for i, _ in first], [term for _, term in first])
            sums, others = [self._wide[i] for i, _ in more], [term for _, term in more]
            if self._dithered:
                for (i, term), total in zip(more, sums, strict=True):
                    add_dithered(total, term, seed_of(self._names[i], self._turn))
            else:
                add_(sums, others)

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
        # A recorded stage adds up at fixed places.
        return replica.call.release(grads) if isinstance(replica.call, RecordedCall) else grads


def _as_laid_out(grad: Tensor, parameter: Tensor) -> Tensor:
    """This rank's part of a gradient. Tensor parallelism may leave a sum over its ranks to be made (`Partial`), of a
    norm's weight, say, when each rank saw some of the tokens."""
    if type(grad) is Tensor:  # as a rule, and there are hundreds in each microbatch
        return local(grad)
    if is_dtensor(grad) and is_dtensor(parameter) and grad.placements != parameter.placements:
        grad = grad.redistribute(parameter.device_mesh, parameter.placements)
    part = local(grad)
    wait = getattr(part, "wait", None)  # of a tensor that is still on its way
    return part if wait is None else wait()


def seed_of(name: str, turn: int) -> int:
    """Of a parameter, in the `turn`-th microbatch of a run: the same at every depth and after a resume."""
    return zlib.crc32(f"{name}/{turn}".encode()) - (1 << 31)
