"""A stop that is asked for by SIGTERM, SIGUSR1 or SIGINT, remembered from the first line of a rank to its last.

The request is only noted here; the loop passes it on (`Engine.request_stop`) and all ranks stop after the same
group, save and end. So it may come at any moment: while a rank builds its engine, validates, rolls back, or
writes its last checkpoint, when it has nothing more to stop.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from slipstream.distributed.launch import STOPS, Asked

SECOND_SECONDS = 1.0  # torchrun passes a terminal's Ctrl-C on as well: two at once are one request


@contextmanager
def stop_signals(told: Asked | None = None) -> Iterator[threading.Event]:
    """The event that SIGTERM, SIGINT and SIGUSR1 (of a batch system, ahead of its limit) set. A second Ctrl-C
    interrupts; an ignored signal stays ignored. `told` hears of the first one when it comes.

    Our own workers are born with these signals blocked (`distributed/launch.py`): what came before this point is
    delivered here. Outside the main thread (tests) nothing is installed.
    """
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return
    first = 0.0

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal first
        if number == signal.SIGINT and asked.is_set() and time.monotonic() - first > SECOND_SECONDS:
            raise KeyboardInterrupt
        first = first or time.monotonic()
        if told is not None and not asked.is_set():
            told.first()
        asked.set()

    numbers = [n for n in (*STOPS, signal.SIGINT) if signal.getsignal(n) is not signal.SIG_IGN]
    before = {number: signal.signal(number, note) for number in numbers}
    mask = signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)
    try:
        yield asked
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for number, handler in before.items():
            signal.signal(number, handler)
