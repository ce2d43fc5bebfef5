"""A peer that is lost, in our own words: gloo, NCCL and torch's store tell of it in those of their source files."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from slipstream.errors import StageError

# What a library says -> what that means; the first that fits.
_MEANINGS = {
    "timed out": "no answer within the timeout",
    "timeout": "no answer within the timeout",
    "reset by peer": "the connection was reset",
    "refused": "the connection was refused",
    "unreachable": "the network is unreachable",
    "no route": "the network is unreachable",
    "closed": "the connection was closed",
    "not connected": "the connection was closed",
    "broken pipe": "the connection was closed",
    "failed to recv, got 0 bytes": "the connection was closed",
}
# How the libraries' own errors are known, beside the class that torch has for them.
_SPOKEN_BY = ("gloo", "nccl", "tcpstore", "c10d", "rendezvous", "connection reset", "connection closed")


def words(error: BaseException) -> str:
    """What happened to the connection that `error` tells of."""
    said = str(error).lower()
    if isinstance(error, TimeoutError):
        return "no answer within the timeout"
    if meant := next((meaning for part, meaning in _MEANINGS.items() if part in said), None):
        return meant
    return "the connection failed" if _is_a_librarys(said) else str(error)


def _is_a_librarys(said: str) -> bool:
    return any(name in said for name in _SPOKEN_BY)


def is_lost_peer(error: BaseException) -> bool:
    """Whether a library of torch's tells that another rank is gone or silent."""
    if any(kind.__name__ == "DistError" for kind in type(error).__mro__):
        return True
    return isinstance(error, RuntimeError) and _is_a_librarys(str(error).lower())


def others(ranks: Sequence[int], own: int) -> str:
    """Who may have been meant: the other ranks of a group."""
    rest = [str(rank) for rank in ranks if rank != own]
    return f"rank {rest[0]}" if len(rest) == 1 else f"one of the ranks {', '.join(rest)}"


@contextlib.contextmanager
def own_words(rank: int, size: int, timeout_seconds: float) -> Iterator[None]:
    """Inside, what torch's libraries say of a lost peer becomes a `StageError` that says it for this rank."""
    try:
        yield
    except StageError:
        raise
    except Exception as error:
        if size == 1 or not is_lost_peer(error):
            raise
        said = words(error)
        limit = "" if said == str(error) else f" ({timeout_seconds:g} s)"  # our own words have their own
        raise StageError(f"Rank {rank} lost {others(range(size), rank)}: {said}{limit}.") from error
