"""Channels between neighbouring stages: activations down, gradients up, receives posted ahead.

One channel is one direction of one link, on a process group of its own (forward and backward never share one).
A message is a list of tensors whose shapes, dtypes and need of a gradient are told once, before the first one
(`Spec`), and are the same ever after. Sends never block: they are kept and waited for when something the receiver
sent back shows that they have arrived. Messages are matched by order, so both ends must use a channel in the same
order; `schedule.validate` proves that for the schedules we emit.

Ways a tensor can travel: gloo from CPU memory; NCCL from device memory, one GPU per rank; through the memory of a GPU
that several stages share, where the process group is made for that (`distributed/device_group.py`); and CUDA tensors
over gloo, staged through pinned host memory by a sender thread. CPU stages on one machine switch to shared memory once
they know their shapes (`shared.py`).
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from slipstream.distributed.device_group import DeviceGroup
from slipstream.errors import StageError, UserError
from slipstream.pipeline.peers import Wait

HEADER_LENGTH = 256
_DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16,
    torch.int8, torch.uint8, torch.bool,
)  # fmt: skip


class TensorSpec(NamedTuple):
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool


Spec = tuple[TensorSpec, ...]


def spec_of(tensors: Sequence[Tensor]) -> Spec:
    return tuple(TensorSpec(tuple(t.shape), t.dtype, t.requires_grad) for t in tensors)


def differentiable(spec: Spec) -> Spec:
    """The part of a message that gradients come back for."""
    return tuple(s for s in spec if s.requires_grad)


@dataclass(frozen=True)
class Link:
    """Where a channel leads and how it travels."""

    group: dist.ProcessGroup
    peer_rank: int  # global
    peer_stage: int
    device: torch.device
    timeout_seconds: float
    latency_seconds: float = 0.0  # injected, to try the schedule on a slow network

    def __str__(self) -> str:
        return f"stage {self.peer_stage} (rank {self.peer_rank})"

    @property
    def staged(self) -> bool:
        return self.device.type == "cuda" and dist.get_backend(self.group) == "gloo"

    @property
    def in_stream(self) -> bool:
        """Whether the device's stream waits for a message, and the host goes on."""
        return self.device.type == "cuda" and dist.get_backend(self.group) == "nccl"


