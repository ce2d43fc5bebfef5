"""A ring's laws: order, growth, no slot filled before it is emptied, and a clear end when the other end is gone."""

import contextlib
import socket
import weakref
from collections import Counter, deque

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.distributed import ring
from slipstream.distributed.ring import RingReader, RingWriter
from slipstream.distributed.slots import HostSlots


class Checked(HostSlots):
    """Host slots that know which of them are full, as the events of a GPU's slots do."""

    made: list = []  # noqa: RUF012
    unopened: deque = deque()  # noqa: RUF012

    @classmethod
    def make(cls, count, size, device):
        slots = super().make(count, size, device)
        slots.full = set()
        cls.made.append(slots)
        cls.unopened.append(slots)
        return slots

    @classmethod
    def open(cls, message, descriptors):
        slots = super().open(message, descriptors)
        slots.full = cls.unopened.popleft().full
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


def new_ends():
    Checked.made.clear()
    Checked.unopened.clear()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return RingWriter(ours, Checked, 0.1), RingReader(theirs, Checked)


@pytest.fixture
def ends():
    return new_ends()


@pytest.fixture
def small_classes():
    with kilobytes():
        yield


@contextlib.contextmanager
def kilobytes():
    """Classes of a few kilobytes, so that many messages of many classes cost little."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ring, "LEAST_BYTES", 1 << 11)
        patch.setattr(ring, "LARGE_BYTES", 1 << 13)
        yield


def asked():
    """The bytes of all slots ever made."""
    return sum(slots.count * slots.size for slots in Checked.made)


def filled(number, size):
    """A message of `size` bytes that is like no other of its size."""
    return (torch.arange(size) % 251 + number).to(torch.uint8)


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
    Checked.made.clear()
    out = torch.empty(3)
    for value in range(9):
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


def test_small_messages_beside_a_large_one_take_memory_for_their_own_bytes(ends, small_classes):
    writer, reader = ends
    large, small, many = 40 << 11, 1 << 11, 100
    writer.send(filled(0, large))
    for number in range(1, many + 1):
        writer.send(filled(number, small))
    unread = large + many * small
    assert asked() < 2 * unread
    for number, size in enumerate([large] + [small] * many):
        out = torch.empty(size, dtype=torch.uint8)
        reader.receive(out, 1.0)
        assert torch.equal(out, filled(number, size))


def test_a_class_grows_alone(ends, small_classes):
    writer, reader = ends
    small, large = 4096, 8192
    sizes = [large, small, small, large, large, large, *[small] * 3, large]
    for number, size in enumerate(sizes):
        writer.send(filled(number, size))
    made = [(slots.size, slots.count) for slots in Checked.made]
    assert [count for size, count in made if size == large] == [1, 2, 4]
    assert [count for size, count in made if size == small] == [4, 8]
    for number, size in enumerate(sizes):
        out = torch.empty(size, dtype=torch.uint8)
        reader.receive(out, 1.0)
        assert torch.equal(out, filled(number, size))
    # As far behind again: it fits into what is there.
    for _ in range(4):
        writer.send(filled(0, large))
        writer.send(filled(0, small))
    assert len(Checked.made) == len(made)


@given(size=st.integers(0, 1 << 40))
def test_a_class_wastes_a_quarter_at_most(size):
    slot = ring.size_class(size)
    assert size <= slot <= max(ring.LEAST_BYTES, 1.25 * size)
    assert slot % 512 == 0
    assert ring.size_class(slot) == slot
    power = 1 << max(20, size.bit_length())
    assert len({ring.size_class(power + power * step // 64) for step in range(1, 65)}) == 4


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(
        st.one_of(st.sampled_from([0, 1, 2048, 2049, 8192, 8193]), st.integers(0, 1 << 14)), max_size=60
    ),
    lags=st.lists(st.integers(0, 25), min_size=60, max_size=60),
)
def test_any_sizes_and_any_lag_arrive_exact_and_in_order(sizes, lags):
    """And a class has fewer than four times as many slots as were unread at once, or those it starts with."""
    with kilobytes():
        made, peak = lagging(sizes, lags)
        assert made.keys() == peak.keys()
        for size, count in made.items():
            assert count < max(ring.LEAST_SLOTS + 1, 4 * peak[size])
            assert count >= (1 if size >= ring.LARGE_BYTES else ring.LEAST_SLOTS)


def lagging(sizes, lags):
    """Send messages, reading so many behind; return by class how many slots were made, and most messages unread."""
    writer, reader = new_ends()
    unread, peak = deque(), Counter()

    def receive():
        number, size = unread.popleft()
        out = torch.empty(size, dtype=torch.uint8)
        reader.receive(out, 1.0)
        assert torch.equal(out, filled(number, size))

    for number, (size, lag) in enumerate(zip(sizes, lags, strict=False)):
        writer.send(filled(number, size))
        unread.append((number, size))
        peak |= Counter(ring.size_class(size) for _, size in unread)
        while len(unread) > lag:
            receive()
    while unread:
        receive()
    made = Counter()
    for slots in Checked.made:
        made[slots.size] += slots.count
    return made, peak


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


def test_one_full_class_holds_up_no_other(ends, small_classes, monkeypatch):
    monkeypatch.setattr(ring, "MOST_SLOTS", 4)
    writer, _ = ends
    for number in range(4):
        writer.send(filled(number, 2048))
    for number in range(4):
        writer.send(filled(number, 4096))
    with pytest.raises(TimeoutError, match="8 messages were not taken"):
        writer.send(filled(4, 2048))


def test_a_full_wire_waits_for_the_reader_and_not_for_ever(small_classes):
    """The system has room for some hundreds of packets that are not taken: all classes together may need more."""
    writer, reader = new_ends()
    writer._wire.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)  # the least the system allows

    def send_many():
        for number in range(200):
            writer.send(filled(number, 2048 + 512 * (number % 8)))

    with pytest.raises(TimeoutError, match="messages were not taken"):
        send_many()
    out = torch.empty(2048, dtype=torch.uint8)
    reader.receive(out, 1.0)
    assert torch.equal(out, filled(0, 2048))
