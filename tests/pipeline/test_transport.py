"""How a message is waited for."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from slipstream.errors import StageError
from slipstream.pipeline import transport
from slipstream.pipeline.transport import Link, wait_all


class Message(dist.Work):
    def __init__(self, arrives=True):
        super().__init__()
        self.arrives, self.waits = arrives, []

    def wait(self, timeout=None):
        self.waits.append(timeout)
        if not self.arrives:
            raise RuntimeError("Connection closed by peer\nmore")
        return True


def link(monkeypatch, backend, device):
    monkeypatch.setattr(transport.dist, "get_backend", lambda group: backend)
    return Link(dist.ProcessGroup(0, 1), 3, 2, torch.device(device), timeout_seconds=5.0)


@pytest.mark.parametrize(
    ("backend", "device", "given"),
    [("gloo", "cpu", timedelta(seconds=5)), ("gloo", "cuda", timedelta(seconds=5)), ("nccl", "cuda", None)],
)
def test_the_host_waits_for_gloo_and_the_stream_for_nccl(monkeypatch, backend, device, given):
    """torch holds the host until the device has caught up where NCCL's wait is given a timeout."""
    message = Message()
    wait_all([message], link(monkeypatch, backend, device), "waited for it from")
    assert message.waits == [given]


def test_a_message_that_does_not_come_names_the_stage(monkeypatch):
    with pytest.raises(
        StageError, match=r"waited for it from stage 2 \(rank 3\).*Connection closed by peer\)"
    ):
        wait_all([Message(arrives=False)], link(monkeypatch, "gloo", "cpu"), "waited for it from")
