"""Worker processes on this machine: started by a command, bound to loopback, gone when their launcher goes.

A worker is a fresh interpreter (`python -m slipstream.distributed.worker`) that takes jobs over a socket:
a job is the name of a function, its arguments, and the size of the process group to make for it. Workers stay
warm between jobs, so that importing torch is paid once (`RankPool`); `launch` is a pool used once.
Each worker watches its socket: when the launcher dies, however it dies, the worker exits.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple, Protocol

from slipstream.errors import StageError, StoppedError, UserError

Function = str | Callable[..., Any]  # "module:qualname", or an importable function

# How gloo and sockets tell of a peer that left.
LOST_CONNECTION = ("Connection", "not connected", "closed by the other end", "Broken pipe")
# How long the ranks that did not fail first are given to end by themselves and say what they saw.
GRACE_SECONDS = 10.0
STACKS = signal.SIGUSR1  # has a worker print where it is
PRINTING_SECONDS = 0.5
AT_ONCE_SECONDS = 1.0  # a key pressed twice, or a terminal that signals a whole group: one request


class Asked(Protocol):
    """Told of every request to stop when it comes: the first, which the ranks answer, and the second, which kills."""

    def first(self) -> None: ...

    def second(self) -> None: ...


def started_by_torchrun() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ or {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= os.environ.keys()


def launch(
    function: Function,
    nproc: int,
    args: tuple = (),
    *,
    timeout: float | None = None,
    on_signal: Asked | None = None,
    environment: Mapping[str, str] | None = None,
) -> list[Any]:
    """Run `function(world, *args)` on `nproc` new ranks; results come back in rank order.

    `on_signal`: SIGINT and SIGTERM are passed on to the workers (once: asked to stop; twice: killed, which raises
    a `StoppedError`) instead of ending the launcher at once, and it is told of them. `environment`: further variables
    of the workers.
    """
    with RankPool(nproc, environment) as pool:
        if on_signal is None:
            return pool.run(function, *args, timeout=timeout)
        with _forwarded_signals(pool, on_signal) as killed:
            try:
                return pool.run(function, *args, timeout=timeout)
            except UserError as error:
                if killed.is_set():  # that ranks were lost is no news
                    raise StoppedError("Stopped at once.") from error
                raise


class RankPool:
    """`size` warm worker processes. A job may use fewer; a lost worker is replaced before the next job."""

    def __init__(self, size: int, environment: Mapping[str, str] | None = None) -> None:
        if size < 1:
            raise UserError(f"A pool needs at least one process, not {size}.")
        self._size = size
        self._environment = dict(environment or {})
        self._workers: list[_Worker] = []
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
        timeout: float | None = None,
        **kwargs: Any,
    ) -> list[Any]:
        """Run `function(world, *args, **kwargs)` on the first `ranks` workers; results in rank order."""
        ranks = self._size if ranks is None else ranks
        if not 1 <= ranks <= self._size:
            raise UserError(f"A job of {ranks} ranks does not fit a pool of {self._size} processes.")
        self._replace_lost()
        workers = self._workers[:ranks]
        port = workers[0].serve()
        for rank, worker in enumerate(workers):
            send(worker.connection, (_name_of(function), args, kwargs, rank, ranks, port))
        return _collect(workers, timeout)

    def _replace_lost(self) -> None:
        """Each in its place: torch keeps what a process worked out as one rank, and would use it as another."""
        lost = [i for i, worker in enumerate(self._workers) if not worker.alive()]
        for place in (*lost, *range(len(self._workers), self._size)):
            self._workers[place : place + 1] = [_Worker(self._environment)]
            if self._signalled is not None:
                self._workers[place].signal(self._signalled)

    def signal(self, number: int) -> None:
        """Send a signal to every worker, also to those that are still to be started."""
        self._signalled = number
        for worker in self._workers:
            worker.signal(number)

    def close(self) -> None:
        for worker in self._workers:
            worker.close()
        self._workers = []


class _Worker:
    """One process and the socket to it."""

    def __init__(self, extra: Mapping[str, str]) -> None:
        ours, theirs = socket.socketpair()
        environment = {**os.environ, **extra}
        environment.setdefault("OMP_NUM_THREADS", "1")  # one intra-op thread: the bits depend on it
        environment["GLOO_SOCKET_IFNAME"] = "lo"  # ranks we start talk over loopback only
        environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        # Born with them blocked: a stop asked for while a worker starts waits for the job that can answer it.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "slipstream.distributed.worker", str(theirs.fileno())],
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

    def serve(self) -> int:
        """Have this worker listen on a loopback port where the ranks of the next job will meet."""
        send(self.connection, "serve")
        try:
            return receive(self.connection)
        except (EOFError, OSError):
            raise StageError(f"A worker process {self.ended()} before its first job.") from None

    def signal(self, number: int) -> None:
        if self.alive():
            self._process.send_signal(number)

    def ended(self) -> str:
        """How the process ended, in words."""
        try:
            code = self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            return "closed its connection"
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        self.connection.close()  # a worker that reads the end of its socket exits
        try:
            self._process.wait(timeout=2)
        except subprocess.TimeoutExpired:
            self.kill()


class _Failure(NamedTuple):
    kind: str  # "mistake": a UserError; "crash": any other exception; "died": the process is gone
    error: Exception
    traceback: str


def _collect(workers: Sequence[_Worker], timeout: float | None) -> list[Any]:
    """Wait for every rank; on the first failure give the others a moment, then stop them and say why."""
    deadline = None if timeout is None else time.monotonic() + timeout
    results: dict[int, Any] = {}
    failures: list[_Failure] = []
    waiting = {worker.connection: rank for rank, worker in enumerate(workers)}
    while waiting:
        remaining = None if deadline is None else max(0.0, deadline - time.monotonic())
        ready = wait(list(waiting), remaining)
        if not ready:
            break
        for connection in ready:
            assert isinstance(connection, Connection)
            rank = waiting.pop(connection)
            try:
                outcome, value = receive(connection)
            except (EOFError, OSError):
                lost = StageError(f"Rank {rank} {workers[rank].ended()} before it finished.")
                outcome, value = "died", (lost, "")
            if outcome == "result":
                results[rank] = value
                continue
            if not failures:
                grace = time.monotonic() + GRACE_SECONDS
                deadline = grace if deadline is None else min(deadline, grace)
            error, traceback = value
            failures.append(_Failure(outcome, error, traceback))
    for rank in sorted(waiting.values()):  # still running after the deadline
        if not failures:
            print(f"Rank {rank} gave no answer. It is here:", file=sys.stderr, flush=True)
            workers[rank].signal(STACKS)
            time.sleep(PRINTING_SECONDS)
    for rank in waiting.values():
        workers[rank].kill()
    if failures:
        raise _first_cause(failures)
    if waiting:
        ranks = ", ".join(str(rank) for rank in sorted(waiting.values()))
        raise StageError(
            f"No answer within {timeout:g} s from rank {ranks}; all ranks were stopped. "
            "Where each of them was is printed above."
        )
    return [results[rank] for rank in range(len(workers))]


def _first_cause(failures: list[_Failure]) -> Exception:
    """A user's mistake explains more than a death, and a death more than a neighbour that missed its peer."""
    order = ("mistake", "died", "crash")
    own = [f for f in failures if not (f.kind == "mistake" and isinstance(f.error, StageError))] or failures
    # The earliest of the best kind; a lost connection is what the others see of somebody's own trouble.
    first = min(own, key=lambda failure: (order.index(failure.kind), _is_lost_connection(failure.error)))
    if first.kind == "mistake" and not isinstance(first.error, StageError):
        return first.error
    if first.traceback:
        print(first.traceback, file=sys.stderr)
    # What a neighbour saw (stage, group, microbatch) belongs beside how the lost rank ended.
    seen = [
        f.error
        for f in failures
        if f is not first and isinstance(f.error, StageError) and f.kind == "mistake"
    ]
    return StageError("\n".join(str(error) for error in [first.error, *seen[:1]]))


def _is_lost_connection(error: Exception) -> bool:
    return any(words in str(error) for words in LOST_CONNECTION)


def send(connection: Connection, message: Any) -> None:
    """Plain pickle: torch teaches `Connection.send` to share memory instead, which outlives no process."""
    connection.send_bytes(pickle.dumps(message))


def receive(connection: Connection) -> Any:
    return pickle.loads(connection.recv_bytes())


def _name_of(function: Function) -> str:
    if isinstance(function, str):
        return function
    return f"{function.__module__}:{function.__qualname__}"


@contextlib.contextmanager
def _forwarded_signals(pool: RankPool, asked: Asked) -> Iterator[threading.Event]:
    first: float | None = None
    killed = threading.Event()

    def forward(number: int, frame: object) -> None:
        nonlocal first
        if first is None:
            first = time.monotonic()
            pool.signal(signal.SIGTERM)
            asked.first()
        elif time.monotonic() - first > AT_ONCE_SECONDS and not killed.is_set():
            killed.set()
            pool.signal(signal.SIGKILL)
            asked.second()

    before = {number: signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield killed
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
