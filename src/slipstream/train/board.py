"""A notice board for the ranks of a run: small values posted under a key, read when they are there.

Stages of an asynchronous pipeline are never at the same place, so nothing here is a collective: the last
stage posts the loss of a step, anyone reads it when it gets round to it, and no rank waits inside the
training loop. Built on the key-value store the process group already has; one process alone keeps a dict.
"""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Protocol

import torch.distributed as dist

from slipstream.distributed.lost import is_lost_peer, words
from slipstream.errors import StageError

LOOK_SECONDS = 1.0
BEAT_SECONDS = 2.0
KEPT_STEPS = 256  # a posted value is removed this many posts later: every rank has read it by then


class Board(Protocol):
    def post(self, key: str, value: Any) -> None: ...

    def read(self, *keys: str) -> list[Any] | None:
        """The values, or None while one of them is missing."""
        ...

    def wait(self, *keys: str, beat: str | None = None) -> list[Any]:
        """The values, waiting for them: as long as a `beating` of `beat` goes on, then for the timeout."""
        ...

    def remove(self, key: str) -> None: ...

    def under(self, name: str) -> Board:
        """A board of its own: what was posted elsewhere is not on it."""
        ...


@contextmanager
def beating(board: Board, key: str, every_seconds: float = BEAT_SECONDS) -> Iterator[None]:
    """Inside, something may take long: others who wait with `beat=key` see that it is still being done."""
    done = threading.Event()

    def beat() -> None:
        count = 0
        with suppress(StageError):  # whoever waits inside meets the same trouble, and tells of it
            while not done.is_set():
                count += 1
                board.post(key, count)
                done.wait(every_seconds)

    thread = threading.Thread(target=beat, name=f"beating-{key}", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


class LocalBoard:
    """The board of a process that is alone."""

    def __init__(self) -> None:
        self._values: dict[str, Any] = {}

    def post(self, key: str, value: Any) -> None:
        self._values[key] = value

    def read(self, *keys: str) -> list[Any] | None:
        return [self._values[key] for key in keys] if all(key in self._values for key in keys) else None

    def wait(self, *keys: str, beat: str | None = None) -> list[Any]:
        found = self.read(*keys)
        assert found is not None, f"{keys} were never posted"
        return found

    def remove(self, key: str) -> None:
        self._values.pop(key, None)

    def under(self, name: str) -> LocalBoard:
        return LocalBoard()


class Asking:
    """Questions to the store, asked from a thread: rank 0 keeps the store, and where that rank is stopped or out of
    reach a question has no end. Whoever asks then gives up after the timeout, with a word about it."""

    def __init__(self, timeout_seconds: float) -> None:
        self._timeout_seconds = timeout_seconds
        self._questions: queue.SimpleQueue[tuple[Callable[..., Any], tuple, queue.SimpleQueue]] = (
            queue.SimpleQueue()
        )
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._lost = False

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        with self._lock:  # the checkpoint thread asks too
            if self._thread is None:
                self._thread = threading.Thread(target=self._answer, name="slipstream-board", daemon=True)
                self._thread.start()
        answer: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
        self._questions.put((function, args, answer))
        found, error = self._wait(answer)
        if error is not None:
            if is_lost_peer(error):
                raise StageError(
                    f"Rank 0, which keeps what the ranks tell each other, is lost: {words(error)}."
                ) from error
            raise error
        return found

    def _wait(self, answer: queue.SimpleQueue) -> tuple[Any, BaseException | None]:
        """In short waits: a long one would be over at once in a process that was stopped meanwhile itself."""
        left = 0.1 if self._lost else self._timeout_seconds
        while left > 0:
            with suppress(queue.Empty):
                return answer.get(timeout=min(left, LOOK_SECONDS))
            left -= LOOK_SECONDS
        self._lost = True
        raise StageError(
            "Rank 0, which keeps what the ranks tell each other, gave no answer within "
            f"{self._timeout_seconds:g} s. Is it stopped, or its machine out of reach?"
        )

    def _answer(self) -> None:
        while True:
            function, args, answer = self._questions.get()
            try:
                answer.put((function(*args), None))
            except BaseException as error:  # told to whoever asked
                answer.put((None, error))


class SharedBoard:
    """The board of several ranks, on their store. Values travel as JSON; a rank's own it knows without asking."""

    def __init__(self, store: dist.Store, timeout_seconds: float, asking: Asking | None = None) -> None:
        self._plain = dist.PrefixStore("board", store)
        self._timeout = timeout_seconds
        self._asking = asking or Asking(timeout_seconds)
        self._own: dict[str, str] = {}

    def post(self, key: str, value: Any) -> None:
        self._own[key] = json.dumps(value)
        self._asking.call(self._plain.set, key, self._own[key])

    def read(self, *keys: str) -> list[Any] | None:
        others = [key for key in keys if key not in self._own]
        if not others:
            return [json.loads(self._own[key]) for key in keys]
        found = self._asking.call(self._look, others)
        if found is None:
            return None
        return [json.loads(self._own[key] if key in self._own else found[key]) for key in keys]

    def _look(self, keys: list[str]) -> dict[str, bytes] | None:
        return {key: self._plain.get(key) for key in keys} if self._plain.check(keys) else None

    def wait(self, *keys: str, beat: str | None = None) -> list[Any]:
        # Polled, not `store.wait`: a blocking call would hold the connection that the checkpoint thread
        # and the engine also use.
        deadline = time.monotonic() + self._timeout
        pause, heard = 0.0005, None
        while (found := self.read(*keys)) is None:
            if beat is not None and (now := self.read(beat)) != heard:
                heard, deadline = now, time.monotonic() + self._timeout
            if time.monotonic() > deadline:
                raise StageError(f"No rank posted {', '.join(keys)} within {self._timeout:g} s.")
            time.sleep(pause)
            pause = min(0.05, pause * 1.5)
        return found

    def remove(self, key: str) -> None:
        if self._own.pop(key, None) is not None:
            self._asking.call(self._plain.delete_key, key)

    def under(self, name: str) -> SharedBoard:
        return SharedBoard(dist.PrefixStore(name, self._plain), self._timeout, self._asking)
