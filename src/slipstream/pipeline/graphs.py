"""Forward and backward of a microbatch as one CUDA graph: one launch where the host made a thousand.

Small models are bound by the host, which calls one kernel after another in less time than they take to run only
if they are large. A recorded microbatch is replayed by one call. Its inputs are copied into tensors at fixed
addresses; its weights are the replica's, which are written in place and never move; its loss and gradients stay
where the recording put them.

Invariants: a recording computes what the plain call computes, in the same order, so nothing changes but who
launches the kernels. What a replay leaves behind is good until the next replay of *any* recording, because they
share scratch: gradients are taken out of it at once, into sums that the recording owns. It is not replayed for
another group while the update of the last one has yet to read those: that group is then computed plainly. What
cannot be recorded is computed plainly for ever, with one warning.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from slipstream.cuda_graphs import beside, captured
from slipstream.errors import UserError
from slipstream.lists import add_, copy_
from slipstream.pipeline.microbatches import Microbatch
from slipstream.pipeline.peers import Gradients
from slipstream.pipeline.replica import Replica
from slipstream.torch_private import tree_leaves, tree_map

PLAIN_GROUPS = 2  # of each replica before it is recorded: by then everything is compiled
# Each keeps the gradients of the whole model, twice. Stages of delays 7, 6, ..., 0 read 840 combinations of banks.
MOST_RECORDINGS = 24

Computed = tuple[Tensor, Gradients]  # loss and gradients of a microbatch
Loss = Callable[[Sequence[Replica], Microbatch], Tensor]


class Recorder(Protocol):
    """Something that can run a function again without Python."""

    def record(self, body: Callable[[], Computed]) -> tuple[Computed, Callable[[], None]]:
        """What `body` will have computed, at fixed addresses, whenever the returned call is made; it holds until
        the next call of this or any other recording."""
        ...


class CudaGraphs:
    """Records on a stream of its own. All graphs share a pool, or activations would take their memory once for each
    replica. What a later recording computes may lie where an earlier one has its scratch."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()

    def record(self, body: Callable[[], Computed]) -> tuple[Computed, Callable[[], None]]:
        with beside(self._stream):
            body()  # libraries make their workspaces for this stream
            graph, computed = captured(body, self._pool)
        return computed, graph.replay


@dataclass
class Recording:
    """A microbatch at one replica, at fixed addresses."""

    inputs: list[Tensor]
    loss: Tensor
    grads: Gradients
    replay: Callable[[], None]
    sums: Gradients = field(default_factory=list)  # over a group's microbatches; outside the shared memory
    group: int = -1  # whose gradients `sums` hold


