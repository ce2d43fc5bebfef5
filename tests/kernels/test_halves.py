"""A float32 in two halves comes back with its bits, and the upper one is the nearest bfloat16."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from slipstream.kernels.halves import join, split
from slipstream.lists import round_into


def halves(bits):
    whole = torch.tensor(bits, dtype=torch.int32).view(torch.float32)
    high, low = torch.empty(whole.shape, dtype=torch.bfloat16), torch.empty(whole.shape, dtype=torch.int16)
    split([whole], [high], [low])
    back = torch.full_like(whole, math.pi)
    join([high], [low], [back])
    return whole, high, back


patterns = st.integers(-(2**31), 2**31 - 1)
ties = st.integers(-(2**15), 2**15 - 1).map(lambda upper: (upper << 16) + (1 << 15))


@given(st.lists(patterns | ties, min_size=1, max_size=40))
def test_every_bit_comes_back(bits):
    whole, _, back = halves(bits)
    number = ~whole.isnan()
    assert torch.equal(back.view(torch.int32)[number], whole.view(torch.int32)[number])


@given(
    st.lists(patterns | st.integers(1 - (1 << 16), (1 << 16) - 1).map(lambda n: n ^ 0x7FFFFFFF), min_size=1)
)
@example([0x7FFFFFFF, -1, 0x7FC00000, 0x7FFF8000, -0x8000])
def test_what_is_not_a_number_stays_so_and_nothing_becomes_one(bits):
    whole, high, back = halves([(n + (1 << 31)) % (1 << 32) - (1 << 31) for n in bits])
    assert torch.equal(high.isnan(), whole.isnan())
    assert torch.equal(back.isnan(), whole.isnan())


@given(st.lists(patterns | ties, min_size=1, max_size=40))
def test_the_upper_half_is_the_nearest_and_ties_go_away_from_zero(bits):
    whole, high, _ = halves(bits)
    for value, found in zip(whole.tolist(), high.view(torch.int16).tolist(), strict=True):
        if not math.isfinite(value):
            continue
        # The bit patterns of one sign are in the order of their values, so neighbours differ by one.
        near = torch.tensor([found - 1, found, found + 1]).to(torch.int16).view(torch.bfloat16).tolist()
        if not all(map(math.isfinite, near)) or (found & 0x7FFF) == 0:
            continue
        distances = [abs(Fraction(value) - Fraction(other)) for other in near]
        assert distances[1] == min(distances)
        assert distances[1] < distances[2] or abs(near[1]) > abs(near[2]), "a tie goes away from zero"
        assert distances[1] < distances[0] or abs(near[1]) > abs(near[0])


@pytest.mark.parametrize("value", [0.0, -0.0, math.inf, -math.inf, math.nan, 3.4028234663852886e38, 1e-45])
def test_the_ends_of_the_line(value):
    bits = torch.tensor([value]).view(torch.int32).tolist()
    whole, high, back = halves(bits)
    assert torch.equal(back.view(torch.int32), whole.view(torch.int32)) or math.isnan(value)
    assert math.isnan(high.item()) == math.isnan(value)
    assert math.copysign(1, high.item()) == math.copysign(1, value) or math.isnan(value)


def test_other_dtypes_are_plain_copies():
    source = torch.randn(7)
    same, double = torch.empty(7), torch.empty(7, dtype=torch.float64)
    round_into([same, double], [source, source])
    assert torch.equal(same, source)
    assert torch.equal(double, source.double())
