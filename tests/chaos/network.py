"""Two network namespaces and the line between them: packets pass through this process, which can hold or drop them.

Each namespace has a tun device; what one sends is read here and written to the other, after a delay, or not at all.
It needs root. `available` says whether it can be had.
"""

from __future__ import annotations

import contextlib
import fcntl
import heapq
import os
import select
import struct
import subprocess
import threading
import time
from itertools import count

_TUNSETIFF = 0x400454CA
_IFF_TUN, _IFF_NO_PI = 0x0001, 0x1000


def available() -> bool:
    try:
        with Line():
            return True
    except (OSError, subprocess.CalledProcessError):
        return False


class Line:
    """`with Line() as line`: namespaces `line.names`, addresses `line.addresses`, interface `line.interface`."""

    interface = "line0"

    def __init__(self) -> None:
        mark = f"chaos{os.getpid() % 100000}"
        self.names = (f"{mark}a", f"{mark}b")
        self.addresses = ("10.77.0.1", "10.77.0.2")
        self.delay_seconds = 0.0
        self.cut = False
        self._ends: list[int] = []
        self._closed = threading.Event()

    def __enter__(self) -> Line:
        try:
            self._make()
        except BaseException:
            self._remove()
            raise
        self._thread = threading.Thread(target=self._carry, daemon=True)
        self._thread.start()
        return self

    def _make(self) -> None:
        for name, address in zip(self.names, self.addresses, strict=True):
            _ip("netns", "add", name)
            end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
            device = f"c{os.getpid() % 100000}{name[-1]}"
            fcntl.ioctl(end, _TUNSETIFF, struct.pack("16sH", device.encode(), _IFF_TUN | _IFF_NO_PI))
            self._ends.append(end)
            _ip("link", "set", device, "netns", name)
            _ip("-n", name, "link", "set", device, "name", self.interface)
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", self.interface)
            _ip("-n", name, "link", "set", self.interface, "up")
            _ip("-n", name, "link", "set", "lo", "up")

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self._thread.join()
        self._remove()

    def _remove(self) -> None:
        for end in self._ends:
            os.close(end)
        for name in self.names:
            with contextlib.suppress(OSError, subprocess.CalledProcessError):  # it was never made
                _ip("netns", "del", name)

    def _carry(self) -> None:
        waiting: list[tuple[float, int, int, bytes]] = []
        order = count()
        while not self._closed.is_set():
            pause = max(0.0, min(0.05, waiting[0][0] - time.monotonic())) if waiting else 0.05
            for end in select.select(self._ends, [], [], pause)[0]:
                for _ in range(64):
                    try:
                        packet = os.read(end, 65536)
                    except OSError:
                        break
                    if not self.cut:
                        other = self._ends[1 - self._ends.index(end)]
                        due = time.monotonic() + self.delay_seconds
                        heapq.heappush(waiting, (due, next(order), other, packet))
            while waiting and waiting[0][0] <= time.monotonic():
                _, _, end, packet = heapq.heappop(waiting)
                with contextlib.suppress(OSError):  # a full queue drops packets; TCP sends them again
                    os.write(end, packet)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)
