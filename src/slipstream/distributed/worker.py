"""The process that runs jobs for a launcher: `python -m slipstream.distributed.worker FD`.

A thread owns the socket to the launcher: it takes jobs, and ends the process when the launcher is gone, even
while a job is running. Another one beats while a job runs, so that the launcher sees that this process does. A job gets
its own process group, made before it and destroyed after it. SIGTERM and SIGUSR1 are blocked from birth (`launch.py`):
a job that wants to stop on them unblocks them.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import queue
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from multiprocessing.connection import Connection
from typing import Any

from slipstream.distributed.answers import BEAT, BEAT_SECONDS, CAUSE, STACKS, read, send
from slipstream.distributed.launch import STOPS, Job
from slipstream.errors import StageError, UserError

COLLECTING_SECONDS = 2.0


def main(descriptor: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's reaches the launcher, which passes it on
    for number in STOPS:  # threads of a job that had them unblocked may outlive the job
        signal.signal(number, lambda *_: None)
    faulthandler.enable()  # a crash of a library says where it was called from
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
        if isinstance(message, _Unreadable):
            text = f"A job's arguments cannot be read by its ranks, which import them from modules: {message.why}"
            _answer(connection, ("crash", (StageError(text), "")))
            continue
        if not isinstance(message, Job):
            send(connection, _comes_up(message[1]))
            continue
        job = message
        meeting = None if listener is None else listener.detach()
        with _beating(connection) as quiet:
            answer = _perform(job, meeting, partial(_tell, connection, quiet))
        while pending := STOPS & signal.sigpending():  # meant for the job that has just ended
            signal.sigwait(pending)
        listener = None
        with contextlib.suppress(OSError):
            _answer(connection, answer)
        if answer[0] == "crash" and "CUDA error" in str(answer[1][0]):
            connection.close()
            os._exit(1)  # the device is of no more use to this process; the next job gets another one
        failed = answer[0] != "result"
        del answer, job, message  # an error holds all that was at work when it was raised
        if failed:
            _collect_beside()
        else:
            gc.collect()  # each group of gloo's that lingers has a thread that wakes a hundred times a second


def _collect_beside() -> None:
    """What a failed job left behind goes now, beside the main thread, not by chance in the middle of the next job: what
    began something with other ranks may wait for them when it is destroyed."""
    thread = threading.Thread(target=gc.collect, name="slipstream-collecting", daemon=True)
    thread.start()
    thread.join(COLLECTING_SECONDS)


def _listen(connection: Connection, jobs: queue.SimpleQueue) -> None:
    while True:
        try:
            message = connection.recv_bytes()
        except (EOFError, OSError):
            os._exit(1)  # the launcher is gone: whatever runs here has nobody to answer to
        try:
            jobs.put(read(message))
        except Exception as error:  # raised by whatever a job's arguments are made of
            jobs.put(_Unreadable(f"{type(error).__name__}: {error}"))


@dataclass(frozen=True)
class _Unreadable:
    """A job whose arguments this process cannot make, and why."""

    why: str


def _tell(connection: Connection, quiet: Callable[[], None], failure: tuple[str, Any]) -> None:
    """What went wrong here, ahead of the answer: groups that lost somebody take a while to be closed."""
    quiet()
    # What cannot be sent now is named by the answer.
    with contextlib.suppress(OSError, TypeError, AttributeError, ValueError):
        send(connection, (CAUSE, failure))


def _answer(connection: Connection, answer: tuple[str, Any]) -> None:
    try:
        send(connection, answer)
    except (TypeError, AttributeError, ValueError) as error:  # not picklable
        send(connection, ("crash", (StageError(f"A job's result cannot be sent back: {error}"), "")))


@contextlib.contextmanager
def _beating(connection: Connection) -> Iterator[Callable[[], None]]:
    """Inside, the launcher hears from this process; once it ends, or what it gives is called, only answers are sent."""
    over = threading.Event()

    def beat() -> None:
        with contextlib.suppress(OSError):  # the launcher is gone, which ends this process
            while not over.wait(BEAT_SECONDS):
                send(connection, (BEAT, None))

    thread = threading.Thread(target=beat, name="slipstream-beat", daemon=True)
    thread.start()

    def quiet() -> None:
        over.set()
        thread.join()

    try:
        yield quiet
    finally:
        quiet()


def _comes_up(place: int) -> bool:
    """Whether this process can use the device of its place; what it imports for that it has for its first job."""
    from slipstream.distributed.world import comes_up

    return comes_up(place)


def _perform(job: Job, listener: int | None, tell: Callable[[tuple[str, Any]], None]) -> tuple[str, Any]:
    from slipstream.distributed.lost import is_lost_peer
    from slipstream.distributed.world import initialise

    try:
        module, _, qualname = job.function.partition(":")
        function: Any = import_module(module)
        for part in qualname.split("."):
            function = getattr(function, part)
        options: dict[str, Any] = {"port": job.port, "listener": listener, "place": job.place}
        if job.patience_seconds is not None:
            options["timeout_seconds"] = job.patience_seconds
        with initialise(job.rank, job.ranks, **options) as world:
            try:
                return "result", function(world, *job.args, **job.kwargs)
            except Exception as error:
                if not is_lost_peer(error):  # what many see, and is said in other words (`own_words`)
                    tell(_failure(job, error))
                raise
    except Exception as error:
        return _failure(job, error)


def _failure(job: Job, error: Exception) -> tuple[str, Any]:
    if isinstance(error, UserError):
        return "mistake", (error, "")
    # The launcher prints the traceback of the first cause only: its peers' are consequences.
    message = f"Rank {job.rank} failed with {type(error).__name__}: {error}"
    return "crash", (StageError(message), traceback.format_exc())


if __name__ == "__main__":
    main(int(sys.argv[1]))
