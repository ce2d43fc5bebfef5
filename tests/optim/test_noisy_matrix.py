"""Muon on a problem whose constants are known: the bound of docs/convergence.md, step by step, and its tables."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from optim import noisy_matrix
from optim.noisy_matrix import (
    COLUMNS,
    CURVATURE,
    DEVIATION,
    LENGTHS,
    MOMENTA,
    NORMS,
    PARTS,
    RATES,
    ROWS,
    SETTLED,
    SHAPE,
    SHOWN,
    SMOOTHNESS,
    START,
    TARGET,
    TRUSTED,
    Case,
    bound,
    gain,
    gradient_norms,
    nuclear,
    of_length,
    orthogonal,
    predicted,
    read,
    shares,
)
from slipstream.optim import build
from slipstream.pipeline.emulator import Emulator

PAGE = Path(__file__).parents[2] / "docs" / "convergence.md"
MICROBATCHES = 6


class NoisyMatrix(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(COLUMNS, ROWS, bias=False, dtype=torch.float64)
        nn.init.zeros_(self.layer.weight)

    def forward(self, noise: Tensor) -> Tensor:
        error = self.layer.weight - TARGET
        return 0.5 * (CURVATURE * error * error).sum() + (noise[0] * self.layer.weight).sum()


@pytest.mark.parametrize("correction", ["none", "error_feedback"])
@pytest.mark.parametrize("cutover", [0, 2, 3, 6])
def test_these_runs_are_those_of_the_engine(cutover, correction):
    """`package` is Muon as the engine runs it, whatever the cutover; all microbatches of an update get one noise."""
    lr, momentum, updates = 0.3, 0.9, 12
    options = {"lr": lr, "momentum": momentum, "weight_decay": 0.0, "scale": "original"}
    emulator = Emulator(
        NoisyMatrix(), MICROBATCHES, lambda f, _: f, lambda m: build("muon", m, **options), correction,
        cutover=cutover,
    )  # fmt: skip
    generator, found = torch.Generator().manual_seed(3), []
    for _ in range(updates):
        weight = emulator.master.layer.weight.detach()
        found.append(float(nuclear(CURVATURE * (weight - TARGET))))
        noise = DEVIATION * torch.randn(1, *SHAPE, generator=generator, dtype=torch.float64)
        emulator.step(noise.expand(MICROBATCHES, -1, -1), torch.zeros(MICROBATCHES))
    case = Case(lr, momentum, cutover / MICROBATCHES, correction == "error_feedback")
    assert gradient_norms([case], updates, [3], exact=False)[0, 0].tolist() == pytest.approx(found, rel=1e-9)


def test_the_constants():
    generator = torch.Generator().manual_seed(0)
    errors = torch.randn(200, *SHAPE, generator=generator, dtype=torch.float64)
    errors = torch.cat([errors, orthogonal(errors), errors[:, :, :1] @ errors[:, :1]])
    spectral = torch.linalg.matrix_norm(errors, 2)
    assert bool((nuclear(CURVATURE * errors) <= SMOOTHNESS * spectral).all())
    one = torch.eye(*SHAPE, dtype=torch.float64)  # of spectral norm 1: no L below 4.38 would do
    assert 4.38 < float(nuclear(CURVATURE * one)) < SMOOTHNESS
    frobenius = torch.linalg.matrix_norm(errors)
    assert bool((nuclear(errors) <= NORMS * frobenius * (1 + 1e-9)).all())
    assert nuclear(errors[:9]).tolist() == pytest.approx(
        torch.linalg.matrix_norm(errors[:9], "nuc").tolist(), rel=1e-9
    )
    start = NoisyMatrix()(torch.zeros(1, *SHAPE, dtype=torch.float64)).detach()
    assert float(start) == pytest.approx(START)
    assert pytest.approx(4.53, abs=5e-3) == SMOOTHNESS
    assert pytest.approx(5.879, abs=5e-3) == noisy_matrix.NOISE
    assert pytest.approx(32.41, abs=5e-3) == START


@pytest.mark.parametrize("feedback", [False, True])
@pytest.mark.parametrize("old", [0.0, 1 / 3, 1.0])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_an_average_of_old_gradients_is_off_by_its_age(momentum, old, feedback):
    """On any walk of steps of length lr: at most L lr (mu / (1 - mu) + c/m), with error feedback twice c/m."""
    lr, generator = 0.3, torch.Generator().manual_seed(0)
    steps = lr * orthogonal(torch.randn(40, *SHAPE, generator=generator, dtype=torch.float64))
    steps[20:] = steps[20]  # straight on
    steps[30::2] *= -1  # and to and fro
    z = before = earlier = torch.zeros(SHAPE, dtype=torch.float64)
    average = None
    age = momentum / (1 - momentum) + old * (2 if feedback else 1)
    for step in steps:
        bank = 2 * before - earlier if feedback else before
        gradient = CURVATURE * ((1 - old) * z + old * bank - TARGET)
        average = gradient if average is None else momentum * average + (1 - momentum) * gradient
        off = float(nuclear(average - CURVATURE * (z - TARGET)))
        assert off <= SMOOTHNESS * lr * age + 1e-9
        z, before, earlier = z + step, z, before
    if feedback:  # to and fro, its bank is two steps away: the factor of two is attained
        assert float(torch.linalg.matrix_norm(z - (2 * before - earlier), 2)) == pytest.approx(2 * lr)


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9, 0.95, 0.99])
def test_an_average_that_starts_at_zero_is_younger_and_within_the_same_noise(momentum):
    """The package starts at m = 0, the bound at the first gradient. Muon does not see the size of an average."""
    weights, age = torch.ones(1, dtype=torch.float64), momentum / (1 - momentum)
    for update in range(300):
        ages = torch.arange(update, -1, -1)
        zero = torch.cat([weights[:1] * (1 - momentum), weights[1:]])
        zero = zero / zero.sum()
        limit = math.sqrt((1 - momentum) / (1 + momentum)) + momentum**update
        assert max(float(zero.norm()), float(weights.norm())) <= limit + 1e-12
        assert float((zero * ages).sum()) <= float((weights * ages).sum()) + 1e-9 <= age + 1e-6
        weights = torch.cat([momentum * weights, weights.new_tensor([1 - momentum])])


def test_the_bound_holds_and_is_loose():
    for length in LENGTHS:
        for old in (0.0, 0.5, 1.0):
            row = read()["exact", length, of_length(length, old)]
            assert 3 < sum(bound(length, row.case)) / row.level < 5
            assert bound(length, row.case).delay >= 15 * row.added


def test_what_delay_adds_falls_with_length_and_ever_faster():
    """Towards T^(-3/4), as the bound's term does, where the whole falls like T^(-1/4)."""
    table = read()
    rows = [table["exact", length, of_length(length, 1.0)] for length in LENGTHS]
    added = [row.added for row in rows]
    powers = [math.log(b / a) / math.log(4) for a, b in pairwise(added)]
    assert sorted(powers, reverse=True) == powers
    assert -0.75 < powers[-1] < -0.55
    assert math.log(rows[-1].level / rows[-2].level) / math.log(4) == pytest.approx(-0.25, abs=0.02)
    for row in rows:
        assert row.added > 20 * row.added_error
        half = table["exact", row.updates, of_length(row.updates, 0.5)]
        assert half.added / row.added == pytest.approx(0.49, abs=0.04)


