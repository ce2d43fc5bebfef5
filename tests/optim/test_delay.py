"""Theory made visible: what delay and error feedback do to SGD, and the figures of docs/convergence.md."""

from __future__ import annotations

import math

import pytest

from optim.delay_figures import CASES, FIGURES, figures, read_numbers, sgd_growth, sgd_threshold
from slipstream.optim import RECIPES

SYNCHRONOUS, DELAY, FEEDBACK = CASES


@pytest.fixture(scope="module")
def drawn():
    return {name: curves for name, (_, curves) in figures().items()}


@pytest.mark.parametrize(
    ("case", "momentum", "threshold"),
    [
        (SYNCHRONOUS, 0.0, 2.0),
        (DELAY, 0.0, 1.0),
        (FEEDBACK, 0.0, (math.sqrt(5) - 1) / 2),
        (SYNCHRONOUS, 0.9, 38.0),
        (DELAY, 0.9, 1.0),
        (FEEDBACK, 0.9, 2.702),
    ],
)
def test_stability_of_sgd(case, momentum, threshold):
    """Delay halves the stable rate; with momentum 0.9 it takes 38 to 1, and feedback gives back 2.7."""
    assert sgd_threshold(case, momentum) == pytest.approx(threshold, rel=1e-3)
    assert sgd_growth(case, 0.9 * threshold, momentum) < 0.5
    assert sgd_growth(case, 1.1 * threshold, momentum) > 2.0


def test_the_figures_are_those_of_the_docs(drawn):
    page = (FIGURES.parent / "convergence.md").read_text()
    for name, curves in drawn.items():
        assert f"figures/{name}.svg" in page
        shown = read_numbers(FIGURES / f"{name}.svg")
        for case, points in curves.items():
            for point, shown_point in zip(points, shown[case], strict=True):
                assert point == pytest.approx(shown_point, rel=1e-3, abs=1e-9), (name, case)


def test_the_docs_list_every_optimizer_with_its_defaults():
    page = (FIGURES.parent / "delay.md").read_text()
    for name, recipe in RECIPES.items():
        own = {k: v for k, v in recipe.defaults.items() if not k.startswith("adamw_") and v is not None}
        defaults = ", ".join(f"{key} {value}" for key, value in own.items())
        assert f"| `{name}` | {defaults} | {recipe.known.source} |" in page, name
