"""How a message is waited for, and how one that does not come is told of."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from slipstream.errors import StageError, UserError
from slipstream.pipeline.channel import wait_all
from slipstream.pipeline.messages import decode, encode, spec_of
from slipstream.pipeline.neighbours import Neighbour


class Message(dist.Work):
    def __init__(self, arrives=True):
        super().__init__()
        self.arrives, self.waits = arrives, []

    def wait(self, timeout=None):
        self.waits.append(timeout)
        if not self.arrives:
            raise RuntimeError("Connection closed by peer\nmore")
        return True


class Wire:
    rank = 3


def neighbour():
    return Neighbour(2, Wire(), timeout_seconds=5.0)


def test_a_message_is_not_waited_for_for_ever():
    message = Message()
    wait_all([message], neighbour(), "waited for it from")
    assert message.waits == [timedelta(seconds=5)]


def test_a_message_that_does_not_come_names_the_stage():
    with pytest.raises(
        StageError, match=r"waited for it from stage 2 \(rank 3\).*: the connection was closed\. Did"
    ):
        wait_all([Message(arrives=False)], neighbour(), "waited for it from")


def test_shapes_survive_the_way():
    tensors = [
        torch.zeros(2, 3, requires_grad=True),
        torch.zeros((), dtype=torch.int64),
        torch.zeros(4, dtype=torch.bool),
    ]
    assert decode(encode(spec_of(tensors))) == spec_of(tensors)
    assert decode(encode(())) == ()


def test_a_dtype_that_cannot_travel_is_named():
    with pytest.raises(UserError, match=r"torch\.complex64"):
        encode(spec_of([torch.zeros(1, dtype=torch.complex64)]))
