"""A tied weight's gradient where devices wait, with a device and a communicator that are played.

That it works on a GPU is for `tests/nccl` to show; that no circle closes, for `test_waits.py`.
"""

import socket
import threading
import time

import pytest
import torch
from tests.pipeline.test_in_stream import Work, played  # noqa: F401

from slipstream.distributed.wires import Wire
from slipstream.pipeline import ties
from slipstream.pipeline.attendant import Attendant
from slipstream.pipeline.host_sum import PeerLost
from slipstream.pipeline.ties import TieGroup

CPU = torch.device("cpu")


class Communicator:
    """Of two ranks: the sum is there when both have queued their part."""

    def __init__(self):
        self.queued, self._lock = ([], []), threading.Lock()

    def queue(self, rank, tensor):
        work = Work()
        with self._lock:
            self.queued[rank].append((tensor, work))
            if len(self.queued[rank]) <= len(self.queued[1 - rank]):
                (one, first), (other, second) = (parts[len(self.queued[rank]) - 1] for parts in self.queued)
                total = one + other
                one.copy_(total)
                other.copy_(total)
                first.set()
                second.set()
        return work


class Rank:
    """What a TieGroup takes for its groups: the communicator's end, connected by a wire to the other's."""

    in_stream = True
    ranks = (0, 1)

    def __init__(self, rank, communicator, end):
        self.rank, self.communicator, self.end = rank, communicator, end
        self.scope = self

    def under(self, name):
        return self

    def device(self, name, ranks, blocks=None):
        return self

    def all_reduce(self, tensor):
        return self.communicator.queue(self.rank, tensor)


@pytest.fixture
def unattended(played, monkeypatch):  # noqa: F811
    communicator, sockets = Communicator(), socket.socketpair()
    monkeypatch.setattr(ties.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(
        ties.wires,
        "connect",
        lambda scope, rank, others, seconds: {1 - scope.rank: Wire(scope.end, 1 - scope.rank, seconds)},
    )
    first, later = (TieGroup("embedding", (0, 1), Rank(i, communicator, sockets[i]), 5.0) for i in range(2))
    yield first, later, communicator
    first.close()
    later.close()


@pytest.fixture
def pair(unattended):
    first, later, communicator = unattended
    attendant = Attendant([], CPU)
    attendant.start()
    first.attend(attendant)  # which has nothing to do: this one begins
    later.attend(attendant)
    yield first, later, communicator
    attendant.close()


def soon(true, seconds=20.0):
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_the_later_stages_part_is_queued_for_it_once_the_first_ones_is(pair):
    first, later, communicator = pair
    for number in range(20):
        one, other = torch.full((3,), 1.0), torch.full((3,), float(number))
        theirs = later.all_reduce(other)
        joined = next(theirs)  # its host does not come back to it for a while
        time.sleep(0.002)
        assert len(communicator.queued[1]) == number, "queued before the first one's"
        ours = first.all_reduce(one)
        next(ours).wait()
        soon(joined.is_completed)
        next(theirs).wait()
        assert one.tolist() == other.tolist() == [number + 1.0] * 3


def test_parts_that_the_first_stage_queued_before_the_later_ones_asked(pair):
    first, later, communicator = pair
    tensors = [torch.ones(3) for _ in range(6)]
    ours = [next(first.all_reduce(tensor)) for tensor in tensors[:3]]
    time.sleep(0.01)
    assert not communicator.queued[1]
    for tensor in tensors[3:]:
        theirs = later.all_reduce(tensor)
        soon(next(theirs).is_completed)
        next(theirs).wait()
    for work in ours:
        work.wait()
    assert all(tensor.tolist() == [2.0] * 3 for tensor in tensors)


def test_a_first_stage_that_is_gone_is_named(pair):
    first, later, _ = pair
    joined = next(later.all_reduce(torch.ones(3)))
    first.close()
    with pytest.raises(PeerLost, match="rank 0"):
        soon(joined.is_completed)


def test_an_update_after_everything_else_needs_nobody_to_attend(unattended):
    """As a synchronous run has it: a stage has sent all it owes before it joins."""
    first, later, communicator = unattended
    one, other = torch.full((3,), 1.0), torch.full((3,), 2.0)
    theirs = next(later.all_reduce(other))
    assert len(communicator.queued[1]) == 1
    next(first.all_reduce(one)).wait()
    theirs.wait()
    assert one.tolist() == other.tolist() == [3.0] * 3
