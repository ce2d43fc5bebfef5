"""What an update needs from others: gradients over the data axis, tied weights, the global norm, new banks.

Every method is a generator: each `yield` is something to wait for (`Wait`), so that the caller decides whether
to block or to go on computing in the slack. `Alone` is the answer of a process that has no peers (the emulator,
one stage); `slipstream.pipeline.mesh.Mesh` is the answer of a rank in a pipeline x data mesh.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from slipstream.distributed import lost
from slipstream.distributed.groups import Group, Groups, Wait
from slipstream.pipeline.host_sum import PeerLost

Gradients = list[Tensor | None]


Steps = Iterator[Wait]


@dataclass(frozen=True)
class OnDevice:
    """Kernels and copies that were queued before `event`."""

    event: torch.cuda.Event

    def is_completed(self) -> bool:
        return self.event.query()

    def wait(self) -> None:
        self.event.synchronize()


@dataclass(frozen=True)
class InStream:
    """A collective whose kernels the device waits for: waiting orders its stream and lets the host go on."""

    work: Wait

    def is_completed(self) -> bool:
        return self.work.is_completed()

    def wait(self) -> None:
        self.work.wait()


@dataclass(frozen=True)
class OverRanks:
    """A collective that the host waits for; a rank that is gone or silent is named as well as that can be known."""

    work: Wait
    group: Group
    timeout_seconds: float

    def is_completed(self) -> bool:
        return self.work.is_completed()

    def wait(self) -> None:
        try:
            self.work.wait()
        except RuntimeError as error:  # gloo reports a lost peer so
            who = lost.others(self.group.ranks, self.group.ranks[self.group.rank])
            raise PeerLost(f"{who}: {lost.words(error)} ({self.timeout_seconds:g} s)") from error


@dataclass
class RankStatus:
    """What a rank tells the others once per update, beside the squared norms of its gradients."""

    stop: bool = False  # asks the run to stop
    work_seconds: float = 0.0  # one forward and one backward on this stage
    link_seconds: float = 0.0  # one way over the link behind this stage


@dataclass(frozen=True)
class RunStatus:
    """What all ranks told in one update."""

    squares: list[float]  # squared gradient norms of all parameters of all stages
    stop: bool
    work_seconds: list[float]  # by stage
    link_seconds: list[float]


class Peers(Protocol):
    """The other ranks, as an update sees them."""

    owned: list[int]  # parameters whose master and optimizer state live on this rank
    counted: list[bool]  # whether this rank's slot of a parameter enters the norm
    sharded: bool  # whether data ranks own different parameters: the same answer on all of them
    in_step: bool  # whether an update's collectives must stand at one place among the microbatches of all data ranks

    @property
    def groups(self) -> Groups | None:
        """The process groups it uses."""
        ...

    def reduce(self, grads: Gradients) -> Steps:
        """Average over the data axis, in place (for a sharded optimizer: at least on the owner)."""
        ...

    def tie(self, grads: Gradients) -> Steps:
        """Sum the gradients of tied weights, in place."""
        ...

    def exchange(self, squares: Tensor, status: RankStatus) -> Generator[Wait, None, RunStatus]:
        """Tell this rank's slots of the squared norms and its status; return what all told."""
        ...

    def gather(self, weights: Sequence[Tensor]) -> Steps:
        """Complete a bank of which each owner has written its part."""
        ...

    def broadcast_initial(self, weights: Sequence[Tensor]) -> None:
        """At the start, give tied weights and data ranks the values of the first of them."""
        ...

    def close(self) -> None: ...


class Alone:
    """One process that holds the whole model. `ties`: lists of indices of parameters that are one weight."""

    sharded = False
    in_step = False
    groups: Groups | None = None

    def __init__(self, count: int, ties: Sequence[Sequence[int]] = ()) -> None:
        self.owned = list(range(count))
        self.ties = [list(tie) for tie in ties]
        twins = {index for tie in self.ties for index in tie[1:]}
        self.counted = [index not in twins for index in range(count)]

    def reduce(self, grads: Gradients) -> Steps:
        yield from ()

    def tie(self, grads: Gradients) -> Steps:
        for tie in self.ties:
            assign_tied(sum_present([grads[index] for index in tie]), grads, tie)
        yield from ()

    def exchange(self, squares: Tensor, status: RankStatus) -> Generator[Wait, None, RunStatus]:
        told = yield from to_host(squares)
        return RunStatus(told, status.stop, [status.work_seconds], [status.link_seconds])

    def gather(self, weights: Sequence[Tensor]) -> Steps:
        yield from ()

    def broadcast_initial(self, weights: Sequence[Tensor]) -> None:
        for tie in self.ties:
            copy_first(weights, tie)

    def close(self) -> None:
        pass


def copy_first(weights: Sequence[Tensor], tie: Sequence[int]) -> None:
    """To each of the tied weights the values of the first."""
    for index in tie[1:]:
        weights[index].copy_(weights[tie[0]])


def sum_present(tensors: Sequence[Tensor | None]) -> Tensor | None:
    """The sum of those that are there, in order."""
    present = [tensor for tensor in tensors if tensor is not None]
    if not present:
        return None
    total = present[0]
    for other in present[1:]:
        total = total + other
    return total


def assign_tied(total: Tensor | None, grads: Gradients, tie: Sequence[int]) -> None:
    """To each of the tied parameters a tensor of its own: corrections and optimizers may change gradients in place."""
    for index in tie:
        grads[index] = total if total is None or index == tie[0] else total.clone()


def to_host(vector: Tensor) -> Generator[Wait, None, list[float]]:
    """The numbers of a vector, without holding up the device's queue."""
    if vector.is_cuda:
        host = torch.empty(vector.shape, dtype=vector.dtype, pin_memory=True)
        host.copy_(vector, non_blocking=True)
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(vector.device))  # which need not be the current device's
        yield OnDevice(event)
        vector = host
    return vector.tolist()
