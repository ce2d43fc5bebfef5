"""Where torchrun's ranks meet is another program's port: rank 0 says so, and the others do not wait there for ever."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time

import pytest

from slipstream.distributed import meeting
from slipstream.errors import StageError, UserError


@pytest.fixture
def stranger(monkeypatch):
    """Someone who listens, takes every call, and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(listener.getsockname()[1]))
        monkeypatch.setenv("WORLD_SIZE", "2")
        yield listener


def test_rank_0_says_that_the_port_is_in_use(stranger, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(UserError, match=rf"[Pp]ort {stranger.getsockname()[1]} .* in use"):
        meeting.torchruns_store(0, 5.0)


def test_another_rank_gives_up_after_the_timeout(stranger, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(meeting, "GIVING_UP_SECONDS", 0.5)
    with pytest.raises(StageError, match="another program"):
        meeting.torchruns_store(1, 1.0)


def test_another_rank_can_be_told_to_stop_while_it_waits(stranger, monkeypatch):
    """torchrun tells it when rank 0 has failed; inside torch's own wait nothing is heard."""
    monkeypatch.setenv("RANK", "1")
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        teller = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM))
        teller.start()
        began = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            meeting.torchruns_store(1, 300.0)
        assert time.monotonic() - began < 200.0
    finally:
        signal.signal(signal.SIGTERM, before)
