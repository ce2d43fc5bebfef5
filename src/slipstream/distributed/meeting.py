"""Where ranks meet: the store of a job, a word that tells one attempt from another, and a watch over the store.

The store is one process's (rank 0's, or torchrun's). Where that process is stopped or its machine out of reach, a
question to it has no end, and it may be asked deep inside a library: so a thread asks it all the time, over a
connection of its own, and ends this process when there has been no answer for longer than the timeout.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import queue
import secrets
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from slipstream.distributed import lost
from slipstream.errors import StageError, UserError

ASKING_SECONDS = 1.0
# After the timeout the questions of a run give up by themselves (`train/board.py`), and say more.
GIVING_UP_SECONDS = 15.0
_PAUSE_SECONDS = 0.005
UNANSWERED = 1  # exit code


def torchruns_store(rank: int, timeout_seconds: float) -> dist.Store:
    """The store at MASTER_ADDR:MASTER_PORT. Asked for by a thread: whoever connects to a stranger there waits inside
    torch for ever, where neither a deadline nor a signal is heard."""
    port = os.environ.get("MASTER_PORT")
    place = f"{os.environ.get('MASTER_ADDR')}:{port}"
    answer: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

    def meet() -> None:
        try:
            found = next(dist.rendezvous("env://", timeout=timedelta(seconds=timeout_seconds)))
            answer.put((found[0], None))
        except BaseException as error:  # told to whoever waits
            answer.put((None, error))

    threading.Thread(target=meet, name="slipstream-meeting", daemon=True).start()
    error: BaseException | None = None
    with contextlib.suppress(queue.Empty):
        store, error = answer.get(timeout=timeout_seconds + GIVING_UP_SECONDS)
        if error is None:
            return store
    if error is not None and not lost.is_lost_peer(error):
        raise error
    if error is not None and "EADDRINUSE" in str(error):
        raise UserError(
            f"Port {port} is in use on this machine, and the ranks were to meet there. Give torchrun another "
            "--master-port (or set MASTER_PORT to a free one)."
        ) from error
    why = "no answer" if error is None else lost.words(error)
    raise StageError(
        f"Rank {rank} did not find the store of this job at {place} within {timeout_seconds:g} s: {why}. Did rank 0 "
        "start, and is the port not another program's?"
    ) from error


def agreed_word(store: dist.Store, rank: int, size: int, timeout_seconds: float) -> str:
    """A word of rank 0's that nobody had before, though the store may hold everything of earlier attempts.

    Each rank asks with a word of its own, so it knows an answer to itself; a rank that confirms rank 0's new word has
    understood it. What earlier attempts left is overwritten, or answers nobody.
    """
    deadline = time.monotonic() + timeout_seconds
    if rank > 0:
        own = secrets.token_hex(8)
        store.set(f"meet/ask/{rank}", own)
        while True:
            if store.check([f"meet/answer/{rank}"]):
                asked, _, word = store.get(f"meet/answer/{rank}").decode().partition(" ")
                if asked == own:
                    store.set(f"meet/confirm/{rank}", word)
                    return word
            _pause(deadline, f"Rank {rank} waited for rank 0 to come for {timeout_seconds:g} s in vain.")
    word = secrets.token_hex(8)
    missing = list(range(1, size))
    while missing:
        for other in missing:
            if store.check([f"meet/ask/{other}"]):
                store.set(f"meet/answer/{other}", f"{store.get(f'meet/ask/{other}').decode()} {word}")
        missing = [other for other in missing if not _confirmed(store, other, word)]
        names = ", ".join(map(str, missing))
        _pause(deadline, f"Rank 0 waited for rank {names} to come for {timeout_seconds:g} s in vain.")
    return word


def _confirmed(store: dist.Store, rank: int, word: str) -> bool:
    name = f"meet/confirm/{rank}"
    return store.check([name]) and store.get(name).decode() == word


def _pause(deadline: float, words: str) -> None:
    if time.monotonic() > deadline:
        raise StageError(words)
    time.sleep(_PAUSE_SECONDS)


@contextlib.contextmanager
def watched(store: dist.Store, timeout_seconds: float) -> Iterator[None]:
    """Inside, a store that gives no answer for longer than the timeout ends this process, wherever it waits."""
    over = threading.Event()
    silent = 0  # looks in a row without an answer; a clock would also count the time in which this process was stopped

    def ask() -> None:
        nonlocal silent
        with contextlib.suppress(RuntimeError):  # closed: whoever needs it is told so
            own = store.clone()  # pyrefly: ignore[missing-attribute]  # its stubs lack it
            while not over.wait(ASKING_SECONDS):
                own.check(["slipstream"])
                silent = 0
        over.set()

    def watch() -> None:
        nonlocal silent
        while not over.wait(ASKING_SECONDS):
            silent += 1
            if silent * ASKING_SECONDS > timeout_seconds + GIVING_UP_SECONDS:
                sys.stderr.write(
                    "The store of this job, which rank 0 or torchrun keeps, gave no answer within "
                    f"{timeout_seconds:g} s. Is that process stopped, or its machine out of reach? This rank was "
                    "here:\n"
                )
                sys.stderr.flush()
                faulthandler.dump_traceback()
                os._exit(UNANSWERED)

    for what in (ask, watch):
        threading.Thread(target=what, name=f"slipstream-{what.__name__}", daemon=True).start()
    try:
        yield
    finally:
        over.set()