class Graphs:
    """The recordings of an emulator, made as its replicas come round."""

    def __init__(self, recorder: Recorder, loss: Loss, dtypes: Sequence[torch.dtype]) -> None:
        self._recorder: Recorder | None = recorder
        self._loss, self._dtypes = loss, list(dtypes)
        self._recordings: dict[Hashable, Recording] = {}
        self._met: dict[Hashable, set[int]] = {}

    def run(
        self,
        group: int,
        completed: int,
        replicas: Sequence[Replica],
        microbatch: Microbatch,
        weight: float,
        modes: Hashable,
    ) -> Tensor | None:
        """The loss of a microbatch whose gradients, times `weight`, have been added to `.grad`; None: compute it
        plainly.

        `completed` updates are done, so gradients of the groups before are no longer needed. `modes`: of the modules,
        train or eval.
        """
        leaves = tree_leaves(microbatch)
        if self._recorder is None or not all(isinstance(leaf, Tensor) or leaf is None for leaf in leaves):
            return None
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        key = (
            tuple(id(replica) for replica in replicas),
            tuple((tensor.shape, tensor.dtype, tensor.device) for tensor in tensors),
            weight,
            modes,
        )
        recording = self._recordings.get(key)
        if recording is None:
            if len(self._recordings) >= MOST_RECORDINGS:
                return None
            met = self._met.setdefault(key, set())
            met.add(group)
            if len(met) <= PLAIN_GROUPS:
                return None
            recording = self._record(replicas, microbatch, tensors, weight)
            if recording is None:
                return None
            self._recordings[key] = recording
            if len(self._recordings) == MOST_RECORDINGS:
                warnings.warn(
                    f"{MOST_RECORDINGS} kinds of microbatches (by shape, and by the banks they read) are recorded as "
                    "CUDA graphs: any further kind is computed without one.",
                    stacklevel=2,
                )
        if completed <= recording.group < group:  # a later one is of before an earlier state was loaded
            return None
        copy_(recording.inputs, tensors)
        recording.replay()
        if self._collect(recording, [p for replica in replicas for p in replica.parameters]):
            recording.group = group
        return recording.loss.clone()

    def _record(
        self, replicas: Sequence[Replica], microbatch: Microbatch, tensors: Sequence[Tensor], weight: float
    ) -> Recording | None:
        assert self._recorder is not None
        parameters = [p for replica in replicas for p in replica.parameters]
        inputs = [tensor.clone() for tensor in tensors]
        fixed = iter(inputs)
        held = tree_map(lambda leaf: next(fixed) if isinstance(leaf, Tensor) else leaf, microbatch)

        def body() -> Computed:
            # Where the caller is under autocast, casts of the weights are kept until it ends. A recording has to make
            # its own: those made before it would be of weights, and in memory, that are gone when it is replayed.
            torch.clear_autocast_cache()
            loss = self._loss(replicas, held)
            seed = torch.full_like(loss, weight)
            found = torch.autograd.grad(loss, parameters, seed, allow_unused=True)
            torch.clear_autocast_cache()  # nor may its own serve anyone else
            return loss.detach(), _own(found, parameters)

        try:
            (loss, grads), replay = self._recorder.record(body)
        except RuntimeError as error:
            self._recorder = None
            warnings.warn(
                "A microbatch cannot be recorded as a CUDA graph, so its kernels are launched one by one: "
                f"{str(error).splitlines()[0]}",
                stacklevel=2,
            )
            return None
        return Recording(inputs, loss, grads, replay)

    def _collect(self, recording: Recording, parameters: Sequence[torch.nn.Parameter]) -> bool:
        """Into `.grad`, as autograd would: the first microbatch sets it, the others add to it. Whether the recording's
        own sums are what was set: the fresh part of a group goes on with those of its old part."""
        if all(p.dtype != d for p, d in zip(parameters, self._dtypes, strict=True)):
            # Narrow banks: added to wide sums before the next replay.
            for parameter, grad in zip(parameters, recording.grads, strict=True):
                parameter.grad = grad
            return False
        if not recording.sums:
            recording.sums = [None if g is None else torch.empty_like(g) for g in recording.grads]
        firsts, first_terms, sums, terms = [], [], [], []
        for parameter, total, grad in zip(parameters, recording.sums, recording.grads, strict=True):
            if grad is None:
                continue
            assert total is not None
            if parameter.grad is None:
                parameter.grad = total
                firsts.append(total)
                first_terms.append(grad)
            else:
                sums.append(parameter.grad)
                terms.append(grad)
        with torch.no_grad():
            copy_(firsts, first_terms)
            add_(sums, terms)
        return bool(firsts)


def check_current(device: torch.device) -> None:
    """A recording is of the current device: kernels on another run once, as they are recorded, and never again."""
    if device.type == "cuda" and device.index != (current := torch.cuda.current_device()):
        raise UserError(
            f"CUDA graphs record the current device, cuda:{current}, and the model is on {device}. "
            f"Call torch.cuda.set_device({device.index}) before the recorder is made."
        )


def _own(grads: Sequence[Tensor | None], parameters: Sequence[torch.nn.Parameter]) -> Gradients:
    """Each laid out as its parameter and sharing memory with no other, as autograd leaves them in `.grad`."""
    seen: set[int] = set()
    owned: Gradients = []
    for grad, parameter in zip(grads, parameters, strict=True):
        if grad is not None and (grad.stride() != parameter.stride() or grad.data_ptr() in seen):
            grad = torch.empty_like(parameter).copy_(grad)
        if grad is not None:
            seen.add(grad.data_ptr())
        owned.append(grad)
    return owned
