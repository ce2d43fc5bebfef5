"""What the ranks of a job answer: results in rank order, or the one cause of a failure.

While a job runs each of its processes sends a beat every second, from a thread of its own. A rank that is not heard is
named after a few seconds, and after the run's timeout it counts as lost: one that is stopped (SIGSTOP, a frozen
container) closes no connection, and where it is the only rank nobody else would notice.
"""

from __future__ import annotations

import pickle
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, Literal, NamedTuple, Protocol

from slipstream.errors import HealthError, LostRankError, StageError

# How gloo, sockets and we ourselves tell of a peer that left.
LOST_CONNECTION = ("connection", "not connected", "closed by the other end", "broken pipe")
# How long the ranks that did not fail first are given to end by themselves and say what they saw.
GRACE_SECONDS = 10.0
BEAT_SECONDS = 1.0
NOTICE_SECONDS = 10.0  # without a beat before a word is said about it
STACKS = signal.SIGUSR2  # has a rank print where it is
PRINTING_SECONDS = 0.5
BEAT = "beat"
CAUSE = "cause"  # of a failure, told by a rank that is yet to answer


class Process(Protocol):
    """As much of a worker as is needed to wait for its answer."""

    connection: Connection

    @property
    def pid(self) -> int: ...

    def signal(self, number: int) -> None: ...

    def stopped(self) -> bool: ...

    def ended(self) -> str: ...

    def kill(self) -> None: ...


class Failure(NamedTuple):
    kind: str  # "mistake": a UserError; "crash": any other exception; "died": the process is gone, or stands still
    error: Exception
    traceback: str
    rank: int = -1


@dataclass
class _Rank:
    """One rank that still owes its answer."""

    number: int
    process: Process
    heard: float  # when it last was
    noticed: Literal["", "silent", "stopped"] = ""  # what has been said of it since

    def __str__(self) -> str:
        return f"Rank {self.number} (process {self.process.pid})"


def collect(
    processes: Sequence[Process], timeout: float | None, patience_seconds: float | None = None
) -> list[Any]:
    """Wait for every rank; on the first failure give the others a moment, then stop them and say why.

    `timeout`: for the whole job. `patience_seconds`: how long a rank may give no sign of life.
    """
    deadline = None if timeout is None else time.monotonic() + timeout
    results: dict[int, Any] = {}
    failures: list[Failure] = []
    causes: dict[int, Failure] = {}  # told by ranks that have not ended yet
    now = time.monotonic()
    waiting: dict[Any, _Rank] = {
        process.connection: _Rank(rank, process, now) for rank, process in enumerate(processes)
    }
    while waiting:
        left = BEAT_SECONDS if deadline is None else min(BEAT_SECONDS, deadline - time.monotonic())
        for connection in wait(list(waiting), max(0.0, left)):
            rank = waiting[connection]
            outcome, value = _answer(connection, rank)
            if outcome == BEAT:
                _heard_again(rank)
                continue
            if outcome == CAUSE:
                kind, (error, text) = value
                causes[rank.number] = Failure(kind, error, text, rank.number)
                continue
            del waiting[connection]
            if outcome == "result":
                results[rank.number] = value
            else:
                own = causes.pop(rank.number, None)
                failures.append(own or Failure(outcome, value[0], value[1], rank.number))
        lost = [] if failures or causes else _watch(list(waiting.values()), patience_seconds)
        failures += lost
        for failure in lost:
            rank = next(rank for rank in waiting.values() if rank.number == failure.rank)
            rank.process.kill()
            del waiting[rank.process.connection]
        if (failures or causes) and (deadline is None or deadline > time.monotonic() + GRACE_SECONDS):
            deadline = time.monotonic() + GRACE_SECONDS
        if deadline is not None and time.monotonic() >= deadline:
            break
    failures += causes.values()
    _end(list(waiting.values()), failures)
    if failures:
        raise first_cause(failures)
    if waiting:
        numbers = sorted(rank.number for rank in waiting.values())
        raise LostRankError(
            f"No answer within {timeout:g} s from rank {', '.join(map(str, numbers))}; all ranks were stopped. "
            "Where each of them was is printed above.",
            numbers,
        )
    return [results[rank] for rank in range(len(processes))]


