"""The fits behind size.md and length_and_batch.md: gaps of known powers, printed tables, and what seeds do not tell."""

from __future__ import annotations

import math
import sys

import numpy as np
import pytest

from pages import ROOT

sys.path.insert(0, str(ROOT / "tools"))
from power_fit import Setting, f_above, fit, lack_of_fit, local_power, pooled, with_spread

PLACES = [(600, 4e6), (1200, 2e6), (2400, 4e6), (5000, 8e6), (9500, 4e6), (10_000, 16e6)]


def exact(updates: float, parameters: float) -> float:
    return 3.0 * updates**-0.7 * parameters**-0.2


def test_the_powers_that_gaps_were_made_with_are_found():
    found = fit([Setting(at, (exact(*at),) * 3) for at in PLACES])
    assert found.exponents == pytest.approx((0.7, 0.2), abs=1e-9)
    assert found.scatter == pytest.approx(0.0, abs=1e-9)
    assert found.freedom == 3
    new = found.setting((1e5, 1e9))
    assert (new.value, *new.interval) == pytest.approx((exact(1e5, 1e9),) * 3)


def off(places, seeds: int):
    """Settings that lie off the power by fixed amounts, each with `seeds` seeds that agree."""
    away = (0.2, -0.3, 0.1, 0.3, -0.2, -0.1)
    return [Setting(at, (exact(*at) * math.exp(e),) * seeds) for at, e in zip(places, away, strict=True)]


def test_more_seeds_of_the_same_settings_tell_no_more_of_the_power():
    few, many = fit(off(PLACES, 1)), fit(off(PLACES, 50))
    assert many.halves == pytest.approx(few.halves)
    assert many.setting((1e5, 1e9)).interval == pytest.approx(few.setting((1e5, 1e9)).interval)


def test_a_line_through_four_points_against_figures_by_hand():
    # ln gap = 1, 2, 2, 3 at ln x = 0, -1, -2, -3: slope 0.6, residuals -0.1, 0.3, -0.3, 0.1, variance 0.2 / 2.
    places = [math.exp(-x) for x in range(4)]
    found = fit([Setting((x,), (math.exp(y),)) for x, y in zip(places, (1, 2, 2, 3), strict=True)])
    assert found.exponents == pytest.approx((0.6,))
    assert found.scatter == pytest.approx(math.sqrt(0.1))
    assert found.halves == pytest.approx((4.30265 * math.sqrt(0.1 / 5),), rel=1e-4)
    new = found.setting((math.exp(-4),))  # 2.5 from the middle
    half = 4.30265 * math.sqrt(0.1 * (1 + 1 / 4 + 2.5**2 / 5))
    assert (math.log(new.value), math.log(new.interval[1])) == pytest.approx((3.5, 3.5 + half), rel=1e-4)


def test_the_interval_of_a_new_setting_holds_it_as_often_as_it_says():
    generator, held = np.random.default_rng(0), 0
    for _ in range(400):
        settings = [
            Setting(at, (exact(*at) * math.exp(generator.normal(0, 0.3)),)) for at in [*PLACES, (5e4, 3e8)]
        ]
        low, high = fit(settings[:-1]).setting((5e4, 3e8)).interval
        held += low <= settings[-1].gaps[0] <= high
    assert 0.92 <= held / 400 <= 0.98


@pytest.mark.parametrize(
    ("ratio", "first", "second", "chance"),
    [(4.9646, 1, 10, 0.05), (3.3567, 4, 11, 0.05), (2.7413, 6, 16, 0.05), (6.2167, 3, 11, 0.01), (0.0, 4, 11, 1.0)],
)  # fmt: skip
def test_fishers_f_against_the_printed_table(ratio, first, second, chance):
    assert f_above(ratio, first, second) == pytest.approx(chance, abs=2e-5)


def test_lack_of_fit_is_seen_where_settings_lie_off_and_not_where_seeds_do():
    generator = np.random.default_rng(1)

    def seeds(at, e, spread):
        return Setting(at, tuple(exact(*at) * np.exp(e + generator.normal(0, spread, 3))))

    far = lack_of_fit([seeds(one.at, math.log(one.gaps[0] / exact(*one.at)), 0.02) for one in off(PLACES, 1)])
    assert far.freedom == (3, 12)
    assert far.chance < 1e-3
    chances = [lack_of_fit([seeds(at, 0.0, 0.2) for at in PLACES]).chance for _ in range(200)]
    assert 0.01 <= sum(chance < 0.05 for chance in chances) / 200 <= 0.1


def test_the_power_between_two_settings_is_paired_by_seed():
    found = local_power({"0": 0.4, "1": 0.8, "2": 0.4, "3": 9.0}, {"0": 0.1, "1": 0.2, "2": 0.1}, 4.0)
    assert found.value == pytest.approx(1.0)
    assert found.interval == pytest.approx((1.0, 1.0))


def test_one_spread_for_several_settings():
    # Variances 1 (two degrees of freedom) and 4 (one): 6 / 3.
    spread, freedom = pooled([[1.0, 2.0, 3.0], [0.0, 8**0.5], [5.0]])
    assert (spread, freedom) == (pytest.approx(math.sqrt(2)), 3)
    found = with_spread([1.0, 2.0, 3.0], spread, freedom)
    assert found.interval == pytest.approx(
        (2 - 3.18245 * math.sqrt(2 / 3), 2 + 3.18245 * math.sqrt(2 / 3)), abs=1e-4
    )
