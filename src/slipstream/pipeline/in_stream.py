"""Channels whose waits stand on the device: over NCCL a send or a receive is a kernel that spins until it is answered.

Such a kernel must never wait for a host that waits for it in turn, and a host may at any time wait for its own device:
it allocates, loads a kernel for the first time, compiles, or its queue is full. So a kernel is queued by the stage
behind only when its other half has been queued by the stage before, which is told host to host (`neighbours.py`):

    stage before                                    stage behind
    queue the send of k, tell "sent"        --->    hear "sent" k, queue the receive of k
    queue the receive of gradient j, tell "ready" -> hear "ready" j and have gradient j, queue its send

A kernel of the stage before may then wait for the host of the stage behind, never the other way round, and that host
needs nothing more of the stage before to get there: k is sent in the order in which it will be received, and the
receive of gradient j is queued only after the last activation that the stage behind computes before it. The last
stage's kernels wait for no host at all, so neither do, step by step towards the first, any others for ever.

Both stages queue the kernels of a link in one order: send k, receive j here; receive k, send j there, j being the
gradient that follows k. So nothing can go wrong either where streams share a queue of the hardware (there are eight by
default), which makes a kernel wait for whatever was queued before it. `tests/pipeline/test_waits.py` runs all this as
a model in which every host waits for its device after every action.

Each direction of each link has a communicator and so a stream of its own; receives are queued from a side stream, so
that they need not wait for what the stage is computing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from slipstream.distributed.groups import Group, Wait
from slipstream.pipeline.messages import Spec
from slipstream.pipeline.neighbours import Neighbour, Waiting


class ActivationsOut:
    """From the stage before: queued at once."""

    def __init__(self, behind: Neighbour, group: Group) -> None:
        self._behind, self._group = behind, group

    def send(self, tensors: Sequence[Tensor]) -> list[Wait]:
        works = [self._group.send(tensor.detach().contiguous(), 1) for tensor in tensors]
        self._behind.tell_sent()
        return list(works)

    def finish(self, handles: Sequence[Wait], what: str) -> None:
        """Only the stream waits, for what has been answered already."""
        for handle in handles:
            handle.wait()

    def close(self) -> None:
        pass


class GradientsOut:
    """From the stage behind: queued when the stage before is ready for them."""

    def __init__(self, before: Neighbour, group: Group, device: torch.device, waiting: Waiting) -> None:
        self._before, self._group, self._waiting = before, group, waiting
        self._device = device
        self._side = torch.cuda.Stream(device)
        self._held: deque[_Held] = deque()  # not queued yet
        self._queued = 0
        waiting.attend.append(self.attend)

    def send(self, tensors: Sequence[Tensor]) -> list[Wait]:
        computed = torch.cuda.Event()
        computed.record(torch.cuda.current_stream(self._device))
        held = _Held([tensor.detach().contiguous() for tensor in tensors], computed)
        self._held.append(held)
        self._waiting.look_around()
        return [held]

    def attend(self) -> None:
        while self._held and self._queued < self._before.ready:
            held = self._held.popleft()
            # From a side stream: behind the gradient itself, not behind what has been queued since.
            with torch.cuda.stream(self._side):
                self._side.wait_event(held.computed)
                held.works = [self._group.send(tensor, 0) for tensor in held.tensors]
            self._queued += 1

    def finish(self, handles: Sequence[Wait], what: str) -> None:
        for held in handles:
            assert isinstance(held, _Held)
            self._waiting.until(
                lambda held=held: held.works is not None, self._before, f"waited to deliver {what} to"
            )
            held.wait()

    def close(self) -> None:
        self._held.clear()


class _Held:
    """A gradient, and how it was sent once it has been."""

    def __init__(self, tensors: list[Tensor], computed: torch.cuda.Event) -> None:
        self.tensors = tensors
        self.computed = computed
        self.works: list[dist.Work] | None = None

    def is_completed(self) -> bool:
        return self.works is not None and all(work.is_completed() for work in self.works)

    def wait(self) -> None:
        """The stream waits; the host goes on."""
        assert self.works is not None
        for work in self.works:
            work.wait()


class ActivationsIn:
    """On the stage behind: queued when they have been sent."""

    def __init__(self, before: Neighbour, group: Group, device: torch.device, waiting: Waiting) -> None:
        self._before, self._waiting = before, waiting
        self._end = _Receiver(group, 0, device)
        self._wanted: deque[Spec] = deque()
        self._queued = 0
        waiting.attend.append(self.attend)

    def post(self, spec: Spec) -> None:
        self._wanted.append(spec)
        self._waiting.look_around()

    def attend(self) -> None:
        while self._wanted and self._queued < self._before.sent:
            self._end.queue(self._wanted.popleft())
            self._queued += 1

    def receive(self, what: str) -> list[Tensor]:
        self._waiting.until(lambda: self._end.pending > 0, self._before, f"waited for {what} from")
        return self._end.take()

    def close(self) -> None:
        self._end.close()


class GradientsIn:
    """On the stage before: queued when `post` is called, which must be no earlier than the docstring above says."""

    def __init__(self, behind: Neighbour, group: Group, device: torch.device) -> None:
        self._behind = behind
        self._end = _Receiver(group, 1, device)

    def post(self, spec: Spec) -> None:
        self._end.queue(spec)
        self._behind.tell_ready()

    def receive(self, what: str) -> list[Tensor]:
        return self._end.take()

    def close(self) -> None:
        self._end.close()


class _Receiver:
    """Receives that have been queued on the device."""

    def __init__(self, group: Group, peer: int, device: torch.device) -> None:
        self._group, self._peer, self._device = group, peer, device
        self._side = torch.cuda.Stream(device)
        self._under_way: deque[tuple[list[Tensor], list[dist.Work]]] = deque()

    @property
    def pending(self) -> int:
        return len(self._under_way)

    def queue(self, spec: Spec) -> None:
        with torch.cuda.stream(self._side):
            buffers = [torch.empty(s.shape, dtype=s.dtype, device=self._device) for s in spec]
            self._under_way.append((buffers, [self._group.recv(buffer, self._peer) for buffer in buffers]))

    def take(self) -> list[Tensor]:
        """The oldest: the stage's stream waits for it, its host goes on."""
        buffers, works = self._under_way.popleft()
        for work in works:
            work.wait()
        stream = torch.cuda.current_stream(self._device)
        for buffer in buffers:
            buffer.record_stream(stream)  # it was allocated for the side stream
        return buffers

    def close(self) -> None:
        self._under_way.clear()
