"""Sums in bfloat16 with random rounding: exact on average, neighbours of the exact sum, the same bits again."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from slipstream.kernels.dither import add_dithered, noise
from slipstream.pipeline.gradients import seed_of

finite = st.floats(-(2.0**100), 2.0**100, width=32)


@given(st.lists(st.tuples(finite, finite), min_size=1, max_size=50), st.integers(0, 2**31 - 1))
def test_a_sum_is_one_of_the_two_nearest(pairs, turn):
    totals = torch.tensor([a for a, _ in pairs]).bfloat16()
    terms = torch.tensor([b for _, b in pairs]).bfloat16()
    exact = totals.float() + terms.float()
    found = totals.clone()
    add_dithered(found, terms, seed_of("w", turn))
    below = exact.view(torch.int32).bitwise_right_shift(16)
    bits = found.view(torch.int16).int()
    assert ((bits == below) | (bits == below + 1)).all()
    whole = exact.view(torch.int32).bitwise_and(0xFFFF) == 0
    assert (bits == below)[whole].all(), "what needs no rounding is not rounded"


def test_small_terms_are_not_lost():
    """1 + 512 terms of 1/2048: rounded to the nearest, the sum would stay 1."""
    total, term = torch.ones(4096, dtype=torch.bfloat16), torch.full((4096,), 2.0**-11, dtype=torch.bfloat16)
    nearest = total.clone()
    for turn in range(512):
        nearest += term
        add_dithered(total, term, seed_of("w", turn))
    assert (nearest == 1).all()
    # 512 steps that go up by 1/128 once in 16: a standard deviation of 0.043, of the mean of 4096 elements 0.0007
    assert abs(total.float().mean().item() - 1.25) < 5 * 0.0007


def test_the_bits_are_even_and_of_no_two_seeds_alike():
    for seed in (0, 1, seed_of("a", 0), seed_of("b", 7)):
        bits = noise(1 << 16, seed, torch.device("cpu")).double()
        assert abs(bits.mean().item() / 65536 - 0.5) < 0.01
        assert abs(bits.std().item() / 65536 - 12**-0.5) < 0.01
        assert bits.unique().numel() > 0.6 * 65536
    one, other = (noise(1 << 14, seed_of("w", turn), torch.device("cpu")).double() for turn in (1, 2))
    assert abs(torch.corrcoef(torch.stack([one, other]))[0, 1].item()) < 0.05
    assert abs(torch.corrcoef(torch.stack([one[1:], one[:-1]]))[0, 1].item()) < 0.05


def test_the_same_again():
    a = torch.randn(100).bfloat16()
    twice = [a.clone(), a.clone()]
    for total in twice:
        add_dithered(total, a * 0.01, seed_of("w", 3))
    assert torch.equal(*twice)