def test_delay_may_help_where_a_run_is_short():
    assert read()["package", 64, of_length(64, 1.0)].added < 0


def test_what_delay_adds_grows_with_momentum_and_so_does_its_share():
    table = read()
    for muon in ("exact", "package"):
        rows = [table[muon, SETTLED[0], Case(0.2, mu, 1.0)] for mu in MOMENTA]
        assert all(a.added < b.added for a, b in pairwise(rows))
        found = [shares(muon)[0.2, mu][0] for mu in MOMENTA]
        assert sorted(found) == found


def test_the_share_follows_the_rate_that_muon_has_in_noise():
    """Within 15 % of 6.6 % at lr sqrt((1 + mu) / (1 - mu)) = 1, from 0.17 to 4, and a quarter more at momentum 0."""
    for (lr, mu), (share, _) in shares().items():
        expected = 0.066 if mu > 0 else 0.0825
        assert share / (lr * math.sqrt((1 + mu) / (1 - mu))) == pytest.approx(expected, rel=0.15), (lr, mu)


@pytest.mark.parametrize("muon", ["exact", "package"])
def test_what_delay_adds_by_rate_and_by_old_part(muon):
    table = read()
    added = [table[muon, SETTLED[0], Case(lr, 0.95, 1.0)].added for lr in RATES]
    for low, high in pairwise(added):
        assert 1.3 < math.log2(high / low) < 1.75
    for lr, mu in SHOWN:
        third, half, whole = (table[muon, SETTLED[0], Case(lr, mu, old)].added for old in PARTS[1:])
        assert 0.22 < third / whole <= 0.345
        assert 0.39 < half / whole <= 0.51
        fed = table[muon, SETTLED[0], Case(lr, mu, 1.0, feedback=True)].added
        assert abs(fed) < 0.1 * whole


