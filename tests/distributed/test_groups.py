"""Groups that a process has made: closed in an order that all ranks share."""

import gc
import threading
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from slipstream.distributed.groups import Group, Groups, Scope, close_all


def test_the_last_made_is_closed_first(monkeypatch):
    """In no order of their own two ranks each wait for the other at a different group of NCCL."""
    monkeypatch.setattr(Groups, "open", type(Groups.open)())
    closed = []

    class Noted(Groups):
        def close(self, failed=False):
            closed.append(self)
            super().close(failed)

    made = [Noted(Scope(None), torch.device("cpu"), "gloo", 1.0) for _ in range(20)]
    close_all(failed=False)
    assert closed == made[::-1]
    assert not Groups.open


def test_a_failed_group_with_a_sum_under_way_holds_nobody_up(monkeypatch):
    """The other rank never joins, and is there: gloo would wait for its time limit, inside a collection of garbage."""
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    limit, ends = 40.0, []
    store = dist.HashStore()

    def join(rank):
        ends.append((rank, dist.ProcessGroupGloo(store, rank, 2, timeout=timedelta(seconds=limit))))

    threads = [threading.Thread(target=join, args=(rank,), daemon=True) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ends.sort(key=lambda end: end[0])
    group = Group(ends.pop(0)[1], [0, 1], "gloo")
    begun = group.all_reduce(torch.ones(4))
    start = time.monotonic()
    group.close(failed=True)
    del group
    gc.collect()
    assert time.monotonic() - start < limit / 2
    assert not begun.is_completed()
