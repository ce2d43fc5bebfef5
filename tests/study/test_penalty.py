"""The token penalty against curves whose answer is known, and the net gain against closed forms."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.study.penalty import (
    envelope,
    mean_penalty,
    net_gain,
    penalty_of_gap,
    speedup,
    token_penalty,
)
from slipstream.study.statistics import Estimate


def pair(value: float, extrapolated: bool) -> Estimate:
    return Estimate(value, None, 1, extrapolated)


def log_curve(slope: float, end: float, tokens: int = 1000, points: int = 20):
    """loss = end + slope * ln(tokens / t): straight in ln t, so interpolation is exact."""
    steps = [tokens * (i + 1) // points for i in range(points)]
    return [(float(t), end + slope * math.log(tokens / t)) for t in steps]


@given(st.floats(0.01, 2.0), st.floats(0.001, 2.0))
def test_on_a_logarithmic_curve_the_penalty_is_exp_of_gap_over_slope(slope, gap):
    found = token_penalty(log_curve(slope, 3.0), 3.0, 3.0 + gap)
    assert found is not None
    assert found.value == pytest.approx(math.exp(gap / slope), rel=1e-9)
    assert found.extrapolated == (gap > slope * math.log(20) + 1e-12)


def test_no_gap_costs_nothing():
    assert token_penalty(log_curve(0.4, 3.0), 3.0, 3.0) == pair(pytest.approx(1.0), False)


def test_a_better_loss_saves_tokens_and_is_marked():
    found = token_penalty(log_curve(0.5, 3.0), 3.0, 2.9)
    assert found == pair(pytest.approx(math.exp(-0.2)), True)


def test_between_two_points_the_logarithm_is_interpolated():
    # Half-way between 100 and 400 tokens in loss is 200 tokens in geometric terms.
    assert token_penalty([(100, 5.0), (400, 4.0)], 4.0, 4.5) == pair(pytest.approx(2.0), False)


def test_bumps_of_the_curve_are_left_out():
    bumpy = [(0.0, 9.0), (10.0, 5.0), (20.0, 5.5), (40.0, 4.0), (50.0, 4.2)]
    assert envelope(bumpy) == [(10.0, 5.0), (40.0, 4.0)]
    assert token_penalty([(10.0, 5.0), (20.0, 5.5)], 5.0, 5.2) is None


def test_a_curve_that_rises_again_costs_nothing_by_itself():
    # The synchronous run ends at 4.2, which it had passed before: ending there too is no penalty.
    overfit = [(10.0, 5.0), (40.0, 4.0), (50.0, 4.2)]
    assert token_penalty(overfit, 4.2, 4.2) == pair(pytest.approx(1.0), False)
    assert token_penalty(overfit, 4.2, 4.6) == pair(pytest.approx(4**0.4), False)


def test_a_synchronous_end_off_the_curve_is_marked_too():
    # It ends above its own first point, which only the first slope, gone back along, can reach.
    worse = [(10.0, 5.0), (20.0, 4.0), (40.0, 5.5)]
    assert token_penalty(worse, 5.5, 4.5) == pair(pytest.approx(0.5), True)


def test_a_run_that_broke_far_beyond_a_flat_curve_still_has_numbers():
    warming = [(1e4, 10.83), (2e4, 10.82), (8e4, 6.0), (1e6, 4.0)]
    broken = token_penalty(warming, 4.0, 50.0)
    assert broken is not None
    assert 1e200 < broken.value < math.inf
    assert broken.extrapolated
    flat = token_penalty([(1e4, 5.0), (2e4, 4.0001), (1e6, 4.0)], 4.0, 3.0)
    assert flat is not None
    assert 0 < flat.value < 1e-200
    found = mean_penalty([broken, pair(1.2, False), pair(1.2, False)])
    assert found is not None
    assert found.interval == (0.0, math.inf)
    gain = net_gain(speedup(4, 4), found, 0.0)
    assert gain.interval == (0.0, math.inf)
    assert 1e200 < penalty_of_gap(40.0, 0.03) < math.inf


def test_mean_is_geometric_with_the_interval_of_the_logarithm():
    found = mean_penalty([pair(1.0, False), pair(1.21, True), pair(1.1, False)])
    assert found is not None
    assert found.extrapolated
    assert found.value == pytest.approx(1.1)
    half = 4.30265 * math.log(1.1) / math.sqrt(3)  # the logarithms are 0, 2 and 1 times log 1.1
    assert found.interval == pytest.approx((1.1 * math.exp(-half), 1.1 * math.exp(half)), rel=1e-4)


@pytest.mark.parametrize("stages", [4, 8])
def test_speedup_against_the_closed_forms(stages):
    # In slots of one forward and backward (3 units): 2BW takes m, 1F1B m + P - 1.
    at_m = speedup(stages, stages)
    assert at_m.rival == "zb_h1"  # (3m + P - 1) / 3m
    assert at_m.factor == pytest.approx((3 * stages + stages - 1) / (3 * stages))
    long = speedup(stages, 3 * stages)
    assert long.rival == "zbv"
    assert long.factor == pytest.approx(1 + (stages - 1) / 2 / (9 * stages))
    assert long.flushed == pytest.approx(long.factor * 3 * stages / (4 * stages - 1))


def test_net_gain_divides_by_the_penalty_and_charges_flushed_updates():
    speed = speedup(8, 24)
    plain = net_gain(speed, Estimate(1.02, (1.01, 1.05), 3), 0.0)
    assert plain.value == pytest.approx(speed.factor / 1.02)
    assert plain.interval == pytest.approx((speed.factor / 1.05, speed.factor / 1.01))
    # A tenth of the updates flushed: time 0.9 / factor + 0.1 / flushed of the rival's.
    flushed = net_gain(speed, Estimate(1.0, None, 1), 0.1)
    assert flushed.value == pytest.approx(1 / (0.9 / speed.factor + 0.1 / speed.flushed))
    assert flushed.interval is None
    assert net_gain(speed, Estimate(1.0, None, 1), 1.0).value == pytest.approx(speed.flushed)
    marks = [net_gain(speed, Estimate(1.0, None, 1, *marks), 0.0) for marks in ((True, False), (False, True))]
    assert [(gain.extrapolated, gain.least) for gain in marks] == [(True, False), (False, False)]
