"""Wires between the hosts of ranks: small messages that hold no device and wait for none.

A wire carries whole messages, in order, and tells at once when the process at its other end is gone. Sending never
waits for the other end to read; receiving is reading what has come. Ranks of one machine meet at a unix socket in a
folder only this user can enter; ranks of several machines over TCP, on the interface that `GLOO_SOCKET_IFNAME` or
`NCCL_SOCKET_IFNAME` names, or else the one that leads to the job's rendezvous. Whoever connects must know the word
that the ranks agreed on in their store.
"""

from __future__ import annotations

import fcntl
import hmac
import json
import os
import select
import socket
import struct
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from slipstream.distributed.ring import socket_folder
from slipstream.errors import StageError

_LENGTH = struct.Struct("!I")
_READ_BYTES = 1 << 16
_SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface


class Wire:
    """One end, for any thread. `str(wire)` is how messages name the rank at the other end."""

    def __init__(self, end: socket.socket, rank: int, timeout_seconds: float, near: bool = True) -> None:
        self.rank = rank
        self.near = near  # on this machine
        self._end = end
        self._end.setblocking(False)
        self._timeout_seconds = timeout_seconds
        self._sending, self._reading = threading.Lock(), threading.Lock()
        self._unparsed = bytearray()
        self._messages: deque[bytes] = deque()
        self._gone = False
        self.stalled = False  # gone, for all we know: it has not read for as long as the timeout

    def __str__(self) -> str:
        return f"rank {self.rank}"

    def fileno(self) -> int:
        return self._end.fileno()

    def send(self, message: bytes) -> None:
        """Hand a message to the system; that a rank is gone shows in what it does not answer."""
        left = memoryview(_LENGTH.pack(len(message)) + message)
        with self._sending:
            while left and not self._gone:
                try:
                    left = left[self._end.send(left) :]
                except BlockingIOError:  # the other end has not read for very long
                    poll = select.poll()
                    poll.register(self._end, select.POLLOUT)
                    self._gone = self.stalled = not poll.poll(self._timeout_seconds * 1e3)
                except OSError:
                    self._gone = True

    def receive(self) -> bytes | None:
        """The oldest message that has come, if one has."""
        with self._reading:
            if not self._messages:
                self._read()
            return self._messages.popleft() if self._messages else None

    @property
    def gone(self) -> bool:
        """Whether the other end is known to have closed, with everything it sent received.

        It reads nothing: a message taken in here would not wake whoever waits for the wire next.
        """
        return self._gone and not self._messages

    @property
    def loss(self) -> str:
        """What became of the other end of a wire that is gone."""
        if self.stalled:
            return f"has not read for {self._timeout_seconds:g} s what it was sent"
        return "closed its connection"

    def hung_up(self) -> bool:
        """Whether the other end is gone, even if something it sent is still to be received."""
        with self._reading:
            while not self._gone and self._read():
                pass
        return self._gone

    def close(self) -> None:
        self._gone = True
        self._end.close()

    def _read(self) -> bool:
        """Take in what is there; False when nothing was."""
        if self._gone:
            return False
        try:
            data = self._end.recv(_READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError:
            data = b""
        if not data:
            self._gone = True
            return False
        self._unparsed += data
        while len(self._unparsed) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._unparsed)
            if len(self._unparsed) < _LENGTH.size + length:
                break
            self._messages.append(bytes(self._unparsed[_LENGTH.size : _LENGTH.size + length]))
            del self._unparsed[: _LENGTH.size + length]
        return True


def wait_readable(wires: Iterable[Wire | socket.socket], seconds: float) -> None:
    """Until one of the wires has something to read or is gone, or the time is over."""
    poll = select.poll()
    for wire in wires:
        if (number := wire.fileno()) >= 0:
            poll.register(number, select.POLLIN)
    poll.poll(max(0.0, seconds * 1e3))


def connect(store: dist.Store, own: int, peers: Sequence[int], timeout_seconds: float) -> dict[int, Wire]:
    """A wire to each of `peers` (global ranks), which all call this with the same store; nobody else may use it.

    The rank with the higher number knocks, the other one opens.
    """
    if not peers:
        return {}
    word = _agreed_word(store)
    store.set(f"machine/{own}", machine())
    near = {peer: _posted(store, "machine", peer, timeout_seconds) == machine() for peer in peers}
    opened = sum(peer > own for peer in peers)
    wires: dict[int, Wire] = {}
    with socket_folder() as folder:
        listeners = [_unix_listener(folder, opened)]
        if not all(near.values()):
            listeners.append(_network_listener(opened))
        try:
            places: dict[str, Any] = {"path": listeners[0].getsockname(), "address": None}
            if len(listeners) > 1:
                places["address"] = [_addresses(), listeners[1].getsockname()[1]]
            store.set(f"places/{own}", json.dumps(places))
            for peer in sorted(peer for peer in peers if peer < own):
                found = json.loads(_posted(store, "places", peer, timeout_seconds))
                end = _knock(found, near[peer], peer, timeout_seconds)
                end.sendall(struct.pack("!I", own) + word)
                wires[peer] = Wire(end, peer, timeout_seconds, near[peer])
            while len(wires) < len(peers):
                peer, end = _open(listeners, word, timeout_seconds, set(peers) - set(wires))
                wires[peer] = Wire(end, peer, timeout_seconds, near[peer])
        finally:
            for listener in listeners:
                listener.close()
    return dict(sorted(wires.items()))