def _answer(connection: Any, rank: _Rank) -> tuple[str, Any]:
    try:
        return receive(connection)
    except (EOFError, OSError):
        lost = StageError(f"Rank {rank.number} {rank.process.ended()} before it finished.")
        return "died", (lost, "")


def _heard_again(rank: _Rank) -> None:
    now = time.monotonic()
    if rank.noticed:
        _say(f"Rank {rank.number} is heard again, after {now - rank.heard:.0f} s.")
    rank.heard, rank.noticed = now, ""


def _watch(ranks: Sequence[_Rank], patience_seconds: float | None) -> list[Failure]:
    """Say who has not been heard for a while; those who are lost by now."""
    lost = []
    for rank in ranks:
        silent = time.monotonic() - rank.heard
        if silent > NOTICE_SECONDS and rank.noticed != "stopped":
            words = f"{rank} has not been heard for {silent:.0f} s"
            if rank.process.stopped():  # perhaps only since it was noticed
                rank.noticed = "stopped"
                _say(f"{words}: it is stopped (SIGSTOP). `kill -CONT {rank.process.pid}` lets it go on.")
            elif not rank.noticed:
                rank.noticed = "silent"
                _say(f"{words}.")
        # The ranks that wait for it give up first, and say what they waited for.
        if patience_seconds is not None and silent > patience_seconds + GRACE_SECONDS:
            how = "is stopped" if rank.process.stopped() else "does not run"
            text = f"{rank} gave no sign of life for {silent:.0f} s: it {how}. It was ended."
            lost.append(Failure("died", StageError(text), "", rank.number))
    return lost


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _end(ranks: Sequence[_Rank], failures: list[Failure]) -> None:
    """Those that have not answered by the deadline."""
    for rank in sorted(ranks, key=lambda rank: rank.number):
        if rank.process.stopped():
            failures.append(
                Failure("died", StageError(f"{rank} is stopped (SIGSTOP) and was ended."), "", rank.number)
            )
        elif not failures:
            _say(f"Rank {rank.number} gave no answer. It is here:")
            rank.process.signal(STACKS)
            time.sleep(PRINTING_SECONDS)
    for rank in ranks:
        rank.process.kill()


def first_cause(failures: list[Failure]) -> Exception:
    """A user's mistake explains more than a death, and a death more than a neighbour that missed its peer."""
    order = ("mistake", "died", "crash")
    own = [f for f in failures if f.kind != "mistake" or _is_mistake(f)] or failures
    # The earliest of the best kind; a lost connection is what the others see of somebody's own trouble.
    first = min(own, key=lambda failure: (order.index(failure.kind), _is_lost_connection(failure.error)))
    if _is_mistake(first):
        return first.error
    if first.traceback:
        print(first.traceback, file=sys.stderr)
    # What a neighbour saw (stage, group, microbatch) belongs beside how the lost rank ended.
    seen = [
        f.error
        for f in failures
        if f is not first and isinstance(f.error, StageError) and f.kind == "mistake"
    ]
    gone = sorted({f.rank for f in failures if f.kind == "died"} or {first.rank})
    return LostRankError("\n".join(str(error) for error in [first.error, *seen[:1]]), gone)


def _is_mistake(failure: Failure) -> bool:
    """Of the user's, or of the run itself: not what a rank saw of another."""
    own = not isinstance(failure.error, StageError) or isinstance(failure.error, HealthError)
    return failure.kind == "mistake" and own


def _is_lost_connection(error: Exception) -> bool:
    return any(words in str(error).lower() for words in LOST_CONNECTION)


def send(connection: Connection, message: Any) -> None:
    """Plain pickle: torch teaches `Connection.send` to share memory instead, which outlives no process."""
    connection.send_bytes(pickle.dumps(message))


def receive(connection: Connection) -> Any:
    return read(connection.recv_bytes())


def read(message: bytes) -> Any:
    return pickle.loads(message)
