"""A ring's laws: order, growth, no slot filled before it is emptied, and a clear end when the other end is gone."""

import socket
import weakref

import pytest
import torch

from slipstream.distributed import ring
from slipstream.distributed.ring import RingReader, RingWriter
from slipstream.distributed.slots import HostSlots


class Checked(HostSlots):
    """Host slots that know which of them are full, as the events of a GPU's slots do."""

    made: list = []  # noqa: RUF012

    @classmethod
    def make(cls, count, size, device):
        slots = super().make(count, size, device)
        slots.full = set()
        cls.made.append(slots)
        return slots

    @classmethod
    def open(cls, message, descriptors):
        slots = super().open(message, descriptors)
        slots.full = cls.made[-1].full
        return slots

    def write(self, index, tensor, again):
        assert index not in self.full
        assert again == getattr(self, f"seen_{index}", False)
        setattr(self, f"seen_{index}", True)
        self.full.add(index)
        super().write(index, tensor, again)

    def read(self, index, out):
        self.full.remove(index)
        super().read(index, out)


@pytest.fixture
def ends():
    Checked.made.clear()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return RingWriter(ours, Checked, 0.1), RingReader(theirs, Checked)


def message(value, size=3):
    return torch.full((size,), float(value))


def test_messages_arrive_in_order_and_slots_are_used_again(ends):
    writer, reader = ends
    out = torch.empty(3)
    for value in range(7):
        writer.send(message(value))
        reader.receive(out, 1.0)
        assert out.tolist() == [value] * 3
    assert len(Checked.made) == 1
    assert Checked.made[0].count == ring.LEAST_SLOTS


def test_a_reader_that_is_behind_makes_the_ring_grow(ends):
    writer, reader = ends
    for value in range(9):
        writer.send(message(value))
    assert [slots.count for slots in Checked.made] == [4, 8]
    outgrown = weakref.ref(Checked.made[0])
    Checked.made = Checked.made[::-1]  # opened in the order they were made: `open` takes the last
    out = torch.empty(3)
    for value in range(9):
        if value == 4:
            Checked.made.pop()
        reader.receive(out, 1.0)
        assert out[0] == value
    writer.send(message(9))
    assert outgrown() is not None, "the reader's device may still have to pass its events"


def test_a_larger_tensor_makes_the_slots_grow_and_other_dtypes_fit(ends):
    writer, reader = ends
    large = torch.arange(400_000)
    for sent in (torch.tensor(True), large, torch.randn(3, 5, dtype=torch.bfloat16).T, torch.empty(0)):
        writer.send(sent)
        out = torch.zeros(sent.shape, dtype=sent.dtype)
        reader.receive(out, 1.0)
        assert torch.equal(out, sent)
    assert len(Checked.made) == 2


def test_silence_and_a_closed_end_are_told_apart(ends):
    writer, reader = ends
    with pytest.raises(TimeoutError):
        reader.receive(torch.empty(1), 0.05)
    writer.send(message(1))
    writer.hang_up()
    reader.receive(torch.empty(3), 1.0)  # what was sent before the end still arrives
    with pytest.raises(ConnectionError, match="closed by the other end"):
        reader.receive(torch.empty(3), 1.0)


def test_a_writer_notices_that_its_reader_is_gone(ends):
    writer, reader = ends
    writer.send(message(1))
    reader.receive(torch.empty(3), 1.0)
    reader.hang_up()
    with pytest.raises(BrokenPipeError):
        writer.send(message(2))


def test_a_full_ring_waits_and_then_says_so(ends, monkeypatch):
    monkeypatch.setattr(ring, "MOST_SLOTS", 4)
    writer, _ = ends
    for value in range(4):
        writer.send(message(value))
    with pytest.raises(TimeoutError, match="4 messages were not taken"):
        writer.send(message(4))
