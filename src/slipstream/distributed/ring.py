"""One direction between two processes of one machine: tensors through shared slots, told by packets on a socket.

A send fills the next slot and sends one packet; it waits neither for the device nor for the reader. A receive waits
for the packet (host to host), copies out of the slot on its own stream, and sends a packet back: the slot is empty
again. Tensors are matched by order; their shapes are known to both ends, and a larger one, or a reader that is
further behind than there are slots, makes the writer open larger memory: the ring grows to what is needed. Slots that
were outgrown live as long as the ring: that the reader's host is done with them does not mean that its device is.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import tempfile
from collections import deque

from torch import Tensor

from slipstream.distributed.slots import SlotMaker, Slots

LEAST_SLOTS, MOST_SLOTS = 4, 128
LEAST_BYTES = 1 << 20
_PACKET_BYTES = 1 << 17
MOST_FOLDER_BYTES = 80  # of the folder in which `socket_folder` makes one
_MEMORY, _FILLED, _EMPTIED = b"R", b"M", b"F"


class _End:
    """What both ends have: a wire, and the slots that the next message lies in."""

    def __init__(self, wire: socket.socket, maker: SlotMaker) -> None:
        self._wire, self._maker = wire, maker
        self._slots: Slots | None = None
        self._used = 0  # messages that went through the current slots
        self._outgrown: list[Slots] = []

    def _go_on_with(self, slots: Slots) -> Slots:
        if self._slots is not None:
            self._outgrown.append(self._slots)
        self._slots, self._used = slots, 0
        return slots

    def hang_up(self) -> None:
        """Let the other end know that nothing more comes; the memory stays."""
        self._wire.close()

    def close(self) -> None:
        """Hang up and give the memory back."""
        self.hang_up()
        self._slots = None
        self._outgrown.clear()


class RingWriter(_End):
    """The sending end. It owns the memory."""

    def __init__(self, wire: socket.socket, maker: SlotMaker, timeout_seconds: float) -> None:
        super().__init__(wire, maker)
        self._timeout_seconds = timeout_seconds
        self._unread: deque[Slots] = deque()  # the memory of each message the reader has not emptied

    def send(self, tensor: Tensor) -> None:
        """Queue the copy into a slot and tell the reader."""
        while self._unread and readable(self._wire, 0.0):
            self._take_back()
        slots = self._room(tensor)
        slots.write(self._used % slots.count, tensor, again=self._used >= slots.count)
        self._used += 1
        self._unread.append(slots)
        self._wire.send(_FILLED)

    def _room(self, tensor: Tensor) -> Slots:
        """The current slots, with the next one empty and large enough."""
        size = tensor.numel() * tensor.element_size()
        slots = self._slots
        if slots is None:
            return self._open(LEAST_SLOTS, max(size, LEAST_BYTES), tensor)
        if size > slots.size:
            return self._open(slots.count, size, tensor)
        if sum(memory is slots for memory in self._unread) < slots.count:
            return slots
        if slots.count < MOST_SLOTS:
            return self._open(2 * slots.count, slots.size, tensor)
        while sum(memory is slots for memory in self._unread) == slots.count:
            if not readable(self._wire, self._timeout_seconds):
                raise TimeoutError(f"{slots.count} messages were not taken")
            self._take_back()
        return slots

    def _open(self, count: int, size: int, tensor: Tensor) -> Slots:
        slots = self._go_on_with(self._maker.make(count, size, tensor.device))
        message, descriptors = slots.handles()
        socket.send_fds(self._wire, [_MEMORY + message], descriptors)
        return slots

    def _take_back(self) -> None:
        if not self._wire.recv(1):
            raise ConnectionError("closed by the other end")
        self._unread.popleft()

    def close(self) -> None:
        super().close()
        self._unread.clear()


class RingReader(_End):
    """The receiving end."""

    def ready(self) -> bool:
        """Whether `receive` would find a message, or the other end gone, at once."""
        return readable(self._wire, 0.0)

    def receive(self, out: Tensor, timeout_seconds: float) -> None:
        """Wait for the next message and queue the copy into `out`."""
        while (packet := self._packet(timeout_seconds)) != _FILLED:
            assert packet[:1] == _MEMORY, packet[:8]
        assert self._slots is not None
        self._slots.read(self._used % self._slots.count, out)
        self._used += 1
        with contextlib.suppress(OSError):  # a writer that has left needs its slot no more
            self._wire.send(_EMPTIED)

    def _packet(self, timeout_seconds: float) -> bytes:
        if not readable(self._wire, timeout_seconds):
            raise TimeoutError(f"nothing came within {timeout_seconds:g} s")
        try:
            packet, descriptors, _, _ = socket.recv_fds(self._wire, _PACKET_BYTES, 1)
        except ConnectionResetError:  # told once, ahead of what a writer that has left sent before
            packet, descriptors, _, _ = socket.recv_fds(self._wire, _PACKET_BYTES, 1)
        if not packet:
            raise ConnectionError("closed by the other end")
        if packet[:1] == _MEMORY:
            self._go_on_with(self._maker.open(packet[1:], descriptors))
        return packet


def readable(wire: socket.socket, seconds: float) -> bool:
    poll = select.poll()
    poll.register(wire, select.POLLIN)
    return bool(poll.poll(seconds * 1e3))


def socket_folder() -> tempfile.TemporaryDirectory[str]:
    """A new folder, this user's only, for a socket of a short name.

    The address of a unix socket has room for 107 bytes, and the temporary folder of a cluster's job may take them all.
    """
    usual = tempfile.gettempdir()
    return tempfile.TemporaryDirectory(
        prefix="slipstream-", dir=usual if len(os.fsencode(usual)) <= MOST_FOLDER_BYTES else "/tmp"
    )


class Door:
    """Where the other ranks of a group reach this one: a listening socket in a folder only this user can enter."""

    def __init__(self, folder: str) -> None:
        self.path = os.path.join(folder, "door")
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(self.path)
        self._listener.listen(128)

    def knock(self, path: str, rank: int) -> socket.socket:
        """A wire to the rank behind the door `path`; it need not answer for us to go on."""
        wire = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        wire.connect(path)
        wire.send(str(rank).encode())
        return wire

    def admit(self, timeout_seconds: float) -> tuple[int, socket.socket]:
        """The next rank at the door and the wire to it."""
        if not readable(self._listener, timeout_seconds):
            raise TimeoutError(f"nobody came within {timeout_seconds:g} s")
        wire, _ = self._listener.accept()
        return int(wire.recv(32)), wire

    def waiting(self) -> bool:
        return readable(self._listener, 0.0)

    def close(self) -> None:
        self._listener.close()
