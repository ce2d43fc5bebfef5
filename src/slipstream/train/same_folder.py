"""Do all ranks see one run.dir? On several machines without a shared file system no checkpoint would ever be whole.

The leader puts a file there under a name that nobody knows, and the others look for it.
"""

from __future__ import annotations

import socket
import time
from pathlib import Path

from slipstream.errors import UserError
from slipstream.train.board import Board
from slipstream.train.reporter import Position

PATIENCE_SECONDS = 20.0  # a network disk may show a new file late
LOOK_SECONDS = 0.05


def require_one(board: Board, position: Position, folder: Path, word: str, timeout_seconds: float) -> None:
    """Every rank raises the same error where one of them sees another folder than the leader's."""
    blind, host = blind_ranks(board, position, folder, word, timeout_seconds)
    if blind:
        more = f" and {len(blind) - 4} more" if len(blind) > 4 else ""
        raise UserError(
            f"run.dir '{folder}' is not one folder for all ranks: {', '.join(blind[:4])}{more} cannot see what rank 0 "
            f"on {host} writes there. Set run.dir to a folder on a file system that all machines share, "
            "checkpoint.remote to a place that all of them reach (s3://..., file:///...), or checkpoint.keep=0 for a "
            "run that saves nothing."
        )


def blind_ranks(
    board: Board, position: Position, folder: Path, word: str, timeout_seconds: float
) -> tuple[list[str], str]:
    """Who sees another folder than the leader's; and the leader's host. All ranks get the same answer."""
    # The others wait for the answer, and not for longer.
    patience = min(PATIENCE_SECONDS, timeout_seconds / 2)
    ranks = range(position.ranks)
    mark = folder / f".seen-by-all-{word}"
    if position.leader:
        mark.touch()
    try:
        board.post(
            f"folder/{position.rank}", {"sees": _appears(mark, patience), "host": socket.gethostname()}
        )
        found = board.wait(*(f"folder/{rank}" for rank in ranks))
    finally:
        if position.leader:
            mark.unlink(missing_ok=True)
    blind = [f"rank {rank} on {found[rank]['host']}" for rank in ranks if not found[rank]["sees"]]
    return blind, found[0]["host"]


def _appears(mark: Path, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not mark.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(LOOK_SECONDS)
    return True
