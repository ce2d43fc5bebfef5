"""Learning-rate schedules: pure functions of the group index with the right corners."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.errors import UserError
from slipstream.optim import SCHEDULES, schedule


def test_cosine_corners():
    rate = schedule("cosine", 1.0, 100, 10, 0.1)
    assert rate(0) == pytest.approx(0.1)
    assert rate(9) == 1.0
    assert rate(54) == pytest.approx(0.55)
    assert rate(99) == pytest.approx(0.1)
    assert rate(500) == pytest.approx(0.1)


def test_wsd_is_flat_then_linear():
    rate = schedule("wsd", 2.0, 100, 10, 0.0, decay=20)
    assert {rate(g) for g in range(9, 80)} == {2.0}
    assert rate(89) == pytest.approx(1.0)
    assert rate(99) == 0.0
    assert schedule("wsd", 1.0, 100)(79) == 1.0
    assert schedule("wsd", 1.0, 100)(80) == pytest.approx(0.95)
    late = schedule("wsd", 1.0, 100, 90)  # a warm-up into the decline: no jump where they meet
    assert [late(g) for g in (89, 90, 99)] == pytest.approx([1.0, 0.9, 0.0])


def test_constant():
    assert [schedule("constant", 1.0, 5, 2)(g) for g in range(5)] == [0.5, 1, 1, 1, 1]


@given(
    st.sampled_from(SCHEDULES),
    st.integers(1, 200),
    st.floats(0, 1),
    st.floats(0, 1),
)
def test_laws(name, total, warm, floor):
    warmup = int(warm * total)
    rate = schedule(name, 1.0, total, warmup, 0.0 if name == "constant" else floor)
    rates = [rate(g) for g in range(total)]
    assert rates == [rate(g) for g in range(total)]
    assert all(0 <= r <= 1 + 1e-12 for r in rates)
    assert rates[:warmup] == sorted(rates[:warmup])
    assert rates[warmup:] == sorted(rates[warmup:], reverse=True)
    if name != "constant" and warmup < total:
        assert rates[-1] == pytest.approx(floor)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("cosin", 1.0, 10), "'cosine'"),
        (("cosine", 1.0, 10, 11), r"0 \.\. 10"),
        (("cosine", 0.0, 10), "peak > 0"),
        (("cosine", 1.0, 10, 0, 1.5), "fraction"),
        (("cosine", 1.0, 10, 0, 0.0, 3), "no effect"),
        (("wsd", 1.0, 10, 5, 0.0, 6), r"1 \.\. 5"),
        (("constant", 1.0, 10, 0, 0.1), "no effect"),
    ],
)
def test_refusals(arguments, message):
    with pytest.raises(UserError, match=message):
        schedule(*arguments)