def test_in_noise_muon_is_sgd_at_a_rate_of_its_own():
    """A small S in Gaussian noise: the mean orthogonal factor is gain() S, in every entry alike."""
    generator = torch.Generator().manual_seed(2)
    noise = torch.randn(4000, *SHAPE, generator=generator, dtype=torch.float64)
    small = torch.zeros(SHAPE, dtype=torch.float64)
    small[0, 0] = small[1, 1] = 0.5
    mean = (orthogonal(small + noise) + orthogonal(small - noise)).mean(0) / 2
    assert float(mean[0, 0] + mean[1, 1]) == pytest.approx(gain(), rel=0.03)
    mean[0, 0] = mean[1, 1] = 0.0
    assert float(mean.abs().max()) < 0.1 * gain()


def test_that_rate_predicts_where_muon_settles_and_what_delay_adds():
    for (lr, mu), (share, _) in shares().items():
        (level, _), (delayed, x) = predicted(Case(lr, mu)), predicted(Case(lr, mu, 1.0))
        measured = read()["exact", SETTLED[0], Case(lr, mu)].level
        assert level == pytest.approx(measured, rel=0.12 if mu == 0 else 0.05), (lr, mu)
        if x < TRUSTED:
            assert delayed / level - 1 == pytest.approx(share, rel=0.17), (lr, mu)


@pytest.mark.parametrize("muon", ["exact", "package"])
def test_rows_of_the_table_are_found_again(muon):
    cases = [of_length(64, old) for old in (0.0, 0.5, 1.0)]
    for row in noisy_matrix.measure(muon, cases, 64, 0, LENGTHS[64]):
        kept = read()[muon, 64, row.case]
        assert (row.level, row.added) == pytest.approx((kept.level, kept.added), rel=0.02)
    case, (updates, skip, seeds) = Case(0.2, 0.95, 1.0), SETTLED
    kept = read()[muon, updates, case]
    one = float(gradient_norms([case], updates, [1], muon == "exact")[:, :, skip:].mean())
    assert abs(one - kept.level) < 4 * kept.level_error * math.sqrt(seeds)


@pytest.mark.parametrize("kind", ["bound", "length", "settled"])
def test_the_page_has_the_rows_that_are_computed(kind):
    page = PAGE.read_text()
    assert [row for row in getattr(noisy_matrix, f"{kind}_rows")() if row not in page] == []
