"""The polynomials of Newton-Schulz: what they do to singular values, and that no others come nearer."""

from __future__ import annotations

from itertools import chain

import numpy as np
import pytest
import torch
from torch import nn

from slipstream.errors import UserError
from slipstream.optim import build
from slipstream.optim.muon import Muon
from slipstream.optim.newton_schulz import on_one_gram
from slipstream.optim.polynomials import polynomials

LEAST, MOST = 0.003, 1.01  # what polar_express is made for


def applied(iterations, x):
    for a, b, c in iterations:
        x = a * x + b * x**3 + c * x**5
    return x


@pytest.mark.parametrize(
    ("name", "steps", "least", "low", "high"),
    [
        ("jordan", 5, 0.0015, 0.679, 1.203),
        ("polar_express", 4, LEAST, 0.799, 1.201),
        ("polar_express", 5, LEAST, 0.994, 1.006),
        ("polar_express", 8, LEAST, 0.99999, 1.00001),
    ],
)
def test_where_singular_values_end(name, steps, least, low, high):
    found = applied(
        polynomials(name, steps), np.geomspace(least, MOST if name == "polar_express" else 1.0, 100_001)
    )
    assert low <= found.min()
    assert found.max() <= high


@pytest.mark.parametrize("step", range(5))
def test_no_odd_quintic_comes_nearer(step):
    """By Chebyshev: one whose error has its largest size at four places, with signs in turn, is the best."""
    low, high = LEAST, MOST
    for before in polynomials("polar_express", 5)[:step]:
        image = applied([before], np.linspace(low, high, 200_001))
        low, high = image.min(), image.max()
    error = applied([polynomials("polar_express", 5)[step]], np.linspace(low, high, 200_001)) - 1
    largest = np.abs(error).max()
    signs = np.sign(error[np.abs(error) > largest * (1 - 2e-3)])
    assert np.count_nonzero(np.diff(signs)) == 3
    assert largest < 1


def test_the_last_one_is_repeated():
    assert polynomials("polar_express", 9)[5:] == ((1.875, -1.25, 0.375),) * 4
    assert len(set(polynomials("jordan", 9))) == 1


@pytest.mark.parametrize(
    ("name", "steps", "parts"),
    [("jordan", 5, [3, 2]), ("jordan", 3, [3]), ("polar_express", 4, [2, 2]), ("polar_express", 5, [2, 3])],
)
def test_a_gram_matrix_is_made_anew_before_rounding_shows(name, steps, parts):
    found = list(on_one_gram(polynomials(name, steps)))
    assert [len(part) for part in found] == parts
    assert tuple(chain.from_iterable(found)) == polynomials(name, steps)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"polynomial": "quintic"}, "no polynomial 'quintic'. Set polynomial to jordan or polar_express"),
        ({"steps": 0}, "whole steps >= 1, not steps=0"),
        ({"steps": 2.5}, "whole steps >= 1, not steps=2.5"),
    ],
)
def test_refusals(options, message):
    with pytest.raises(UserError, match=message):
        build("muon", nn.Linear(3, 3), **options)


def test_a_state_from_before_there_was_a_choice_is_jordans():
    weight = nn.Parameter(torch.eye(4, 6))
    state = Muon([{"params": [weight], "algorithm": "muon"}]).state_dict()
    del state["param_groups"][0]["polynomial"]
    fresh = Muon([{"params": [weight], "algorithm": "muon"}], polynomial="polar_express")
    fresh.load_state_dict(state)
    weight.grad = torch.ones(4, 6)
    fresh.step()
    assert fresh.param_groups[0]["polynomial"] == "jordan"
