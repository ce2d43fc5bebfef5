"""Worker processes on this machine: started by a command, bound to loopback, gone when their launcher goes.

A worker is a fresh interpreter (`python -m slipstream.distributed.worker`) that takes jobs over a socket:
a job is the name of a function, its arguments, and the size of the process group to make for it. Workers stay
warm between jobs, so that importing torch is paid once (`RankPool`).
Each worker watches its socket: when the launcher dies, however it dies, the worker exits.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

from slipstream.distributed.answers import STACKS, collect, receive, send
from slipstream.errors import LostRankError, StoppedError, UserError

Function = str | Callable[..., Any]  # "module:qualname", or an importable function

# How a run is asked to stop; SIGUSR1 is what a batch system sends ahead of its limit.
STOPS = frozenset({signal.SIGTERM, signal.SIGUSR1})
AT_ONCE_SECONDS = 1.0  # a key pressed twice, or a terminal that signals a whole group: one request
_HINTS = {"SIGBUS": " (a mapped file, such as a data shard, was cut short, or shared memory is full)"}


@dataclass(frozen=True)
class Job:
    """What a worker is sent: a function, its arguments, and its rank among those who run it."""

    function: str
    args: tuple
    kwargs: dict[str, Any]
    rank: int
    ranks: int
    place: int  # of the process in its pool: which device is its own
    port: int
    patience_seconds: float | None


class Asked(Protocol):
    """Told of every request to stop when it comes: the first, which the ranks answer, and the second, which kills."""

    def first(self) -> None: ...

    def second(self) -> None: ...


def started_by_torchrun() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ or {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= os.environ.keys()


class RankPool:
    """Up to `size` warm worker processes, each in a place of its own: the number of its device, where it has one.

    A job may use some of them; one that is lost is replaced before the next job.
    """

    def __init__(self, size: int, environment: Mapping[str, str] | None = None) -> None:
        if size < 1:
            raise UserError(f"A pool needs at least one process, not {size}.")
        self.size = size
        self._environment = dict(environment or {})
        self._workers: dict[int, _Worker] = {}
        self._at_work: tuple[_Worker, ...] = ()
        self._signalled: int | None = None  # for workers that are not there yet

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(
        self,
        function: Function,
        *args: Any,
        ranks: int | None = None,
        places: Sequence[int] | None = None,
        timeout: float | None = None,
        patience_seconds: float | None = None,
        **kwargs: Any,
    ) -> list[Any]:
        """Run `function(world, *args, **kwargs)` on the workers of `places` (of the first `ranks` places); results in
        rank order. `timeout`: for the whole job; `patience_seconds`: how long ranks wait for each other to come, and
        how long one of them may give no sign of life.
        """
        count = self.size if ranks is None else ranks
        places = range(count) if places is None else places
        if not 1 <= len(places) <= self.size:
            raise UserError(f"A job of {len(places)} ranks does not fit a pool of {self.size} processes.")
        self._at_work = workers = tuple(self._ready(place, rank) for rank, place in enumerate(places))
        port = workers[0].serve(patience_seconds)
        name = _name_of(function)
        for rank, (place, worker) in enumerate(zip(places, workers, strict=True)):
            job = Job(name, args, kwargs, rank, len(places), place, port, patience_seconds)
            with contextlib.suppress(OSError):  # lost already: `collect` reads the end of its socket
                send(worker.connection, job)
        try:
            return collect(workers, timeout, patience_seconds)
        finally:
            self._at_work = ()

    def _ready(self, place: int, rank: int) -> _Worker:
        """Torch keeps what a process worked out as one rank, and would use it as another: it is never another."""
        worker = self._workers.get(place)
        if worker is None or not worker.alive() or worker.rank not in (None, rank):
            worker = self._start(place)
        worker.rank = rank
        return worker

    def _start(self, place: int) -> _Worker:
        if place in self._workers:
            self._workers[place].close()
        self._workers[place] = worker = _Worker(self._environment)
        if self._signalled is not None:
            worker.signal(self._signalled)
        return worker

    def comes_up(self, place: int, seconds: float) -> bool:
        """Start the worker of a place that no job uses; whether it can use its device. It stays for the next job."""
        return self._start(place).comes_up(place, seconds)

    def signal(self, number: int) -> None:
        """Send a signal to every worker, also to those that are still to be started."""
        self._signalled = number
        for worker in list(self._workers.values()):
            worker.signal(number)

    def ask_to_stop(self) -> None:
        """The job that runs now, and no later one."""
        for worker in self._at_work:
            worker.signal(signal.SIGTERM)

    def show_stacks(self) -> None:
        for worker in self._at_work:
            worker.signal(STACKS)

    def wake(self) -> list[int]:
        """Let the workers that are stopped go on; which they are. To all of them: one may be about to stop, and to one
        that runs it means nothing."""
        stopped = [worker.pid for worker in self._at_work if worker.stopped()]
        for worker in self._at_work:
            worker.signal(signal.SIGCONT)
        return stopped

    def close(self) -> None:
        for worker in self._workers.values():
            worker.connection.close()  # all are told before the first is waited for
        for worker in self._workers.values():
            worker.close()
        self._workers = {}


class _Worker:
    """One process and the socket to it."""

    def __init__(self, extra: Mapping[str, str]) -> None:
        self.rank: int | None = None  # it has been
        ours, theirs = socket.socketpair()
        environment = {**os.environ, **extra}
        environment.setdefault("OMP_NUM_THREADS", "1")  # one intra-op thread: the bits depend on it
        # Of a rank that leaves, its store's other users write a page of C++ frames before anyone can say why.
        environment.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        environment["GLOO_SOCKET_IFNAME"] = "lo"  # ranks we start talk over loopback only
        environment["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)
        # Born with them blocked: a stop asked for while a worker starts waits for the job that can answer it.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, *STOPS})
        try:
            self._process = subprocess.Popen(
                # -P: it looks for modules where we do, and not first in the folder we are in.
                [sys.executable, "-P", "-m", "slipstream.distributed.worker", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env=environment,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()
        self.connection = Connection(ours.detach())

    @property
    def pid(self) -> int:
        return self._process.pid

    def alive(self) -> bool:
        """Whether it can take a job: one that is about to exit has closed its socket."""
        if self._process.poll() is not None:
            return False
        if self.connection.poll(0):  # nothing is owed to us between jobs, so this is its end
            self.kill()
            return False
        return True

    def serve(self, seconds: float | None = None) -> int:
        """Have this worker listen on a loopback port where the ranks of the next job will meet."""
        answer = self._ask("serve", seconds)
        if not isinstance(answer, int):
            raise LostRankError(f"A worker process {answer or self.ended()} before its first job.", [0])
        return answer

    def comes_up(self, place: int, seconds: float) -> bool:
        return self._ask(("come up", place), seconds) is True

    def _ask(self, question: Any, seconds: float | None) -> Any:
        """The answer; words where there is none in time; None where the process is gone."""
        try:
            send(self.connection, question)
            if not self.connection.poll(seconds):
                return f"gave no answer within {seconds:g} s"
            return receive(self.connection)
        except (EOFError, OSError):
            return None

    def signal(self, number: int) -> None:
        if self._process.poll() is None:
            self._process.send_signal(number)

    def stopped(self) -> bool:
        """Whether a signal, or a debugger, holds the process."""
        try:
            stat = Path(f"/proc/{self.pid}/stat").read_text()
        except OSError:  # gone, or a system without /proc
            return False
        return stat.rpartition(")")[2].split()[0] in ("T", "t")

    def ended(self) -> str:
        """How the process ended, in words."""
        try:
            code = self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            return "closed its connection"
        if code >= 0:
            return f"exited with code {code}"
        name = signal.Signals(-code).name
        return f"was killed by {name}{_HINTS.get(name, '')}"

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        self.connection.close()  # a worker that reads the end of its socket exits
        try:
            self._process.wait(timeout=0 if self.stopped() else 2)
        except subprocess.TimeoutExpired:
            self.kill()


def _name_of(function: Function) -> str:
    if isinstance(function, str):
        return function
    if function.__module__ == "__main__":
        raise UserError(
            f"Ranks cannot import {function.__qualname__} from the script that was started: "
            'put it into a module, or name it "module:function".'
        )
    return f"{function.__module__}:{function.__qualname__}"


class Stop:
    """What the person who started the job asked for so far."""

    def __init__(self) -> None:
        self.asked = threading.Event()
        self.killed = threading.Event()

    def guard(self, run: Callable[[], Any]) -> Any:
        """`run`, whose ranks may be killed by a second request: that they were lost is then no news."""
        try:
            return run()
        except UserError as error:
            if self.killed.is_set():
                raise StoppedError("Stopped at once.") from error
            raise


def after_the_end(before: dict[int, Any]) -> dict[int, Any]:
    """What becomes of the signals that a run has heard, where they had these handlers before it. In a command,
    which `slipstream.cli.main` has told what SIGTERM means, nothing that comes after its run changes the exit code."""
    command = before.get(signal.SIGTERM) is signal.default_int_handler
    return dict.fromkeys(before, signal.SIG_IGN) if command else before


@contextlib.contextmanager
def forwarded_signals(pool: RankPool, told: Asked) -> Iterator[Stop]:
    """Inside, a request to stop goes to the ranks, which save and end; a second one kills them. SIGUSR2 has all of
    them print where they are."""
    stop = Stop()
    first = 0.0

    def forward(number: int, frame: object) -> None:
        nonlocal first
        if not stop.asked.is_set():
            first = time.monotonic()
            stop.asked.set()
            pool.signal(signal.SIGTERM)
            told.first()
            for pid in pool.wake():  # else it could not answer
                os.write(2, f"Process {pid} was stopped (SIGSTOP): it is let go on, to save.\n".encode())
        elif time.monotonic() - first > AT_ONCE_SECONDS and not stop.killed.is_set():
            stop.killed.set()
            pool.signal(signal.SIGKILL)
            told.second()

    handlers: dict[int, Any] = dict.fromkeys((signal.SIGINT, *STOPS), forward)
    handlers[STACKS] = lambda *_: pool.show_stacks()
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield stop
        before = after_the_end(before)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
