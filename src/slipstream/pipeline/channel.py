"""One direction of one link: an outgoing end on one stage, an incoming end on the other.

Messages are matched by order, so both ends use a channel in the same order; `schedule.validate` proves that for the
schedules we emit. A channel is a ring of shared memory between CPU stages of one machine, or a process group: gloo from
host memory, ours through the memory of a shared GPU, gloo for CUDA tensors by way of pinned memory. Where the device
itself waits (NCCL), see `in_stream.py`.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from slipstream.distributed.groups import Group, Wait
from slipstream.distributed.ring import RingReader, RingWriter
from slipstream.pipeline.messages import Spec, on_host
from slipstream.pipeline.neighbours import Neighbour, broken


class Outgoing(Protocol):
    def send(self, tensors: Sequence[Tensor]) -> list[Wait]:
        """Start sending; the tensors must not change until the returned handles have been finished."""
        ...

    def finish(self, handles: Sequence[Wait], what: str) -> None:
        """Wait for sends."""
        ...

    def close(self) -> None: ...


class Incoming(Protocol):
    def post(self, spec: Spec) -> None:
        """Be ready for one more message."""
        ...

    def receive(self, what: str) -> list[Tensor]:
        """The oldest message that was posted; `what` names it in the error if it does not come."""
        ...

    def close(self) -> None: ...


class RingOut:
    """Into shared memory: a send is done when it returns."""

    def __init__(self, neighbour: Neighbour, writer: RingWriter) -> None:
        self._neighbour, self._writer = neighbour, writer

    def send(self, tensors: Sequence[Tensor]) -> list[Wait]:
        try:
            for tensor in tensors:
                self._writer.send(tensor)
        except OSError as error:
            raise broken(error, 0.0, self._neighbour, "sent a message to") from error
        return []

    def finish(self, handles: Sequence[Wait], what: str) -> None:
        pass

    def close(self) -> None:
        self._writer.close()


class RingIn:
    def __init__(self, neighbour: Neighbour, reader: RingReader) -> None:
        self._neighbour, self._reader = neighbour, reader
        self._posted: deque[Spec] = deque()

    def post(self, spec: Spec) -> None:
        self._posted.append(spec)

    def receive(self, what: str) -> list[Tensor]:
        received = [torch.empty(s.shape, dtype=s.dtype) for s in self._posted.popleft()]
        started = time.monotonic()
        try:
            for tensor in received:
                self._reader.receive(tensor, self._neighbour.timeout_seconds)
        except OSError as error:  # TimeoutError among them
            seconds = time.monotonic() - started
            raise broken(error, seconds, self._neighbour, f"waited for {what} from") from error
        return received

    def close(self) -> None:
        self._reader.close()


class GroupOut:
    """Into a process group, straight from the tensor's own memory."""

    def __init__(self, neighbour: Neighbour, group: Group) -> None:
        self._neighbour, self._group = neighbour, group
        self._peer = 1 - group.rank

    def send(self, tensors: Sequence[Tensor]) -> list[Wait]:
        return [self._group.send(tensor.detach().contiguous(), self._peer) for tensor in tensors]

    def finish(self, handles: Sequence[Wait], what: str) -> None:
        wait_all(handles, self._neighbour, f"waited to deliver {what} to")

    def close(self) -> None:
        """The group is closed by whoever made it."""


class GroupIn:
    """Out of a process group. `staged`: the device's tensors come by way of pinned host memory."""

    def __init__(self, neighbour: Neighbour, group: Group, device: torch.device, staged: bool) -> None:
        self._neighbour, self._group = neighbour, group
        self._peer = 1 - group.rank
        self._device, self._staged = device, staged
        self._posted: deque[tuple[list[Tensor], list[dist.Work]]] = deque()

    def post(self, spec: Spec) -> None:
        where = torch.device("cpu") if self._staged else self._device
        buffers = [torch.empty(s.shape, dtype=s.dtype, device=where, pin_memory=self._staged) for s in spec]
        self._posted.append((buffers, [self._group.recv(buffer, self._peer) for buffer in buffers]))

    def receive(self, what: str) -> list[Tensor]:
        buffers, works = self._posted.popleft()
        wait_all(works, self._neighbour, f"waited for {what} from")
        return [buffer.to(self._device, non_blocking=True) for buffer in buffers] if self._staged else buffers

    def close(self) -> None:
        pass


class Outbox:
    """An outgoing end whose messages leave from a thread, in order: once in host memory, or once they are due."""

    def __init__(
        self, neighbour: Neighbour, end: Outgoing, device: torch.device, delay_seconds: float
    ) -> None:
        self._neighbour, self._end = neighbour, end
        self._device = device
        self._delay_seconds = delay_seconds
        self._queue: queue.SimpleQueue[_Parcel | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="slipstream-outbox", daemon=True)
        self._thread.start()

    def send(self, tensors: Sequence[Tensor]) -> list[Wait]:
        held, event = [tensor.detach() for tensor in tensors], None
        if self._device.type == "cuda":
            held = [on_host(tensor) for tensor in held]
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(self._device))
        due = time.monotonic() + self._delay_seconds
        parcel = _Parcel(held, event, due, self._neighbour.timeout_seconds)
        self._queue.put(parcel)
        return [parcel]

    def finish(self, handles: Sequence[Wait], what: str) -> None:
        wait_all(handles, self._neighbour, f"waited to deliver {what} to")

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join(timeout=5)
        self._end.close()

    def _run(self) -> None:
        while (parcel := self._queue.get()) is not None:
            try:
                if parcel.event is not None:
                    parcel.event.synchronize()
                time.sleep(max(0.0, parcel.due - time.monotonic()))
                self._end.finish(self._end.send(parcel.tensors), "a message")
            except Exception as error:  # told to whoever waits for the parcel
                parcel.error = error
            parcel.sent.set()


class _Parcel:
    """A message on its way through an outbox."""

    def __init__(
        self, tensors: list[Tensor], event: torch.cuda.Event | None, due: float, timeout_seconds: float
    ) -> None:
        self.tensors = tensors
        self.event = event
        self.due = due
        self.sent = threading.Event()
        self.error: Exception | None = None
        self._timeout_seconds = timeout_seconds

    def is_completed(self) -> bool:
        return self.sent.is_set()

    def wait(self) -> None:
        if not self.sent.wait(self._timeout_seconds):
            raise TimeoutError("the message was not taken")
        if self.error is not None:
            raise self.error


def wait_all(handles: Sequence[Wait], neighbour: Neighbour, what: str) -> None:
    """Wait for each handle; a peer that is gone or silent becomes a `StageError` that names it."""
    started = time.monotonic()
    for handle in handles:
        try:
            if isinstance(handle, dist.Work):
                handle.wait(timedelta(seconds=neighbour.timeout_seconds))
            else:
                handle.wait()
        except (RuntimeError, TimeoutError) as error:
            raise broken(error, time.monotonic() - started, neighbour, what) from error
