"""One direction between two processes of one machine: tensors through shared slots, told by packets on a socket.

A send fills a slot and sends one packet; it waits neither for the device nor for the reader. A receive waits for the
packet (host to host), copies out of the slot on its own stream, and sends a packet back: the slot is empty again.
Tensors are matched by order; their shapes are known to both ends. A send has to wait only where `MOST_SLOTS` messages
of one class are unread, or where the system has no room for another packet.

Slots come in classes of size, so that many small messages beside a large one take memory for their own bytes. Each
class has slots of its own, used in turn, and a packet names the class. When all of them are unread the writer opens
twice as many: a class grows to what is needed, and no other grows with it. Slots that were outgrown live as long as
the ring: that the reader's host is done with them does not mean that its device is. With them a class that
has grown has fewer than four times as many slots as messages were ever unread at once, and about twice as many where
those came in one go.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import tempfile
from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from slipstream.distributed.slots import SlotMaker, Slots

LEAST_SLOTS, MOST_SLOTS = 4, 128  # of one class
LEAST_BYTES = 1 << 20  # of the slots of the smallest class
LARGE_BYTES = 64 << 20  # such a message is a weight, not an activation: its class starts with a single slot
_PACKET_BYTES = 1 << 17
_WIRE_BYTES = 1 << 22
MOST_FOLDER_BYTES = 80  # of the folder in which `socket_folder` makes one
_MEMORY, _FILLED, _EMPTIED = b"R", b"M", b"F"
_HEAD = struct.Struct("<cQ")  # what a packet to the reader tells, and of which class


def size_class(size: int) -> int:
    """The bytes of the slot that a message of `size` bytes takes: four classes to each power of two."""
    if size <= LEAST_BYTES:
        return LEAST_BYTES
    step = 1 << ((size - 1).bit_length() - 3)
    return -(-size // step) * step


@dataclass(eq=False)
class _Block:
    """Slots of one class that were made together."""

    slots: Slots
    used: int = 0  # messages that went through them
    unread: int = 0  # messages in them that the reader has not emptied: known to the writer

    def next(self) -> int:
        """The slot whose turn it is."""
        self.used += 1
        return (self.used - 1) % self.slots.count


class _End:
    """What both ends have: a wire, and for each class the slots that its next message lies in."""

    def __init__(self, wire: socket.socket, maker: SlotMaker) -> None:
        self._wire, self._maker = wire, maker
        self._current: dict[int, _Block] = {}  # by class
        self._outgrown: list[_Block] = []
        # Unread messages of all classes together are more packets than a socket usually has room for.
        wire.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _WIRE_BYTES)

    def _go_on_with(self, size: int, slots: Slots) -> _Block:
        if size in self._current:
            self._outgrown.append(self._current[size])
        self._current[size] = _Block(slots)
        return self._current[size]

    def hang_up(self) -> None:
        """Let the other end know that nothing more comes; the memory stays."""
        self._wire.close()

    def close(self) -> None:
        """Hang up and give the memory back."""
        self.hang_up()
        self._current.clear()
        self._outgrown.clear()


class RingWriter(_End):
    """The sending end. It owns the memory."""

    def __init__(self, wire: socket.socket, maker: SlotMaker, timeout_seconds: float) -> None:
        super().__init__(wire, maker)
        self._timeout_seconds = timeout_seconds
        self._unread: deque[_Block] = deque()  # where each message lies that the reader has not emptied

    def send(self, tensor: Tensor) -> None:
        """Queue the copy into a slot and tell the reader."""
        while self._unread and readable(self._wire, 0.0):
            self._take_back()
        size = size_class(tensor.numel() * tensor.element_size())
        block = self._room(size, tensor)
        again = block.used >= block.slots.count
        block.slots.write(block.next(), tensor, again)
        block.unread += 1
        self._unread.append(block)
        self._tell(_HEAD.pack(_FILLED, size))

    def _room(self, size: int, tensor: Tensor) -> _Block:
        """The current slots of a class, the next one empty."""
        block = self._current.get(size)
        if block is None:
            return self._open(size, 1 if size >= LARGE_BYTES else LEAST_SLOTS, tensor)
        if block.unread < block.slots.count:
            return block
        if block.slots.count < MOST_SLOTS:
            return self._open(size, 2 * block.slots.count, tensor)
        while block.unread == block.slots.count:
            self._wait_for_reader()
        return block

    def _open(self, size: int, count: int, tensor: Tensor) -> _Block:
        slots = self._maker.make(count, size, tensor.device)
        message, descriptors = slots.handles()
        self._tell(_HEAD.pack(_MEMORY, size) + message, descriptors)
        return self._go_on_with(size, slots)

    def _tell(self, packet: bytes, descriptors: Sequence[int] = ()) -> None:
        """Send a packet. On a full wire a blocking send would wait for ever, and say nothing."""
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", descriptors))] if descriptors else []
        while True:
            try:
                self._wire.sendmsg([packet], rights, socket.MSG_DONTWAIT)
                return
            except BlockingIOError:
                self._wait_for_reader()

    def _wait_for_reader(self) -> None:
        if not readable(self._wire, self._timeout_seconds):
            raise TimeoutError(f"{len(self._unread)} messages were not taken")
        self._take_back()

    def _take_back(self) -> None:
        if not self._wire.recv(1):
            raise ConnectionError("closed by the other end")
        self._unread.popleft().unread -= 1

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
        while (size := self._filled(timeout_seconds)) is None:
            pass
        block = self._current[size]
        block.slots.read(block.next(), out)
        with contextlib.suppress(OSError):  # a writer that has left needs its slot no more
            self._wire.send(_EMPTIED)

    def _filled(self, timeout_seconds: float) -> int | None:
        """The class of which a slot was filled; None: the next packet was of new memory, which is open now."""
        if not readable(self._wire, timeout_seconds):
            raise TimeoutError(f"nothing came within {timeout_seconds:g} s")
        try:
            packet, descriptors, _, _ = socket.recv_fds(self._wire, _PACKET_BYTES, 1)
        except ConnectionResetError:  # told once, ahead of what a writer that has left sent before
            packet, descriptors, _, _ = socket.recv_fds(self._wire, _PACKET_BYTES, 1)
        if not packet:
            raise ConnectionError("closed by the other end")
        kind, size = _HEAD.unpack_from(packet)
        if kind == _FILLED:
            return size
        assert kind == _MEMORY, packet[:8]
        self._go_on_with(size, self._maker.open(packet[_HEAD.size :], descriptors))
        return None


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
