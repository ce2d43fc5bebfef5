"""What an update needs from others: gradients over the data axis, tied weights, the global norm, new banks.

Every method is a generator: each `yield` is something to wait for (`Wait`), so that the caller decides whether
to block or to go on computing in the slack. `Peers` is the answer of a process that has none, `mesh.Mesh` that of a
rank in a pipeline x data x tensor mesh. A large tensor travels as it is, small ones of a dtype together (`buckets`).
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.distributed import lost
from slipstream.distributed.groups import Group, Groups, Wait
from slipstream.lists import copy_
from slipstream.pipeline.attendant import Attendant
from slipstream.pipeline.host_sum import PeerLost
from slipstream.pipeline.messages import on_host

Gradients = list[Tensor | None]
Steps = Iterator[Wait]

# A message of a megabyte fills a link; below that its fixed cost counts. So only small tensors are copied side by side,
# and the extra memory is that of norms and biases, not of the model.
SMALL_BYTES = 1 << 20
BUCKET_BYTES = 25 << 20


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


def waiting(work: Wait, group: Group, timeout_seconds: float) -> Wait:
    """How an update waits for a collective of `group`."""
    return InStream(work) if group.in_stream else OverRanks(work, group, timeout_seconds)


@dataclass
class RankStatus:
    """What a rank tells the others once per update, beside the squared norms of its gradients."""

    stop: bool = False  # asks the run to stop
    work_seconds: float = 0.0  # one forward and one backward on this stage
    link_seconds: float = 0.0  # one way over the link behind this stage
    late_seconds: float = 0.0  # that `work_seconds` is typically exceeded by
    room: float = math.inf  # microbatches that it could hold beside those in flight
    update: float = -1.0  # the last one that is done on this stage, as far as is known
    update_seconds: float = 0.0  # from the one before it to that; 0: not known, or not to be compared


@dataclass(frozen=True)
class RunStatus:
    """What all ranks told in one update."""

    squares: list[float]  # squared gradient norms of all parameters of all stages
    stop: bool
    work_seconds: list[float]  # by stage
    link_seconds: list[float]
    late_seconds: list[float]
    room: list[float]
    updates: list[float]
    update_seconds: list[float]


class Peers:
    """The other ranks, as an update sees them. As it stands: none, for one process that holds the whole model (the
    emulator, one stage). `ties`: lists of indices of parameters that are one weight."""

    sharded = False  # whether data ranks own different parameters: the same answer on all of them
    # Whether an update's collectives must stand at one place among all data ranks' microbatches.
    in_step = False
    groups: Groups | None = None  # the process groups it uses
    names_repeat = False  # from stage to stage, for different weights

    def __init__(self, count: int, ties: Sequence[Sequence[int]] = ()) -> None:
        self._of_one = [list(tie) for tie in ties]
        twins = {index for tie in ties for index in tie[1:]}
        self.owned = list(range(count))  # parameters whose master and optimizer state live on this rank
        self.counted = [index not in twins for index in range(count)]  # whether its slot enters the norm here

    def reduce(self, grads: Gradients) -> Steps:
        """Average over the data axis, in place (for a sharded optimizer: at least on the owner)."""
        yield from ()

    def tie(self, grads: Gradients) -> Steps:
        """Sum the gradients of tied weights, in place."""
        for tie in self._of_one:
            assign_tied(sum_present([grads[index] for index in tie]), grads, tie)
        yield from ()

    def exchange(self, group: int, squares: Tensor, status: RankStatus) -> Generator[Wait, None, RunStatus]:
        """In the update of a group, tell this rank's slots of the squared norms and its status; what all told."""
        told = yield from to_host(squares)
        return RunStatus(
            told,
            status.stop,
            [status.work_seconds],
            [status.link_seconds],
            [status.late_seconds],
            [status.room],
            [status.update],
            [status.update_seconds],
        )

    def gather(self, weights: Sequence[Tensor]) -> Steps:
        """Complete a bank of which each owner has written its part."""
        yield from ()

    def broadcast_initial(self, weights: Sequence[Tensor]) -> None:
        """At the start, give tied weights and data ranks the values of the first of them."""
        for tie in self._of_one:
            copy_first(weights, tie)

    def attend(self, attendant: Attendant) -> None:
        """Where devices wait, hand over what must not wait for this rank's host."""

    def close(self) -> None:
        """Hang up; the groups are closed by whoever made them."""


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
        host = on_host(vector)
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(vector.device))  # which need not be the current device's
        yield OnDevice(event)
        vector = host
    return vector.tolist()


@dataclass(frozen=True)
class Bucket:
    """`flat` is what travels; `tensors` are what it was packed from, none where it is the tensor itself."""

    flat: Tensor
    tensors: tuple[Tensor, ...] = ()

    def unpack(self) -> None:
        """Back into the tensors."""
        parts = self.flat.split([tensor.numel() for tensor in self.tensors]) if self.tensors else ()
        pairs = zip(parts, self.tensors, strict=True)
        copy_(list(self.tensors), [part.view(tensor.shape) for part, tensor in pairs])


def buckets(tensors: Sequence[Tensor], small: int | None = None, limit: int = BUCKET_BYTES) -> list[Bucket]:
    """In an order that follows from sizes and dtypes alone, so that all ranks have the same."""
    small = SMALL_BYTES if small is None else small
    found: list[Bucket] = []
    packed: dict[torch.dtype, list[Tensor]] = {}
    filled: dict[torch.dtype, int] = {}
    for tensor in tensors:
        if tensor.nbytes >= small:
            found.append(Bucket(tensor) if tensor.is_contiguous() else _pack([tensor]))
            continue
        if packed.get(tensor.dtype) and filled[tensor.dtype] + tensor.nbytes > limit:
            found.append(_pack(packed.pop(tensor.dtype)))
        packed.setdefault(tensor.dtype, []).append(tensor)
        filled[tensor.dtype] = sum(member.nbytes for member in packed[tensor.dtype])
    return found + [_pack(members) for members in packed.values()]


def _pack(tensors: list[Tensor]) -> Bucket:
    return Bucket(torch.cat([tensor.reshape(-1) for tensor in tensors]), tuple(tensors))
