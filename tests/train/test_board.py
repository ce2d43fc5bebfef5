"""The notice board of a run: how long a rank waits for another."""

import threading
import time

import pytest
import torch.distributed as dist

from slipstream.errors import StageError
from slipstream.train.board import SharedBoard, beating


def test_a_rank_that_is_seen_to_work_is_waited_for():
    """Verifying a large checkpoint took longer than the timeout, and the others gave up."""
    store = dist.HashStore()
    leader, other = (SharedBoard(store, timeout_seconds=0.5) for _ in range(2))

    def plan():
        with beating(leader, "planning", every_seconds=0.05):
            time.sleep(1.5)
        leader.post("plan", {"step": 3})

    thread = threading.Thread(target=plan)
    thread.start()
    assert other.wait("plan", beat="planning") == [{"step": 3}]
    thread.join()


def test_a_rank_that_is_silent_is_not():
    board = SharedBoard(dist.HashStore(), timeout_seconds=0.2)
    with pytest.raises(StageError, match="No rank posted plan within"):
        board.wait("plan", beat="planning")
