"""A quadratic with known constants: delay, momentum and the cutover do what docs/convergence.md says."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from optim import quadratic
from slipstream.optim import build
from slipstream.pipeline.emulator import Emulator

MOMENTA = (0.0, 0.5, 0.9, 0.95)
MICROBATCHES = 12
CUTOVERS = (0, 3, 4, 6, 9, 12)  # a quarter, a third, half, three quarters, all of an update old


class Quadratic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(1, dtype=torch.float64))

    def forward(self, _: torch.Tensor) -> torch.Tensor:
        return 0.5 * self.w.square().sum()


def emulated(x: float, momentum: float, cutover: int, correction: str, updates: int) -> list[float]:
    """z_0, z_1, ... of the engine's rule; curvature 1, so that lr is lr times curvature."""
    emulator = Emulator(
        Quadratic(),
        MICROBATCHES,
        lambda loss, _: loss,
        lambda module: build("sgd", module, lr=x, momentum=momentum, dampening=momentum),
        correction,
        cutover=cutover,
    )
    found = [1.0]
    for _ in range(updates):
        emulator.step(torch.zeros(MICROBATCHES, 1), torch.zeros(MICROBATCHES))
        found.append(float(emulator.master.w.detach()))
    return found


@pytest.mark.parametrize("correction", ["none", "error_feedback"])
@pytest.mark.parametrize("cutover", CUTOVERS)
def test_the_engine_follows_the_recursion(cutover, correction):
    """From the second update on: the first has no older weights, and no momentum yet."""
    x, momentum = 0.7, 0.9
    got = emulated(x, momentum, cutover, correction, 24)
    a = quadratic.coefficients(x, momentum, cutover / MICROBATCHES, correction == "error_feedback")
    for g in range(3, 24):
        assert got[g + 1] == pytest.approx(sum(c * got[g - k] for k, c in enumerate(a)), abs=1e-12)


@pytest.mark.parametrize("cutover", [0, 3, 4, 6, 12])
def test_the_engine_is_stable_up_to_the_limit_and_not_beyond(cutover):
    limit = quadratic.closed_limit(0.0, cutover / MICROBATCHES)
    assert max(map(abs, emulated(0.9 * limit, 0.0, cutover, "none", 80)[-5:])) < 0.1
    assert max(map(abs, emulated(1.1 * limit, 0.0, cutover, "none", 80)[-5:])) > 10.0


@pytest.mark.parametrize("momentum", MOMENTA)
@pytest.mark.parametrize("old", [0.0, 0.25, 1 / 3, 0.5, 0.75, 1.0])
def test_the_limit_in_closed_form(momentum, old):
    assert quadratic.limit(momentum, old) == pytest.approx(quadratic.closed_limit(momentum, old), rel=1e-6)


def test_up_to_half_of_a_group_may_be_old_without_loss_of_stability():
    """Plain SGD: 2 for synchronous training, 1 for 2BW, 2 again at a half, and 3 at a third."""
    assert [quadratic.closed_limit(0.0, old) for old in (0.0, 1.0, 0.5)] == [2.0, 1.0, 2.0]
    assert quadratic.closed_limit(0.0, 1 / 3) == pytest.approx(3.0)
    assert quadratic.closed_limit(0.0, 0.25) == pytest.approx(4.0)


def test_feedback_narrows_what_plain_sgd_can_stand_and_widens_what_momentum_can():
    assert quadratic.limit(0.0, 1.0, feedback=True) == pytest.approx((math.sqrt(5) - 1) / 2, rel=1e-6)
    for momentum in (0.9, 0.95):
        for old in (1 / 3, 0.5, 1.0):
            assert quadratic.limit(momentum, old, feedback=True) > 1.5 * quadratic.limit(momentum, old)


@pytest.mark.parametrize("momentum", MOMENTA)
@pytest.mark.parametrize("old", [0.0, 1 / 3, 0.5, 1.0])
def test_the_noise_that_is_left_grows_in_proportion_to_the_old_part(momentum, old):
    for x in (1e-3, 0.2, 0.6):
        ratio = quadratic.level(x, momentum, old) / quadratic.level(x, momentum, 0.0)
        assert ratio == pytest.approx(quadratic.closed_excess(x, momentum, old), rel=1e-8)
        s = quadratic.covariance(x, momentum, old)
        assert quadratic.closed_level(x, momentum, old) == pytest.approx(float(s[0, 0]) * 2 / x, rel=1e-6)
        step = 2 * float(s[0, 0] - s[0, 1]) / x**2 * (1 + momentum) / (1 - momentum)
        assert quadratic.closed_average(x, momentum, old) == pytest.approx(step, rel=1e-4)
    small = 1e-3
    assert quadratic.closed_excess(small, momentum, old) - 1 == pytest.approx(
        small * old, rel=2e-3, abs=1e-12
    )


@pytest.mark.parametrize(
    ("momentum", "old", "feedback"), [(0.0, 1.0, False), (0.9, 0.5, False), (0.9, 1.0, True)]
)
def test_noisy_runs_settle_where_the_linear_system_says(momentum, old, feedback):
    """20,000 runs: the standard error of a variance is 1 % of it, and the seed is fixed."""
    expected = quadratic.level(0.3, momentum, old, feedback)
    assert quadratic.simulated_level(0.3, momentum, old, feedback) == pytest.approx(expected, rel=0.04)


def test_feedback_removes_the_first_order_where_there_is_momentum():
    for momentum in (0.9, 0.95):
        lost = quadratic.closed_excess(0.1, momentum, 1.0) - 1
        kept = quadratic.level(0.1, momentum, 1.0, feedback=True) / quadratic.level(0.1, momentum, 0.0) - 1
        assert abs(kept) < 0.25 * lost