def _posted(store: dist.Store, what: str, peer: int, timeout_seconds: float) -> str:
    """What a peer has put into the store under this name, when it has."""
    try:
        store.wait([f"{what}/{peer}"], timedelta(seconds=timeout_seconds))
    except dist.DistStoreError as error:
        raise StageError(
            f"waited for rank {peer} to make its schedule for {timeout_seconds:g} s in vain. All ranks of a pipeline, "
            "and of the pipelines that share data_group, make it together: did that rank fail before?"
        ) from error
    return store.get(f"{what}/{peer}").decode()


def machine() -> str:
    """The same for processes that can reach one another's files: this boot of this machine, this view of its disks."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
        return f"{boot} {os.readlink('/proc/self/ns/mnt')} {os.environ.get('SLIPSTREAM_MACHINE', '')}"
    except OSError:
        return socket.gethostname()


def _agreed_word(store: dist.Store) -> bytes:
    """What a rank must say at the door: made by whoever comes first, known to those who share the store."""
    return store.compare_set("word", "", os.urandom(16).hex())


def _unix_listener(folder: str, expected: int) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(os.path.join(folder, "wires"))
    listener.listen(max(1, expected))
    return listener


def _network_listener(expected: int) -> socket.socket:
    """On one interface where it is known which, else on all of them."""
    addresses = _addresses()
    return socket.create_server((addresses[0] if len(addresses) == 1 else "", 0), backlog=max(1, expected))


def _addresses() -> list[str]:
    """Where other machines may reach this one, the likeliest first."""
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        named = os.environ.get(variable, "").lstrip("=").split(",")[0]
        if named and named[0] != "^":
            found = [_address_of(name) for _, name in socket.if_nameindex() if name.startswith(named)]
            if addresses := [address for address in found if address]:
                return addresses[:1]
    found = [_address_towards(os.environ.get("MASTER_ADDR"))]
    found += [_address_of(name) for _, name in socket.if_nameindex()]
    known = dict.fromkeys(address for address in found if address)
    return [a for a in known if not a.startswith("127.")] or list(known) or ["127.0.0.1"]


def _address_of(interface: str) -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            found = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", interface[:15].encode()))
        except OSError:
            return None
    return socket.inet_ntoa(found[20:24])


def _address_towards(host: str | None) -> str | None:
    """The address this machine uses on its way to `host`; nothing is sent."""
    if not host:
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))
        except OSError:
            return None
        return probe.getsockname()[0]


def _knock(places: dict, near: bool, peer: int, timeout_seconds: float) -> socket.socket:
    if near:
        end = socket.socket(socket.AF_UNIX)
        end.connect(places["path"])
        return end
    addresses, port = places["address"]
    last: OSError | None = None
    for address in addresses:
        try:
            return _prompt(socket.create_connection((address, port), min(10.0, timeout_seconds)))
        except OSError as error:
            last = error
    raise StageError(
        f"cannot reach rank {peer} at {', '.join(addresses)} ({last}). Set GLOO_SOCKET_IFNAME to the network interface "
        "that the machines share."
    )


def _prompt(end: socket.socket) -> socket.socket:
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    return end


def _open(
    listeners: Sequence[socket.socket], word: bytes, timeout_seconds: float, expected: set[int]
) -> tuple[int, socket.socket]:
    """The next rank at a door that says the word; a stranger is shown out."""
    while True:
        poll = select.poll()
        for listener in listeners:
            poll.register(listener, select.POLLIN)
        ready = poll.poll(timeout_seconds * 1e3)
        if not ready:
            missing = ", ".join(str(rank) for rank in sorted(expected))
            raise StageError(f"waited for rank {missing} to connect for {timeout_seconds:g} s in vain.")
        door = next(listener for listener in listeners if listener.fileno() == ready[0][0])
        end, _ = door.accept()
        end.settimeout(min(10.0, timeout_seconds))
        said = b""
        try:
            while len(said) < 4 + len(word) and (part := end.recv(4 + len(word) - len(said))):
                said += part
        except OSError:
            said = b""
        if len(said) == 4 + len(word) and hmac.compare_digest(said[4:], word):
            (rank,) = struct.unpack("!I", said[:4])
            if rank in expected:
                return rank, _prompt(end) if end.family == socket.AF_INET else end
        end.close()
