"""The thread that looks after the neighbours while a host is busy."""

import gc
import os
import socket
import threading
import time
import weakref

import pytest
import torch

from slipstream.distributed.wires import Wire
from slipstream.errors import StageError
from slipstream.pipeline.attendant import Attendant
from slipstream.pipeline.host_sum import PeerLost
from slipstream.pipeline.neighbours import Neighbour

CPU = torch.device("cpu")


class Device:
    """A duty: what was handed in is passed on once it is computed."""

    def __init__(self):
        self.held, self.begun, self.computed = [], [], False

    def attend(self):
        if self.held and self.computed:
            self.begun.append(self.held.pop(0))
        return bool(self.held)


class Never:
    def is_completed(self):
        return False


@pytest.fixture
def ends():
    """A neighbour as its host knows it, and the neighbour's own end."""
    here, there = socket.socketpair()
    yield Neighbour(1, Wire(here, 1, 5.0), 5.0), Wire(there, 0, 5.0)
    here.close()
    there.close()


@pytest.fixture
def attendant(ends):
    made = Attendant([ends[0]], CPU)
    yield made
    made.close()


def threads():
    return [thread for thread in threading.enumerate() if thread.name == "slipstream-attendant"]


def soon(true, seconds=20.0):
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_it_sees_what_is_done_while_its_host_is_elsewhere(attendant, ends):
    neighbour, other = ends
    device, heard = Device(), []
    neighbour.heed[b"x"] = heard.append
    attendant.duties.append(device.attend)
    attendant.start()
    device.held.append("message")
    attendant.ring()
    other.send(b"xnews")
    soon(lambda: heard == [b"news"])
    assert not device.begun
    device.computed = True
    soon(lambda: device.begun == ["message"])


def test_a_host_that_waits_is_told(attendant, ends):
    device = Device()
    device.computed = True
    attendant.duties.append(device.attend)
    attendant.start()
    threading.Timer(0.05, lambda: (device.held.append(1), attendant.ring())).start()
    attendant.until(lambda: bool(device.begun), ends[0], "waited for")
    assert device.begun == [1]


def test_a_neighbour_that_is_gone_is_named_at_once(attendant, ends):
    neighbour, other = ends
    attendant.start()
    threading.Timer(0.05, other.close).start()
    with pytest.raises(StageError, match=r"waited for news from stage 1 \(rank 1\)"):
        attendant.until(lambda: False, neighbour, "waited for news from")


def test_a_silent_neighbour_is_not_waited_for_for_ever(attendant, ends):
    neighbour, _ = ends
    neighbour.timeout_seconds = 0.1
    attendant.start()
    with pytest.raises(StageError, match=r"no answer within the timeout of 0\.1 s"):
        attendant.until(lambda: False, neighbour, "waited for news from")


def test_its_host_raises_what_it_ended_with(attendant, ends):
    neighbour, other = ends

    def heed(rest):
        raise MemoryError("no room for the message")

    neighbour.heed[b"x"] = heed
    attendant.start()
    other.send(b"x")
    with pytest.raises(MemoryError, match="no room"):
        attendant.until(lambda: False, neighbour, "waited for news from")
    with pytest.raises(MemoryError, match="no room"):
        attendant.poll(Never(), 5.0)
    attendant.ring()  # nobody hears it any more


def test_what_it_ended_with_holds_no_memory_once_it_is_closed(attendant, ends):
    neighbour, other = ends
    kept = []

    def heed(rest):
        buffer = Device()
        kept.append(weakref.ref(buffer))
        raise MemoryError("no room for the message")

    neighbour.heed[b"x"] = heed
    attendant.start()
    other.send(b"x")
    with pytest.raises(MemoryError):
        attendant.until(lambda: False, neighbour, "waited for news from")
    attendant.close()
    gc.collect()
    assert [buffer() for buffer in kept] == [None]


def test_an_error_while_it_waits_is_told_as_well(attendant, ends, monkeypatch):
    def broken(*arguments):
        raise ValueError("no such file")

    monkeypatch.setattr("slipstream.pipeline.attendant.wait_readable", broken)
    attendant.start()
    with pytest.raises(ValueError, match="no such file"):
        attendant.until(lambda: False, ends[0], "waited for news from")


def test_a_neighbour_that_tells_its_last_and_closes_is_not_lost(attendant, ends):
    neighbour, other = ends
    heard, looks = [], []
    neighbour.heed[b"x"] = heard.append

    def arrived():
        looks.append(bool(heard))
        if len(looks) == 1:  # both come after this look, and before the next line of whoever asked
            other.send(b"x")
            other.close()
            neighbour.listen()  # as the thread does, which is not started here
            assert neighbour.wire.gone
        return looks[-1]

    attendant.until(arrived, neighbour, "waited for news from")
    assert looks == [False, True]


def test_something_of_which_nobody_tells_is_not_waited_for_for_ever(attendant):
    attendant.start()
    with pytest.raises(PeerLost, match=r"no answer within the timeout of 0\.1 s"):
        attendant.poll(Never(), 0.1)


def test_one_that_never_started_leaves_no_file():
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        Attendant([], CPU).close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_its_thread_goes_with_it(ends):
    before = len(threads())
    closed, dropped = Attendant([ends[0]], CPU), Attendant([], CPU)
    for attendant in (closed, dropped):
        attendant.start()
    assert len(threads()) == before + 2
    closed.close()
    assert len(threads()) == before + 1
    del attendant, dropped
    gc.collect()
    soon(lambda: len(threads()) == before)
