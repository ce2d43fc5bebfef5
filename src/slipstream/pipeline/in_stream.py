"""Channels whose waits stand on the device: over NCCL a send or a receive is a kernel that spins until it is answered.

Such a kernel must never wait for a host that waits for it in turn, and a host may at any time wait for its own device:
it allocates, loads a kernel for the first time, compiles, or its queue is full. Nor should it spin for long, since it
takes a multiprocessor from the stage. So the stage before begins every message, in both directions; the stage behind
answers, in the order of what it is told; and nothing begins before it has been computed. Hosts tell each other
(`neighbours.py`):

    stage before                                     stage behind
    k is computed: queue its send, tell "sent"  -->  queue its receive
    queue the receive of j, tell "ready"        <--  gradient j is computed: tell "coming"
                                                -->  queue its send

A kernel of the stage before may then wait for the host of the stage behind, never the other way round. The last stage's
kernels wait for no host at all, so neither do, step by step towards the first, any others for ever. Both ends of a link
queue its kernels in one order, so nothing can go wrong either where streams share a queue of the hardware (there are
eight by default). `tests/pipeline/test_waits.py` runs all this as a model in which every host waits for its device
after every action.

All this is run by a thread of each host (`attendant.py`), so that a message is late neither because its host is
launching kernels nor because it has left the engine.

Each direction of each link has a communicator and so a stream of its own. Everything is queued from side streams, so
that it need not wait for what the stage is computing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from slipstream.distributed.groups import Group, Wait
from slipstream.pipeline.attendant import Attendant
from slipstream.pipeline.messages import Spec, decode, spec_of
from slipstream.pipeline.neighbours import Neighbour

_SENT, _COMING, _READY = b"S", b"C", b"R"


class Message:
    """Tensors that are to be sent, and how they were sent once they have been."""

    def __init__(self, tensors: Sequence[Tensor], device: torch.device) -> None:
        self.tensors = [tensor.detach().contiguous() for tensor in tensors]
        self.computed = torch.cuda.Event()
        self.computed.record(torch.cuda.current_stream(device))
        self.works: list[dist.Work] | None = None

    def is_completed(self) -> bool:
        return self.works is not None and all(work.is_completed() for work in self.works)

    def wait(self) -> None:
        """The stream waits; the host goes on."""
        assert self.works is not None
        for work in self.works:
            work.wait()


class Sender(ABC):
    """Messages to one neighbour, held until they have been computed."""

    def __init__(
        self, neighbour: Neighbour, group: Group, device: torch.device, attendant: Attendant
    ) -> None:
        self._neighbour, self._group, self._peer = neighbour, group, 1 - group.rank
        self._device, self._attendant = device, attendant
        self._side = torch.cuda.Stream(device)
        self._held: deque[Message] = deque()
        attendant.duties.append(self.attend)

    def send(self, tensors: Sequence[Tensor]) -> list[Wait]:
        message = Message(tensors, self._device)
        self._held.append(message)
        self._attendant.ring()
        return [message]

    def attend(self) -> bool:
        while self._held and self._held[0].computed.query():
            self._begin(self._held.popleft())
        return bool(self._held)

    @abstractmethod
    def _begin(self, message: Message) -> None: ...

    def _queue(self, message: Message) -> None:
        with torch.cuda.stream(self._side):
            self._side.wait_event(message.computed)
            message.works = [self._group.send(tensor, self._peer) for tensor in message.tensors]

    def finish(self, handles: Sequence[Wait], what: str) -> None:
        for message in handles:
            assert isinstance(message, Message)
            self._attendant.until(
                lambda message=message: message.works is not None,
                self._neighbour,
                f"waited to deliver {what} to",
            )
            message.wait()

    def close(self) -> None:
        self._held.clear()


class ActivationsOut(Sender):
    """From the stage before, which begins."""

    def _begin(self, message: Message) -> None:
        self._queue(message)
        self._neighbour.tell(_SENT, spec_of(message.tensors))


class GradientsOut(Sender):
    """From the stage behind: queued when the stage before, told that they come, is ready for them."""

    def __init__(self, before: Neighbour, group: Group, device: torch.device, attendant: Attendant) -> None:
        super().__init__(before, group, device, attendant)
        self._announced: deque[Message] = deque()
        before.heed[_READY] = lambda _: self._queue(self._announced.popleft())

    def _begin(self, message: Message) -> None:
        self._announced.append(message)
        self._neighbour.tell(_COMING)

    def close(self) -> None:
        super().close()
        self._announced.clear()


class _Receiver:
    """Receives that have been queued on the device."""

    def __init__(
        self, neighbour: Neighbour, group: Group, device: torch.device, attendant: Attendant
    ) -> None:
        self._neighbour, self._group, self._peer = neighbour, group, 1 - group.rank
        self._device, self._attendant = device, attendant
        self._side = torch.cuda.Stream(device)
        self._under_way: deque[tuple[list[Tensor], list[dist.Work]]] = deque()

    def _queue(self, spec: Spec) -> None:
        with torch.cuda.stream(self._side):
            buffers = [torch.empty(s.shape, dtype=s.dtype, device=self._device) for s in spec]
            self._under_way.append((buffers, [self._group.recv(buffer, self._peer) for buffer in buffers]))

    def receive(self, what: str) -> list[Tensor]:
        """The oldest: the host waits until it has been queued, the stage's stream until it is there."""
        self._attendant.until(lambda: bool(self._under_way), self._neighbour, f"waited for {what} from")
        buffers, works = self._under_way.popleft()
        for work in works:
            work.wait()
        stream = torch.cuda.current_stream(self._device)
        for buffer in buffers:
            buffer.record_stream(stream)  # it was allocated for the side stream
        return buffers

    def close(self) -> None:
        self._under_way.clear()


class ActivationsIn(_Receiver):
    """On the stage behind: queued when they have been sent, wanted yet or not."""

    def __init__(self, before: Neighbour, group: Group, device: torch.device, attendant: Attendant) -> None:
        super().__init__(before, group, device, attendant)
        before.heed[_SENT] = lambda spec: self._queue(decode(spec))

    def post(self, spec: Spec) -> None:
        pass


class GradientsIn(_Receiver):
    """On the stage before: queued when they come, and `post` has told their shapes."""

    def __init__(self, behind: Neighbour, group: Group, device: torch.device, attendant: Attendant) -> None:
        super().__init__(behind, group, device, attendant)
        self._posted: deque[Spec] = deque()
        self._coming = 0
        behind.heed[_COMING] = self._come
        attendant.duties.append(self.attend)

    def post(self, spec: Spec) -> None:
        self._posted.append(spec)
        self._attendant.ring()

    def _come(self, _: bytes) -> None:
        self._coming += 1

    def attend(self) -> bool:
        while self._posted and self._coming:
            self._coming -= 1
            self._queue(self._posted.popleft())
            self._neighbour.tell(_READY)
        return False
