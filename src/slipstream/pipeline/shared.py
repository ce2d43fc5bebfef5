"""A link between two CPU stages on one machine: tensors through shared memory, one byte per message to wake up.

Gloo's TCP threads would take their share of the cores the stages compute on. Here a send is a copy into a ring of
slots and one byte on a unix socket; a receive waits for the byte and copies out. The ring never overflows: a stage
is at most m + 1 microbatches ahead of the answers to what it sent, so m + 2 slots are enough, and a send never
blocks. A neighbour that dies closes its socket.
"""

from __future__ import annotations

import mmap
import os
import select
import socket
from collections.abc import Sequence

import torch
from torch import Tensor

from slipstream.distributed.ring import socket_folder
from slipstream.pipeline.peers import Wait
from slipstream.pipeline.transport import Channel, Link, Spec, TensorSpec, broken, differentiable

_ALIGNMENT = 64
_PATH = TensorSpec((256,), torch.uint8, False)
_ANSWER = TensorSpec((1,), torch.uint8, False)


class SharedChannel:
    """One direction of a shared link, with the surface of `transport.Channel` that training uses."""

    def __init__(
        self, link: Link, wire: socket.socket, memory: mmap.mmap, offset: int, spec: Spec, slots: int
    ) -> None:
        self.link = link
        self._wire = wire
        self._slots = [_slot(memory, offset + index * _size(spec), spec) for index in range(slots)]
        self._next = 0

    def send(self, tensors: Sequence[Tensor]) -> list[Wait]:
        for target, tensor in zip(self._take(), tensors, strict=True):
            target.copy_(tensor.detach())
        try:
            self._wire.send(b"\0")
        except OSError as error:
            raise broken(error, 0.0, self.link, "sent a message to") from error
        return []

    def post(self, spec: Spec) -> None:
        """Nothing to do: the slots are always there."""

    def receive(self, what: str) -> list[Tensor]:
        seconds = self.link.timeout_seconds
        try:
            token = self._wire.recv(1)
        except TimeoutError as error:
            raise broken(error, seconds, self.link, f"waited for {what} from") from error
        except OSError as error:
            raise broken(error, 0.0, self.link, f"waited for {what} from") from error
        if not token:
            raise broken(EOFError("closed by the other end"), 0.0, self.link, f"waited for {what} from")
        return [slot.clone() for slot in self._take()]

    def closed(self) -> bool:
        """Whether the other end is gone, even if something it sent is still unread."""
        poll = select.poll()
        poll.register(self._wire, select.POLLRDHUP)
        return any(event & (select.POLLRDHUP | select.POLLHUP | select.POLLERR) for _, event in poll.poll(0))

    def finish(self, handles: Sequence[Wait], what: str) -> None:
        """A send is done when it returns."""

    def _take(self) -> list[Tensor]:
        slot = self._slots[self._next]
        self._next = (self._next + 1) % len(self._slots)
        return slot


def offer(
    forward: Channel, backward: Channel, spec: Spec, slots: int
) -> tuple[SharedChannel, SharedChannel] | None:
    """From the stage before: use the socket the next stage listens on, if this process can reach it."""
    backward.post((_PATH,))
    path = bytes(backward.receive("the offer of shared memory")[0].tolist()).rstrip(b"\0").decode()
    made = _connect(path, forward.link, spec, slots)
    forward.finish(forward.send([torch.tensor([int(made is not None)], dtype=torch.uint8)]), "an answer")
    return made


def accept(
    forward: Channel, backward: Channel, spec: Spec, slots: int
) -> tuple[SharedChannel, SharedChannel] | None:
    """From the stage behind: listen, tell where, and take the memory the stage before sends."""
    with (
        socket_folder() as folder,
        socket.socket(socket.AF_UNIX) as listener,
    ):
        path = os.path.join(folder, "link")
        listener.bind(path)
        listener.listen(1)
        told = torch.tensor(list(path.encode().ljust(_PATH.shape[0], b"\0")), dtype=torch.uint8)
        backward.finish(backward.send([told]), "the offer of shared memory")
        forward.post((_ANSWER,))
        if not forward.receive("an answer to the offer of shared memory")[0].item():
            return None
        listener.settimeout(forward.link.timeout_seconds)
        wire, _ = listener.accept()
    _, descriptors, _, _ = socket.recv_fds(wire, 1, 1)
    return _channels(forward.link, wire, descriptors[0], spec, slots)


def _connect(path: str, link: Link, spec: Spec, slots: int) -> tuple[SharedChannel, SharedChannel] | None:
    wire = socket.socket(socket.AF_UNIX)
    try:
        wire.connect(path)
    except OSError:  # another machine, container or namespace: gloo then carries the tensors
        wire.close()
        return None
    descriptor = os.memfd_create("slipstream-link")
    os.ftruncate(descriptor, slots * (_size(spec) + _size(differentiable(spec))) or mmap.PAGESIZE)
    socket.send_fds(wire, [b"M"], [descriptor])
    return _channels(link, wire, descriptor, spec, slots)


def _channels(
    link: Link, wire: socket.socket, descriptor: int, spec: Spec, slots: int
) -> tuple[SharedChannel, SharedChannel]:
    memory = mmap.mmap(descriptor, 0)
    os.close(descriptor)
    wire.settimeout(link.timeout_seconds)
    gradients = differentiable(spec)
    return (
        SharedChannel(link, wire, memory, 0, spec, slots),
        SharedChannel(link, wire, memory, slots * _size(spec), gradients, slots),
    )


def _bytes(spec: TensorSpec) -> int:
    size = torch.Size(spec.shape).numel() * spec.dtype.itemsize
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _size(spec: Spec) -> int:
    return sum(_bytes(s) for s in spec)


def _slot(memory: mmap.mmap, offset: int, spec: Spec) -> list[Tensor]:
    """The tensors of one slot, as views of the shared memory."""
    tensors = []
    for s in spec:
        count = torch.Size(s.shape).numel()
        flat = (
            torch.frombuffer(memory, dtype=s.dtype, count=count, offset=offset) if count else torch.empty(0)
        )
        tensors.append(flat.to(s.dtype).view(s.shape))
        offset += _bytes(s)
    return tensors
