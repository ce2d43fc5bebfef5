"""Groups that a process has made: closed in an order that all ranks share."""

import torch

from slipstream.distributed.groups import Groups, Scope, close_all


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
