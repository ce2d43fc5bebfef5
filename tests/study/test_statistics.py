"""Table arithmetic against numbers worked out by hand."""

from __future__ import annotations

import math

import pytest

from slipstream.study.statistics import interval, paired_gap, share_recovered, standard_error, t_quantile


@pytest.mark.parametrize(
    ("freedom", "value"),
    [(1, 12.7062), (2, 4.30265), (3, 3.18245), (4, 2.77645), (9, 2.26216), (60, 2.00030)],
)
def test_students_t_against_the_printed_table(freedom, value):
    assert t_quantile(freedom) == pytest.approx(value, abs=1e-4)


def test_standard_error():
    assert standard_error([3.0, 5.0]) == pytest.approx(1.0)  # stdev sqrt(2), n 2
    assert standard_error([3.0]) is None


@pytest.mark.parametrize("values", [[4.0], [4.0, 4.1]])
def test_fewer_than_three_seeds_have_no_interval(values):
    found = interval(values)
    assert (found.interval, found.n) == (None, len(values))
    assert interval([*values, 4.2, 4.3]).interval is not None


def test_paired_gap_uses_common_seeds_and_their_differences():
    # Differences 0.1, 0.2, 0.3: mean 0.2, stdev 0.1, half 4.30265 * 0.1 / sqrt(3) = 0.248414.
    gap = paired_gap({"0": 2.1, "1": 7.2, "2": 5.3, "9": 1.0}, {"0": 2.0, "1": 7.0, "2": 5.0, "8": 1.0})
    assert gap is not None
    assert (gap.value, gap.n) == (pytest.approx(0.2), 3)
    assert gap.interval == pytest.approx((0.2 - 0.248414, 0.2 + 0.248414), abs=1e-5)


def test_without_a_common_seed_there_is_no_gap():
    assert paired_gap({"0": 1.0}, {"1": 1.0}) is None


def test_share_recovered_is_the_ratio_of_mean_gaps():
    reference = {"0": 3.0, "1": 3.0, "2": 3.0}
    delay = {"0": 3.1, "1": 3.3, "2": 3.2}  # gaps 0.1, 0.3 and 0.2, mean 0.2
    ef = {"0": 3.02, "1": 3.08, "2": 3.05}  # gaps 0.02, 0.08 and 0.05, mean 0.05
    share = share_recovered(ef, reference, delay)
    assert share is not None
    assert share.value == pytest.approx(0.75)
    # Residuals (0.02 - 0.25 * 0.1) / 0.2 = -0.025, (0.08 - 0.25 * 0.3) / 0.2 = 0.025 and 0: stdev 0.025.
    half = 4.30265 * 0.025 / math.sqrt(3)
    assert share.interval == pytest.approx((0.75 - half, 0.75 + half), abs=1e-4)
    two = share_recovered({"0": 3.02, "1": 3.08}, reference, delay)
    assert two is not None
    assert (two.value, two.interval) == (pytest.approx(0.75), None)


def test_nothing_to_recover_gives_no_share():
    assert share_recovered({"0": 1.0}, {"0": 1.0}, {"0": 0.9}) is None
