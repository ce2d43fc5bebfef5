"""The thread that looks after the neighbours while a host is busy."""

import gc
import socket
import threading
import time

import pytest

from slipstream.distributed.wires import Wire
from slipstream.errors import StageError
from slipstream.pipeline.attendant import Attendant
from slipstream.pipeline.neighbours import Neighbour


class Device:
    """A duty: what was handed in is passed on once it is computed."""

    def __init__(self):
        self.held, self.begun, self.computed = [], [], False

    def attend(self):
        if not self.held or not self.computed:
            return False
        self.begun.append(self.held.pop(0))
        return True

    @property
    def awaits_device(self):
        return bool(self.held)


@pytest.fixture
def ends():
    """A neighbour as its host knows it, and the neighbour's own end."""
    here, there = socket.socketpair()
    yield Neighbour(1, Wire(here, 1, 5.0), 5.0), Wire(there, 0, 5.0)
    here.close()
    there.close()


@pytest.fixture
def attendant(ends):
    made = Attendant([ends[0]])
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
    attendant.duties.append(device)
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
    attendant.duties.append(device)
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
        attendant.check()
    attendant.ring()  # nobody hears it any more


def test_its_thread_goes_with_it(ends):
    before = len(threads())
    closed, dropped = Attendant([ends[0]]), Attendant([])
    for attendant in (closed, dropped):
        attendant.start()
    assert len(threads()) == before + 2
    closed.close()
    assert len(threads()) == before + 1
    del attendant, dropped
    gc.collect()
    soon(lambda: len(threads()) == before)
