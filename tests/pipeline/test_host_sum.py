"""Sums over wires: the same on every rank, in order, and a rank that is gone is named."""

import socket

import pytest
import torch

from slipstream.distributed.wires import Wire
from slipstream.errors import StageError
from slipstream.pipeline.host_sum import HostSum, PeerLost, suits
from slipstream.pipeline.neighbours import Neighbour, Waiting


@pytest.mark.parametrize("ranks", [2, 4])
def test_every_rank_hears_the_same_exact_sum_of_every_round(pool, ranks):
    results = pool.run("pipeline.host_sum_jobs:two_rounds_at_a_time", ranks=ranks)
    assert all(result == results[0] for result in results)
    for number, total in enumerate(results[0]):
        assert total == [rank + 10.0 * number for rank in range(ranks)]


def test_a_round_is_not_complete_before_the_last_rank_has_told(pool):
    early, _ = pool.run("pipeline.host_sum_jobs:one_is_late", ranks=2)
    assert early == (False, 3.0)


def test_a_rank_that_left_is_named(pool):
    stayed, _ = pool.run("pipeline.host_sum_jobs:one_leaves", ranks=2)
    assert stayed == "rank 1 closed its connection"


def test_a_rank_that_is_silent_is_named(pool):
    waited, _ = pool.run("pipeline.host_sum_jobs:one_is_silent", ranks=2)
    assert waited == "rank 1 told nothing within the timeout of 0.5 s"


def test_a_rank_that_reads_nothing_has_not_closed_its_connection():
    """It is stalled, and may go on: whoever looks for a rank that died would look in vain."""
    ours, theirs = socket.socketpair()
    wire = Wire(ours, 1, timeout_seconds=0.05)
    with theirs:
        full = HostSum(0, {1: wire}, 0.05).all_reduce(torch.zeros(1 << 20, dtype=torch.float64))
        with pytest.raises(PeerLost, match=r"rank 1 has not read for 0\.05 s what it was sent"):
            full.wait()
        neighbour = Neighbour(1, wire, timeout_seconds=60.0)
        with pytest.raises(StageError, match="Is that stage stalled or slow"):
            Waiting([neighbour]).until(lambda: False, neighbour, "waited for")


def test_very_long_vectors_and_very_many_ranks_keep_gloo():
    assert suits(32, 4096)
    assert not suits(33, 1)
    assert not suits(2, 4097)


def test_ranks_of_two_machines_meet_over_the_network(pool):
    results = pool.run("pipeline.host_sum_jobs:two_rounds_at_a_time", 2, ranks=4)
    assert results == pool.run("pipeline.host_sum_jobs:two_rounds_at_a_time", ranks=4)


def test_more_open_files_than_select_takes(pool):
    assert len(set(map(str, pool.run("pipeline.host_sum_jobs:many_files", ranks=2)))) == 1


def test_a_stranger_is_shown_out(pool):
    (first, _), (second, shown_out) = pool.run("pipeline.host_sum_jobs:a_stranger", ranks=2)
    assert first == second == b"hello"
    assert shown_out == b""
