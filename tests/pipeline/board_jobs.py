"""What the ranks do in test_board.py."""

import torch
import torch.distributed as dist

from slipstream.pipeline.board import MOST_BYTES, Board, PeerLost, meet


def _board(size=1, timeout=60.0) -> Board:
    board = meet(dist.group.WORLD, size, timeout)
    assert board is not None
    return board


def two_rounds_at_a_time(world):
    board = _board(world.size)
    pending, heard = [], []
    for number in range(6):
        vector = torch.zeros(world.size, dtype=torch.float64)
        vector[world.rank] = world.rank + 10.0 * number
        pending.append((board.all_reduce(vector), vector))
        if len(pending) == 2:
            round_, vector = pending.pop(0)
            round_.wait()
            heard.append(vector.tolist())
    for round_, vector in pending:
        round_.wait()
        heard.append(vector.tolist())
    dist.barrier()
    return heard


def one_is_late(world):
    board = _board()
    if world.rank == 1:
        dist.barrier()
    vector = torch.full((1,), 1.0 + world.rank, dtype=torch.float64)
    told = board.all_reduce(vector)
    before = told.is_completed()
    if world.rank == 0:
        dist.barrier()
    told.wait()
    assert told.is_completed()
    return before, vector.item()


def one_leaves(world):
    board = _board()
    if world.rank == 1:
        for wire in board._sockets.values():
            wire.close()
        return None
    return _error(board)


def one_is_silent(world):
    board = _board()
    if world.rank == 0:
        board._timeout_seconds = 0.5
        for wire in board._sockets.values():
            wire.settimeout(0.5)
        told = _error(board)
    dist.barrier()  # silent, but there
    return told if world.rank == 0 else None


def _error(board):
    try:
        board.all_reduce(torch.zeros(1, dtype=torch.float64)).wait()
    except PeerLost as error:
        return str(error)
    return None


def too_long(world):
    return meet(dist.group.WORLD, MOST_BYTES // 8 + 1, 60.0) is None
