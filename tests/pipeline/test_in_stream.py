"""Both ends of a link of `in_stream.py`, with a device and communicators that are played: the order of what they queue.

That it works on a GPU is for `tests/nccl` to show.
"""

import contextlib
import random
import socket
import threading
import time
from collections import deque

import pytest
import torch

from slipstream.distributed.wires import Wire
from slipstream.pipeline import in_stream
from slipstream.pipeline.attendant import Attendant
from slipstream.pipeline.messages import spec_of
from slipstream.pipeline.neighbours import Neighbour

CPU = torch.device("cpu")
AHEAD = 3  # activations that are sent before the first gradient comes


class Event:
    """Of a device that takes up to two milliseconds."""

    def record(self, stream):
        self._done = time.monotonic() + random.random() * 0.002

    def query(self):
        return time.monotonic() >= self._done


class Stream:
    def __init__(self, device):
        pass

    def wait_event(self, event):
        assert event.query(), "begun before it was computed"


class Work:
    def __init__(self):
        self._done = threading.Event()
        self.set = self._done.set

    def is_completed(self):
        return self._done.is_set()

    def wait(self):
        assert self._done.wait(20)


class Communicator:
    """One direction of a link. Messages are matched by order; `logs` has what each end queued."""

    def __init__(self, name, logs):
        self._name, self._logs = name, logs
        self._lock, self._sends, self._receives = threading.Lock(), deque(), deque()

    def end(self, stage):
        return _End(self, stage)

    def queue(self, stage, tensor, line):
        work = Work()
        with self._lock:
            self._logs[stage].append(self._name)
            (self._sends if line == "send" else self._receives).append((tensor, work))
            while self._sends and self._receives:
                (sent, one), (buffer, other) = self._sends.popleft(), self._receives.popleft()
                buffer.copy_(sent)
                one.set()
                other.set()
        return work


class _End:
    def __init__(self, communicator, stage):
        self._communicator, self.rank = communicator, stage

    def send(self, tensor, peer):
        return self._communicator.queue(self.rank, tensor, "send")

    def recv(self, tensor, peer):
        return self._communicator.queue(self.rank, tensor, "receive")


@pytest.fixture
def played(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)


@pytest.mark.parametrize("seed", range(3))
def test_both_ends_queue_the_same_kernels_in_one_order(played, seed):
    random.seed(seed)
    count, logs = 60, ([], [])
    here, there = socket.socketpair()
    behind, before = Neighbour(1, Wire(here, 1, 20.0), 20.0), Neighbour(0, Wire(there, 0, 20.0), 20.0)
    forward, backward = Communicator("forward", logs), Communicator("backward", logs)
    attendants = Attendant([behind], CPU), Attendant([before], CPU)
    activations_out = in_stream.ActivationsOut(behind, forward.end(0), CPU, attendants[0])
    gradients_in = in_stream.GradientsIn(behind, backward.end(0), CPU, attendants[0])
    gradients_out = in_stream.GradientsOut(before, backward.end(1), CPU, attendants[1])
    activations_in = in_stream.ActivationsIn(before, forward.end(1), CPU, attendants[1])
    for attendant in attendants:
        attendant.start()
    failures = []

    def second_stage():
        try:
            sends = deque()
            for number in range(count):
                (received,) = activations_in.receive(f"activation {number}")
                assert received.tolist() == [number, number]
                sends.append(gradients_out.send([received + 1]))
                if len(sends) > AHEAD:
                    gradients_out.finish(sends.popleft(), "a gradient")
            while sends:
                gradients_out.finish(sends.popleft(), "a gradient")
        except BaseException as error:
            failures.append(error)
        finally:  # at once, as a schedule that was drained may
            attendants[1].close()
            before.wire.close()

    thread = threading.Thread(target=second_stage, daemon=True)
    thread.start()
    spec = spec_of([torch.zeros(2)])
    sends = deque()
    for number in range(count + AHEAD):
        if number < count:
            sends.append(activations_out.send([torch.full((2,), float(number))]))
            gradients_in.post(spec)
        if number >= AHEAD:
            (received,) = gradients_in.receive(f"gradient {number - AHEAD}")
            assert received.tolist() == [number - AHEAD + 1] * 2
            activations_out.finish(sends.popleft(), "an activation")
    thread.join(30)
    attendants[0].close()
    behind.wire.close()
    assert not failures, failures
    assert logs[0] == logs[1]
    assert sorted(logs[0]) == ["backward"] * count + ["forward"] * count
