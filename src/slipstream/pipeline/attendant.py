"""A thread that looks after a stage's neighbours whatever its host is doing: launching kernels, waiting, or away.

Over NCCL a message begins when a host has seen that its device is done with it, and has told its neighbour
(`in_stream.py`). A host that is launching a forward or a backward would see it many milliseconds late. Torch's
operations give the interpreter's lock up each time, so this thread has its turn within a tenth of a millisecond.

The thread alone runs the protocol. The host hands it messages and takes what it has queued, by way of deques.

It asks the device for news, which a CUDA graph that is being captured in another thread may not bear: capture before
the first step, or with `capture_error_mode="thread_local"`.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
import weakref
from collections.abc import Callable, Sequence

import torch

from slipstream.distributed.groups import Wait
from slipstream.distributed.wires import Wire, wait_readable
from slipstream.pipeline.host_sum import PeerLost
from slipstream.pipeline.neighbours import Neighbour, Waiting

_LOOK_SECONDS = 0.0001  # between two looks at the device, which tells nobody when it is done
_IDLE_SECONDS = 60.0
_CLOSING_SECONDS = 5.0  # a thread that waits for a lost device is left to itself


class Attendant(Waiting):
    """`duties`: each does what has become possible, and says whether it waits for the device."""

    def __init__(self, neighbours: Sequence[Neighbour], device: torch.device) -> None:
        super().__init__(neighbours)
        self.duties: list[Callable[[], bool]] = []
        self.more_wires: list[Wire] = []  # of duties that hear others than the neighbours
        self.device = device
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        self._closed = False
        self._bell: socket.socket | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """When every duty is there."""
        self._bell, ear = socket.socketpair()
        self._bell.setblocking(False)
        ear.setblocking(False)
        weakref.finalize(self, self._bell.close)  # which the thread hears
        self._thread = threading.Thread(
            target=_attend,
            args=(weakref.ref(self), ear, self.device),
            name="slipstream-attendant",
            daemon=True,
        )
        self._thread.start()

    @property
    def wires(self) -> list[Wire]:
        return super().wires + [wire for wire in self.more_wires if not wire.gone]

    def ring(self) -> None:
        """There is something new to look after."""
        assert self._bell is not None
        with contextlib.suppress(OSError):  # full of rings, or nobody listens any more
            self._bell.send(b"\0")

    def until(self, arrived: Callable[[], bool], neighbour: Neighbour, what: str) -> None:
        with self._changed:  # so that nothing changes unnoticed between a look and a wait
            super().until(arrived, neighbour, what)

    def poll(self, wait: Wait, timeout_seconds: float) -> None:
        """Until something is done of which no neighbour tells."""
        deadline = time.monotonic() + timeout_seconds
        while not wait.is_completed():
            self._check()
            if time.monotonic() > deadline:
                raise PeerLost(f"no answer within the timeout of {timeout_seconds:g} s")
            time.sleep(_LOOK_SECONDS)

    def close(self) -> None:
        self._closed = True
        if self._thread is not None and self._bell is not None:
            self.ring()
            self._thread.join(_CLOSING_SECONDS)
            self._bell.close()
        self.duties.clear()
        self.more_wires.clear()
        self._error = None  # and the frames it came from, with all that they hold

    def _pause(self, seconds: float) -> None:
        self._check()
        self._changed.wait(seconds)

    def _check(self) -> None:
        """Raise what the thread ended with."""
        if self._error is not None:
            raise self._error

    def _look_around(self) -> bool:
        """Whether something waits for the device."""
        for neighbour in self._neighbours:
            neighbour.listen()
        waits = [duty() for duty in self.duties]
        self._tell_host()
        return any(waits)

    def _tell_host(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _fail(self, error: BaseException) -> None:
        self._error = error
        self._tell_host()


def _attend(reference: weakref.ref[Attendant], ear: socket.socket, device: torch.device) -> None:
    """Until the attendant is closed, or nobody has it any more."""
    with ear:
        try:
            if device.type == "cuda":  # a thread begins with the first one: a look would make a context there
                torch.cuda.set_device(device)
            while (attendant := reference()) is not None and not attendant._closed:
                waits, wires = attendant._look_around(), attendant.wires
                del attendant
                if waits:
                    time.sleep(_LOOK_SECONDS)
                else:
                    wait_readable([*wires, ear], _IDLE_SECONDS)
                    with contextlib.suppress(BlockingIOError):
                        ear.recv(4096)
        except BaseException as error:  # the host's next wait raises it
            if (attendant := reference()) is not None:
                attendant._fail(error)