class Channel:
    """One direction of a link. The owner uses it either to send or to receive."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self._posted: deque[tuple[list[Tensor], list[Wait]]] = deque()
        self._outbox = _Outbox(link) if link.staged or link.latency_seconds else None

    def send(self, tensors: Sequence[Tensor]) -> list[Wait]:
        """Start sending; the tensors must not change until the returned handles have been waited for."""
        tensors = [tensor.detach().contiguous() for tensor in tensors]
        if self._outbox is not None:
            return [self._outbox.put(tensors)]
        return [_isend(tensor, self.link) for tensor in tensors]

    def post(self, spec: Spec) -> None:
        """Post the receive of one message ahead of its arrival."""
        pinned = self.link.staged
        device = torch.device("cpu") if pinned else self.link.device
        buffers = [torch.empty(s.shape, dtype=s.dtype, device=device, pin_memory=pinned) for s in spec]
        self._posted.append((buffers, [_irecv(buffer, self.link) for buffer in buffers]))

    def receive(self, what: str) -> list[Tensor]:
        """The oldest posted message; `what` names it in the error if it does not come."""
        buffers, handles = self._posted.popleft()
        wait_all(handles, self.link, f"waited for {what} from")
        if self.link.staged:
            return [buffer.to(self.link.device, non_blocking=True) for buffer in buffers]
        return buffers

    def finish(self, handles: Sequence[Wait], what: str) -> None:
        """Wait for sends."""
        wait_all(handles, self.link, f"waited to deliver {what} to")

    def closed(self) -> bool | None:
        """Whether the other end is gone; None where the group cannot tell."""
        group = self.link.group
        if not isinstance(group, DeviceGroup):
            return None
        return group.closed(dist.get_group_rank(group, self.link.peer_rank))

    def send_spec(self, spec: Spec) -> None:
        self.finish(self.send([_encode(spec).to(self.link.device)]), "the shapes of its output")

    def receive_spec(self) -> Spec:
        self.post((TensorSpec((HEADER_LENGTH,), torch.int64, False),))
        return _decode(self.receive("the shapes of the output")[0].cpu())

    def close(self) -> None:
        if self._outbox is not None:
            self._outbox.close()


def wait_all(handles: Sequence[Any], link: Link, what: str) -> None:
    """Wait for each handle; a peer that is gone or silent becomes a `StageError` that names it.

    Over NCCL only the stream waits: given a timeout, torch would hold the host until the device has caught up, a
    microbatch at a time. A peer that is gone is then found by NCCL's own watchdog, which ends the process.
    """
    started = time.monotonic()
    for handle in handles:
        try:
            if isinstance(handle, dist.Work) and not link.in_stream:
                handle.wait(timedelta(seconds=link.timeout_seconds))
            else:
                handle.wait()
        except (RuntimeError, TimeoutError) as error:
            raise broken(error, time.monotonic() - started, link, what) from error


def broken(error: Exception, seconds: float, link: Link, what: str) -> StageError:
    """What to tell when a neighbour is gone or silent; the stage that tells it puts its own name in front."""
    if seconds >= 0.9 * link.timeout_seconds:
        reason = f"no answer within the timeout of {link.timeout_seconds:g} s. Is that stage stalled or slow?"
    else:
        reason = f"the connection broke ({str(error).splitlines()[0][:160]}). Did that stage die?"
    return StageError(f"{what} {link} for {seconds:.1f} s in vain: {reason}")


def _isend(tensor: Tensor, link: Link) -> Wait:
    work = dist.isend(tensor, link.peer_rank, link.group)
    assert work is not None, "this rank is not in its own channel's group"
    return work


def _irecv(tensor: Tensor, link: Link) -> Wait:
    work = dist.irecv(tensor, link.peer_rank, link.group)
    assert work is not None, "this rank is not in its own channel's group"
    return work


class _Outbox:
    """A thread that copies to the host, waits out injected latency, and sends, in order."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._queue: queue.SimpleQueue[_Parcel | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="slipstream-outbox", daemon=True)
        self._thread.start()

    def put(self, tensors: list[Tensor]) -> _Parcel:
        event = None
        if self._link.staged:
            tensors = [_to_pinned(tensor) for tensor in tensors]
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(self._link.device))
        parcel = _Parcel(
            tensors, event, time.monotonic() + self._link.latency_seconds, self._link.timeout_seconds
        )
        self._queue.put(parcel)
        return parcel

    def _run(self) -> None:
        while (parcel := self._queue.get()) is not None:
            try:
                if parcel.event is not None:
                    parcel.event.synchronize()
                time.sleep(max(0.0, parcel.due - time.monotonic()))
                for work in [_isend(tensor, self._link) for tensor in parcel.tensors]:
                    work.wait()
            except RuntimeError as error:  # told to whoever waits for the parcel
                parcel.error = error
            parcel.sent.set()

    def close(self) -> None:
        self._queue.put(None)


class _Parcel:
    """A message on its way through the outbox."""

    def __init__(
        self, tensors: list[Tensor], event: torch.cuda.Event | None, due: float, timeout: float
    ) -> None:
        self.tensors = tensors
        self.event = event
        self.due = due
        self.sent = threading.Event()
        self.error: RuntimeError | None = None
        self._timeout = timeout

    def is_completed(self) -> bool:
        return self.sent.is_set()

    def wait(self) -> None:
        if not self.sent.wait(self._timeout):
            raise TimeoutError("the message was not taken")
        if self.error is not None:
            raise self.error


def _to_pinned(tensor: Tensor) -> Tensor:
    if not tensor.is_cuda:
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


def _encode(spec: Spec) -> Tensor:
    """count, then for each tensor: dtype, requires_grad, number of dimensions, dimensions."""
    numbers = [len(spec)]
    for shape, dtype, requires_grad in spec:
        if dtype not in _DTYPES:
            raise UserError(f"A stage returned a tensor of {dtype}, which cannot be sent to the next stage.")
        numbers += [_DTYPES.index(dtype), int(requires_grad), len(shape), *shape]
    if len(numbers) > HEADER_LENGTH:
        raise UserError(f"A stage returned {len(spec)} tensors: too many to send. Pack them into fewer.")
    return torch.tensor(numbers + [0] * (HEADER_LENGTH - len(numbers)), dtype=torch.int64)


def _decode(header: Tensor) -> Spec:
    count, *numbers = header.tolist()
    found = []
    for _ in range(count):
        dtype, requires_grad, ndim, *rest = numbers
        found.append(TensorSpec(tuple(rest[:ndim]), _DTYPES[dtype], bool(requires_grad)))
        numbers = rest[ndim:]
    return tuple(found)
