"""A notice board for the ranks of a run: small values posted under a key, read when they are there.

Stages of an asynchronous pipeline are never at the same place, so nothing here is a collective. Built on the key-value
store the process group already has; one process alone keeps a dict.
"""

from __future__ import annotations

import json
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import Any, TypeAlias

import torch.distributed as dist

from slipstream.distributed.lost import is_lost_peer, words
from slipstream.errors import StageError

LOOK_SECONDS = 1.0
BEAT_SECONDS = 2.0
KEPT_STEPS = 256  # a posted value is removed this many posts later: every rank has read it by then


_Questions: TypeAlias = "queue.SimpleQueue[tuple[Future, Callable[..., Any], tuple] | None]"


class Asking:
    """Questions to the store, asked from a thread: rank 0 keeps the store, and where that rank is stopped or out of
    reach a question has no end. Whoever asks then gives up after the timeout, with a word about it."""

    def __init__(self, timeout_seconds: float) -> None:
        self._timeout_seconds, self._lost = timeout_seconds, False
        self._questions: _Questions = queue.SimpleQueue()
        threading.Thread(
            target=_answer, args=(self._questions,), name="slipstream-board", daemon=True
        ).start()
        weakref.finalize(self, self._questions.put, None)  # the thread goes with the last board that asks

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        answer: Future[Any] = Future()
        self._questions.put((answer, function, args))
        error = self._error(answer)
        if error is not None and is_lost_peer(error):
            raise StageError(
                f"Rank 0, which keeps what the ranks tell each other, is lost: {words(error)}."
            ) from error
        return answer.result()

    def _error(self, answer: Future[Any]) -> BaseException | None:
        """In short waits: a long one would be over at once in a process that was stopped meanwhile itself."""
        left = 0.1 if self._lost else self._timeout_seconds
        while left > 0:
            with suppress(TimeoutError):
                return answer.exception(timeout=min(left, LOOK_SECONDS))
            left -= LOOK_SECONDS
        self._lost = True
        raise StageError(
            "Rank 0, which keeps what the ranks tell each other, gave no answer within "
            f"{self._timeout_seconds:g} s. Is it stopped, or its machine out of reach?"
        )


def _answer(questions: _Questions) -> None:
    while (question := questions.get()) is not None:
        answer, function, args = question
        try:
            answer.set_result(function(*args))
        except BaseException as error:  # told to whoever asked
            answer.set_exception(error)
        del question, answer, function, args  # they may hold what asks


class Board:
    """Values travel as JSON. A rank's own it knows without asking, so that one process alone needs no store."""

    def __init__(
        self, store: dist.Store | None = None, timeout_seconds: float = 0.0, asking: Asking | None = None
    ) -> None:
        self._store = None if store is None else dist.PrefixStore("board", store)
        self._timeout = timeout_seconds
        self._asking = Asking(timeout_seconds) if asking is None and store is not None else asking
        self._own: dict[str, str] = {}

    def post(self, key: str, value: Any) -> None:
        self._own[key] = text = json.dumps(value)
        self._ask(lambda store: store.set(key, text))

    def read(self, *keys: str) -> list[Any] | None:
        """The values, or None while one of them is missing."""
        others = [key for key in keys if key not in self._own]
        found = {}
        if others:
            found = self._ask(
                lambda store: {k: store.get(k) for k in others} if store.check(others) else None
            )
        if found is None:
            return None
        return [json.loads(self._own[key] if key in self._own else found[key]) for key in keys]

    def wait(self, *keys: str, beat: str | None = None) -> list[Any]:
        """The values, waiting for them: as long as a `beating` of `beat` goes on, then for the timeout."""
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

    def heard(self, keys: Iterable[str], seconds: float) -> dict[str, Any]:
        """The values of those keys that are posted by then, without an error for the others."""
        missing, found = set(keys), {}
        deadline = time.monotonic() + min(seconds, self._timeout)
        while missing:
            for key in sorted(missing):
                if (value := self.read(key)) is not None:
                    found[key] = value[0]
            missing -= found.keys()
            if time.monotonic() > deadline:
                break
            time.sleep(0.05 if missing else 0.0)
        return found

    def remove(self, key: str) -> None:
        if self._own.pop(key, None) is not None:
            self._ask(lambda store: store.delete_key(key))

    def under(self, name: str) -> Board:
        """A board of its own: what was posted elsewhere is not on it."""
        store = None if self._store is None else dist.PrefixStore(name, self._store)
        return Board(store, self._timeout, self._asking)

    def _ask(self, question: Callable[[dist.Store], Any]) -> Any:
        return None if self._asking is None else self._asking.call(question, self._store)


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
