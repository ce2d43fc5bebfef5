"""Small vectors between all ranks of one machine, each told once per update, without a thread of their own.

Gloo's all-reduce of the norm wakes three threads in every process: on a small CPU stage that is one to three
percent of an update. Here every pair of ranks shares a packet socket. Telling is one packet to each of the others
and never blocks; hearing is reading what has come. All ranks add up the same vectors in the order of their ranks,
so all get the same bits. Ranks on several machines, or too many of them, keep gloo.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from slipstream.distributed.ring import socket_folder
from slipstream.errors import StageError

MOST_RANKS = 32
MOST_BYTES = 1 << 15  # a vector; a packet must fit a socket's buffer, which holds those of several updates


class PeerLost(StageError):
    """An exchange of an update failed because some rank is gone or silent."""


class Board:
    """One rank's end. The n-th `tell` of every rank belongs together."""

    def __init__(self, rank: int, sockets: dict[int, socket.socket], timeout_seconds: float) -> None:
        self._rank = rank
        self._sockets = sockets  # by the other end's global rank
        self._timeout_seconds = timeout_seconds
        for wire in sockets.values():
            wire.settimeout(timeout_seconds)
        self._told = 0
        self._heard: dict[int, list[bytes]] = {peer: [] for peer in sockets}
        self._read = dict.fromkeys(sockets, 0)  # packets of earlier rounds, read and done with

    def all_reduce(self, vector: Tensor) -> Round:
        """Tell `vector` (float64); it holds the sum over all ranks when the returned round is complete."""
        packet = vector.numpy().tobytes()
        for wire in self._sockets.values():
            with contextlib.suppress(ConnectionError):  # a rank that is gone is noticed when it is waited for
                wire.send(packet)
        self._told += 1
        return Round(self, self._told, vector)

    def hear(self, number: int, wait: bool) -> bool:
        """Read what has come; whether round `number` has been told by all. With `wait`, until it has."""
        for peer, wire in self._sockets.items():
            while self._read[peer] + len(self._heard[peer]) < number:
                if not wait and not _readable(wire):
                    return False
                self._receive(peer, wire)
        return True

    def _receive(self, peer: int, wire: socket.socket) -> None:
        try:
            packet = wire.recv(MOST_BYTES)
        except TimeoutError:
            seconds = self._timeout_seconds
            raise PeerLost(f"rank {peer} told nothing within the timeout of {seconds:g} s") from None
        except ConnectionResetError:  # it left with something of ours unread
            packet = b""
        except OSError as error:
            raise PeerLost(f"the connection to rank {peer} broke ({error})") from error
        if not packet:
            raise PeerLost(f"rank {peer} closed its connection")
        self._heard[peer].append(packet)

    def collect(self, own: Tensor) -> None:
        """Add up the oldest round, in the order of ranks, into `own`."""
        packets = {peer: heard.pop(0) for peer, heard in self._heard.items()}
        vectors = {peer: torch.frombuffer(bytearray(p), dtype=torch.float64) for peer, p in packets.items()}
        for peer in self._read:
            self._read[peer] += 1
        vectors[self._rank] = own.clone()
        own.zero_()
        for peer in sorted(vectors):
            own += vectors[peer]


class Round:
    """A vector under way. Rounds are collected in the order in which they were told."""

    def __init__(self, board: Board, number: int, vector: Tensor) -> None:
        self._board, self._number, self._vector = board, number, vector
        self._collected = False

    def is_completed(self) -> bool:
        return self._collected or self._board.hear(self._number, wait=False)

    def wait(self) -> None:
        if not self._collected:
            self._board.hear(self._number, wait=True)
            self._board.collect(self._vector)
            self._collected = True


def meet(group: dist.ProcessGroup, size: int, timeout_seconds: float) -> Board | None:
    """A board of all ranks of a (gloo) group for vectors of `size` numbers, or None, on all of them, if one is away."""
    ranks = dist.get_process_group_ranks(group)
    own = dist.get_rank()
    if len(ranks) > MOST_RANKS or size * 8 > MOST_BYTES or not hasattr(socket, "SOCK_SEQPACKET"):
        return None
    sockets: dict[int, socket.socket] = {}
    with socket_folder() as folder, _packet_socket() as listener:
        path = os.path.join(folder, "board")
        listener.bind(path)
        listener.listen(len(ranks))
        paths: list = [None] * len(ranks)
        dist.all_gather_object(paths, path, group=group)
        reached = True
        for rank, place in zip(ranks, paths, strict=True):
            if rank < own:
                wire = _packet_socket()
                try:
                    wire.connect(place)
                except OSError:  # another machine, container or namespace
                    reached = False
                    break
                wire.send(own.to_bytes(4, "big"))
                sockets[rank] = wire
        if not _all_agree(reached, group, timeout_seconds):
            return None
        listener.settimeout(timeout_seconds)
        for _ in range(sum(rank > own for rank in ranks)):
            wire, _ = listener.accept()
            sockets[int.from_bytes(wire.recv(4), "big")] = wire
    return Board(own, dict(sorted(sockets.items())), timeout_seconds)


def _packet_socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def _readable(wire: socket.socket) -> bool:
    return bool(select.select([wire], [], [], 0)[0])


def _all_agree(yes: bool, group: dist.ProcessGroup, timeout_seconds: float) -> bool:
    """A collective, so that nobody leaves before all have tried."""
    vote = torch.tensor([int(yes)])
    work = dist.all_reduce(vote, dist.ReduceOp.MIN, group=group, async_op=True)
    assert work is not None
    work.wait(timedelta(seconds=timeout_seconds))
    return bool(vote.item())
