"""A thread that looks after a stage's neighbours whatever its host is doing: launching kernels, waiting, or away.

Over NCCL a message begins when a host has seen that its device is done with it, and has told its neighbour
(`in_stream.py`). A host that is launching a forward or a backward would see it many milliseconds late. Torch's
operations give the interpreter's lock up each time, so this thread has its turn within a tenth of a millisecond.

The thread alone runs the protocol. The host hands it messages and takes what it has queued, by way of deques.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Protocol

from slipstream.distributed.wires import wait_readable
from slipstream.pipeline.neighbours import Neighbour, Waiting

_LOOK_SECONDS = 0.0001  # between two looks at the device, which tells nobody when it is done
_CLOSING_SECONDS = 5.0  # a thread that waits for a lost device is left to itself


class Duty(Protocol):
    def attend(self) -> bool:
        """Do what has become possible; whether there was anything."""
        ...

    @property
    def awaits_device(self) -> bool: ...


class Attendant(Waiting):
    """A host that waits is told when one of the `duties` was done, or a neighbour was heard."""

    def __init__(self, neighbours: Sequence[Neighbour]) -> None:
        super().__init__(neighbours)
        self.duties: list[Duty] = []
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        self._bell = _Bell()
        self._closed = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """When every duty is there."""
        weakref.finalize(self, self._bell.ring)  # the thread goes with it
        self._thread = threading.Thread(
            target=_attend, args=(weakref.ref(self), self._bell), name="slipstream-attendant", daemon=True
        )
        self._thread.start()

    def ring(self) -> None:
        """There is something new to look after."""
        self._bell.ring()

    def until(self, arrived: Callable[[], bool], neighbour: Neighbour, what: str) -> None:
        with self._changed:  # so that nothing changes unnoticed between a look and a wait
            super().until(arrived, neighbour, what)

    def check(self) -> None:
        """Raise what the thread ended with."""
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        self._closed = True
        if self._thread is not None:
            self._bell.ring()
            self._thread.join(_CLOSING_SECONDS)
        self.duties.clear()

    def _listen(self) -> None:
        """The thread does."""

    def _wait(self, seconds: float) -> None:
        self.check()
        self._changed.wait(min(seconds, 1.0))

    def _look_around(self) -> bool:
        """Whether something waits for the device."""
        moved = [neighbour.listen() for neighbour in self._neighbours]
        moved += [duty.attend() for duty in self.duties]
        if any(moved):
            self._tell_host()
        return any(duty.awaits_device for duty in self.duties)

    def _tell_host(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _fail(self, error: BaseException) -> None:
        self._error = error
        self._tell_host()


class _Bell:
    """Wakes a thread that waits for wires."""

    def __init__(self) -> None:
        self._number = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()  # a number that was closed may be another file's by now

    def fileno(self) -> int:
        return self._number

    def ring(self) -> None:
        with self._lock:
            if self._number >= 0:
                os.eventfd_write(self._number, 1)

    def silence(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._number)

    def close(self) -> None:
        with self._lock:
            os.close(self._number)
            self._number = -1


def _attend(reference: weakref.ref[Attendant], bell: _Bell) -> None:
    """Until the attendant is closed, or nobody has it any more."""
    while (attendant := reference()) is not None and not attendant._closed:
        try:
            busy = attendant._look_around()
        except BaseException as error:  # the host's next wait raises it
            attendant._fail(error)
            break
        wires = attendant.wires
        del attendant
        if busy:
            time.sleep(_LOOK_SECONDS)
        else:
            wait_readable([*wires, bell], 60.0)
            bell.silence()
    bell.close()
