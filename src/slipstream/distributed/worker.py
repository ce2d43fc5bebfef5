"""The process that runs jobs for a launcher: `python -m slipstream.distributed.worker FD`.

A thread owns the socket to the launcher: it takes jobs, and ends the process when the launcher is gone, even
while a job is running. A job gets its own process group, made before it and destroyed after it. SIGTERM is blocked
from birth (`launch.py`): a job that wants to stop on it unblocks it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import queue
import signal
import socket
import sys
import threading
import traceback
from importlib import import_module
from multiprocessing.connection import Connection
from typing import Any

from slipstream.distributed.launch import STACKS, receive, send
from slipstream.errors import StageError, UserError


def main(descriptor: int) -> None:
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # a terminal's Ctrl-C reaches the launcher, which passes it on
    signal.signal(
        signal.SIGTERM, lambda *_: None
    )  # threads of a job that had it unblocked may outlive the job
    faulthandler.register(STACKS)  # also while the interpreter is held up in a library
    connection = Connection(descriptor)
    jobs: queue.SimpleQueue = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(connection, jobs), daemon=True).start()
    listener: socket.socket | None = None
    while True:
        message = jobs.get()
        if message == "serve":  # bound here, to loopback, so that no port is named before it is taken
            listener = socket.create_server(("127.0.0.1", 0))
            send(connection, listener.getsockname()[1])
            continue
        name, args, kwargs, rank, ranks, port = message
        meeting = None if listener is None else listener.detach()
        answer = _perform(name, args, kwargs, rank, ranks, port, meeting)
        while signal.SIGTERM in signal.sigpending():  # it was meant for the job that has just ended
            signal.sigwait((signal.SIGTERM,))
        listener = None
        with contextlib.suppress(OSError):
            _answer(connection, answer)
        if answer[0] == "crash" and "CUDA error" in str(answer[1][0]):
            connection.close()
            os._exit(1)  # the device is of no more use to this process; the next job gets another one


def _listen(connection: Connection, jobs: queue.SimpleQueue) -> None:
    while True:
        try:
            jobs.put(receive(connection))
        except (EOFError, OSError):
            os._exit(1)  # the launcher is gone: whatever runs here has nobody to answer to


def _answer(connection: Connection, answer: tuple[str, Any]) -> None:
    try:
        send(connection, answer)
    except (TypeError, AttributeError, ValueError) as error:  # not picklable
        send(connection, ("crash", (StageError(f"A job's result cannot be sent back: {error}"), "")))


def _perform(
    name: str, args: tuple, kwargs: dict[str, Any], rank: int, ranks: int, port: int, listener: int | None
) -> tuple[str, Any]:
    from slipstream.distributed.world import initialise

    try:
        module, _, qualname = name.partition(":")
        function: Any = import_module(module)
        for part in qualname.split("."):
            function = getattr(function, part)
        with initialise(rank, ranks, port=port, listener=listener) as world:
            return "result", function(world, *args, **kwargs)
    except UserError as error:
        return "mistake", (error, "")
    except Exception as error:
        # The launcher prints the traceback of the first cause only: its peers' are consequences.
        message = f"Rank {rank} failed with {type(error).__name__}: {error}"
        return "crash", (StageError(message), traceback.format_exc())


if __name__ == "__main__":
    main(int(sys.argv[1]))
