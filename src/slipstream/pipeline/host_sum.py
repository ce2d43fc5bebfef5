"""Small vectors between all ranks, each told once per update, host to host and without a thread of their own.

Gloo's all-reduce of the norm wakes three threads in every process: on a small CPU stage that is one to three percent
of an update. Here every pair of ranks shares a wire. Telling is one message to each of the others and never blocks;
hearing is reading what has come. All ranks add up the same vectors in the order of their ranks, so all get the same
bits. Very many ranks, or very long vectors, keep gloo.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping

import torch
from torch import Tensor

from slipstream.distributed.wires import Wire, wait_readable
from slipstream.errors import StageError

MOST_RANKS = 32
MOST_BYTES = 1 << 15  # of a vector: those of several updates must fit the buffer of a socket


class PeerLost(StageError):
    """An exchange of an update failed because some rank is gone or silent."""


def suits(ranks: int, numbers: int) -> bool:
    """Whether this is the way for vectors of so many numbers between so many ranks."""
    return ranks <= MOST_RANKS and numbers * 8 <= MOST_BYTES


class HostSum:
    """One rank's end. The n-th vector that every rank tells belongs together."""

    def __init__(self, rank: int, wires: Mapping[int, Wire], timeout_seconds: float) -> None:
        self._rank = rank
        self._wires = dict(wires)  # by the other end's global rank
        self._timeout_seconds = timeout_seconds
        self._told = 0
        self._collected = 0
        self._heard: dict[int, deque[bytes]] = {peer: deque() for peer in wires}

    def all_reduce(self, vector: Tensor) -> Round:
        """Tell `vector` (float64); it holds the sum over all ranks when the returned round is complete."""
        packet = vector.numpy().tobytes()
        for wire in self._wires.values():
            wire.send(packet)
        self._told += 1
        return Round(self, self._told, vector)

    def hear(self, number: int, wait: bool) -> bool:
        """Read what has come; whether round `number` has been told by all. With `wait`, until it has."""
        deadline = time.monotonic() + self._timeout_seconds
        for peer, wire in self._wires.items():
            heard = self._heard[peer]
            while self._collected + len(heard) < number:
                if (packet := wire.receive()) is not None:
                    heard.append(packet)
                elif wire.gone:
                    raise PeerLost(f"rank {peer} {wire.loss}")
                elif not wait:
                    return False
                elif (left := deadline - time.monotonic()) <= 0:
                    raise PeerLost(
                        f"rank {peer} told nothing within the timeout of {self._timeout_seconds:g} s"
                    )
                else:
                    wait_readable([wire], left)
        return True

    def collect(self, own: Tensor) -> None:
        """Add up the oldest round, in the order of ranks, into `own`."""
        vectors = {
            peer: torch.frombuffer(bytearray(heard.popleft()), dtype=torch.float64)
            for peer, heard in self._heard.items()
        }
        self._collected += 1
        vectors[self._rank] = own.clone()
        own.zero_()
        for peer in sorted(vectors):
            own += vectors[peer]

    def close(self) -> None:
        for wire in self._wires.values():
            wire.close()


class Round:
    """A vector under way. Rounds are collected in the order in which they were told."""

    def __init__(self, host_sum: HostSum, number: int, vector: Tensor) -> None:
        self._host_sum, self._number, self._vector = host_sum, number, vector
        self._collected = False

    def is_completed(self) -> bool:
        return self._collected or self._host_sum.hear(self._number, wait=False)

    def wait(self) -> None:
        if not self._collected:
            self._host_sum.hear(self._number, wait=True)
            self._host_sum.collect(self._vector)
            self._collected = True
