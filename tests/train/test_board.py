"""The notice board of a run: how long a rank waits for another."""

import gc
import threading
import time

import pytest
import torch.distributed as dist

from slipstream.errors import StageError
from slipstream.train.board import Board, beating


def test_a_rank_that_is_seen_to_work_is_waited_for():
    """Verifying a large checkpoint took longer than the timeout, and the others gave up."""
    store = dist.HashStore()
    leader, other = (Board(store, timeout_seconds=0.5) for _ in range(2))

    def plan():
        with beating(leader, "planning", every_seconds=0.05):
            time.sleep(1.5)
        leader.post("plan", {"step": 3})

    thread = threading.Thread(target=plan, daemon=True)
    thread.start()
    assert other.wait("plan", beat="planning") == [{"step": 3}]
    thread.join()


def test_a_rank_that_is_silent_is_not():
    board = Board(dist.HashStore(), timeout_seconds=0.2)
    with pytest.raises(StageError, match="No rank posted plan within"):
        board.wait("plan", beat="planning")


def test_its_thread_goes_with_it():
    """A process that runs many jobs kept one thread for each."""
    before = threading.enumerate()
    board = Board(dist.HashStore(), timeout_seconds=60.0)
    board.post("key", 1)
    assert board.under("name").read("key") is None
    (thread,) = (
        each for each in threading.enumerate() if each.name == "slipstream-board" and each not in before
    )
    del board
    gc.collect()
    thread.join(120)
    assert not thread.is_alive()


class Stopped:
    """A store whose rank is stopped: nothing is ever answered."""

    def __init__(self):
        self.go_on = threading.Event()

    def check(self, keys):
        self.go_on.wait()
        return False

    def set(self, key, value):
        self.go_on.wait()

    def delete_key(self, key):
        self.go_on.wait()


@pytest.mark.parametrize("question", ["read", "post", "remove"])
def test_a_store_that_does_not_answer_is_given_up(question):
    """Rank 0 keeps the store: where it was stopped, the others asked it for ever."""
    board = Board(dist.HashStore(), timeout_seconds=0.3)
    board.post("own", 1)
    board._store = stopped = Stopped()
    with pytest.raises(StageError, match=r"Rank 0, which keeps .* gave no answer within 0\.3 s"):
        {
            "read": lambda: board.read("loss"),
            "post": lambda: board.post("x", 1),
            "remove": lambda: board.remove("own"),
        }[question]()
    stopped.go_on.set()
