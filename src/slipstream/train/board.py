"""A notice board for the ranks of a run: small values posted under a key, read when they are there.

Stages of an asynchronous pipeline are never at the same place, so nothing here is a collective: the last
stage posts the loss of a step, anyone reads it when it gets round to it, and no rank waits inside the
training loop. Built on the key-value store the process group already has; one process alone keeps a dict.
"""

from __future__ import annotations

import json
import time
from typing import Any, Protocol

import torch.distributed as dist

from slipstream.errors import StageError

KEPT_STEPS = 256  # a posted value is removed this many posts later: every rank has read it by then


class Board(Protocol):
    def post(self, key: str, value: Any) -> None: ...

    def read(self, *keys: str) -> list[Any] | None:
        """The values, or None while one of them is missing."""
        ...

    def wait(self, *keys: str) -> list[Any]:
        """The values, waiting for them."""
        ...

    def remove(self, key: str) -> None: ...

    def under(self, name: str) -> Board:
        """A board of its own: what was posted elsewhere is not on it."""
        ...


class LocalBoard:
    """The board of a process that is alone."""

    def __init__(self) -> None:
        self._values: dict[str, Any] = {}

    def post(self, key: str, value: Any) -> None:
        self._values[key] = value

    def read(self, *keys: str) -> list[Any] | None:
        return [self._values[key] for key in keys] if all(key in self._values for key in keys) else None

    def wait(self, *keys: str) -> list[Any]:
        found = self.read(*keys)
        assert found is not None, f"{keys} were never posted"
        return found

    def remove(self, key: str) -> None:
        self._values.pop(key, None)

    def under(self, name: str) -> LocalBoard:
        return LocalBoard()


class SharedBoard:
    """The board of several ranks, on their store. Values travel as JSON; a rank's own it knows without asking."""

    def __init__(self, store: dist.Store, timeout_seconds: float) -> None:
        self._store = dist.PrefixStore("board", store)
        self._timeout = timeout_seconds
        self._own: dict[str, str] = {}

    def post(self, key: str, value: Any) -> None:
        self._own[key] = json.dumps(value)
        self._store.set(key, self._own[key])

    def read(self, *keys: str) -> list[Any] | None:
        others = [key for key in keys if key not in self._own]
        if others and not self._store.check(others):
            return None
        return [json.loads(self._own[key] if key in self._own else self._store.get(key)) for key in keys]

    def wait(self, *keys: str) -> list[Any]:
        # Polled, not `store.wait`: a blocking call would hold the connection that the checkpoint thread
        # and the engine also use.
        deadline = time.monotonic() + self._timeout
        pause = 0.0005
        while (found := self.read(*keys)) is None:
            if time.monotonic() > deadline:
                raise StageError(f"No rank posted {', '.join(keys)} within {self._timeout:g} s.")
            time.sleep(pause)
            pause = min(0.05, pause * 1.5)
        return found

    def remove(self, key: str) -> None:
        if self._own.pop(key, None) is not None:
            self._store.delete_key(key)

    def under(self, name: str) -> SharedBoard:
        return SharedBoard(dist.PrefixStore(name, self._store), self._timeout)
