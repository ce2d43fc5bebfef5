"""The ideas of the search, against their equations."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from slipstream.errors import UserError
from slipstream.optim import Publication, build, build_correction
from slipstream.optim.innovation import InnovationFeedback
from slipstream.pipeline.emulator import Emulator
from slipstream.study.adaptive import AdaptiveErrorFeedback, SplitErrorFeedback

ADAPTIVE = "slipstream.study.adaptive:AdaptiveErrorFeedback"


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(4, 8)
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])
        self.head = nn.Linear(8, 3)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.head(x)


def batch(group: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(group), dtype=torch.float64)
    return x, x[:, :3].sin()


def emulator(correction, synchronous: int = 0) -> Emulator:
    return Emulator(
        Network(),
        2,
        lambda output, target: (output - target).square().mean(),
        lambda module: build("adamw", module, lr=1e-2),
        correction,
        synchronous=synchronous,
    )


def test_the_measured_strength_is_the_one_that_predicts_the_last_steps():
    """λ against the running mean of inner products of real consecutive steps, which it never stores."""
    correction = AdaptiveErrorFeedback(memory=0.8)
    trained = emulator(correction)
    masters: list[list[Tensor]] = []
    for group in range(12):
        masters.append([p.detach().clone() for p in trained.master.parameters()])
        trained.step(*batch(group))
    masters.append([p.detach().clone() for p in trained.master.parameters()])
    steps = [[b - a for a, b in zip(x, y, strict=True)] for x, y in pairwise(masters)]
    for index, found in enumerate(correction.strengths()):
        inner = square = 0.0
        # The newest bank (after step 11) rests on pairs up to (d_9, d_10); the first is (d_0, d_1), at group 2.
        for before, after in pairwise(steps[:11]):
            inner = 0.8 * inner + 0.2 * float((before[index] * after[index]).sum())
            square = 0.8 * square + 0.2 * float(before[index].square().sum())
        assert found == pytest.approx(min(1.5, max(0.1, inner / square)), rel=2e-3)
    assert len({round(value, 3) for value in correction.strengths()}) > 2  # tensors differ


def test_it_publishes_with_that_strength():
    correction = AdaptiveErrorFeedback()
    new, old = torch.randn(3, 3), torch.randn(3, 3)
    bank, expected = old.clone(), new + (new - old)
    optimizer = torch.optim.SGD([nn.Parameter(new)], lr=1.0)
    correction.publish(Publication([bank], [new], [bank], optimizer, [nn.Parameter(new)], 1))
    assert torch.allclose(bank, expected)  # λ = 1 until something is measured


def test_a_flushed_start_teaches_it_nothing():
    correction = AdaptiveErrorFeedback(lam=0.7)
    trained = emulator(correction, synchronous=6)
    for group in range(7):
        trained.step(*batch(group))
    trained.drain()
    assert correction.strengths() == pytest.approx([0.7] * len(correction.strengths()))
    trained.step(*batch(7))
    trained.step(*batch(8))
    trained.drain()
    assert correction.strengths() != pytest.approx([0.7] * len(correction.strengths()))


def test_it_goes_on_exactly_after_a_restart():
    whole, first = emulator(ADAPTIVE), emulator(ADAPTIVE)
    for group in range(8):
        whole.step(*batch(group))
        if group < 5:
            first.step(*batch(group))
    second = emulator(ADAPTIVE)
    second.load_state_dict(first.state_dict())
    for group in range(5, 8):
        second.step(*batch(group))
    for one, other in zip(whole.master.parameters(), second.master.parameters(), strict=True):
        assert torch.equal(one, other)


def test_it_measures_one_update_of_delay_only():
    weight = torch.zeros(2, 2)
    optimizer = torch.optim.SGD([nn.Parameter(weight)], lr=1.0)
    with pytest.raises(UserError, match="a delay of 1, not 3"):
        AdaptiveErrorFeedback().publish(Publication([weight], [weight], [weight], optimizer, [], 3))


@pytest.mark.parametrize("lam", [0.0, 0.5])
def test_the_split_looks_ahead_with_matrices_and_less_with_the_rest(lam):
    module = nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(4, 4)]), "norm": nn.LayerNorm(4)})
    optimizer = build("muon", module)
    params = list(module.parameters())
    old = [torch.randn_like(p) for p in params]
    new = [torch.randn_like(p) for p in params]
    banks = [o.clone() for o in old]
    SplitErrorFeedback(lam).publish(Publication(banks, new, banks, optimizer, params, 1))
    for parameter, bank, n, o in zip(params, banks, new, old, strict=True):
        factor = 1.0 if parameter.ndim == 2 else lam
        assert torch.allclose(bank, n + factor * (n - o))


def test_innovation_publishes_the_step_and_a_share_of_the_last_miss():
    """b_{g+1} = z_{g+1} + d_{g+1} + κ (z_g - b_{g-1}), from masters and banks that are written down here."""
    trained = emulator(InnovationFeedback(0.3))
    masters, banks = [], []
    for group in range(6):
        masters.append([p.detach().clone() for p in trained.master.parameters()])
        versions = trained._versions[0]
        banks.append([w.clone() for w in versions.replica(group).weights])  # what group reads: b_{group-1}
        trained.step(*batch(group))
    for group in range(3, 6):  # group reads b_{group-1}, which update group-2 published
        new, old, miss = masters[group - 1], masters[group - 2], banks[group - 2]
        for z, before, read, found in zip(new, old, miss, banks[group], strict=True):
            assert torch.allclose(found, z + (z - before) + 0.3 * (before - read), atol=1e-14)


def test_innovation_without_a_share_is_error_feedback():
    one, other = emulator(InnovationFeedback(0.0)), emulator("error_feedback")
    for group in range(6):
        one.step(*batch(group))
        other.step(*batch(group))
    for a, b in zip(one.master.parameters(), other.master.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-14)
    with pytest.raises(UserError, match="between -1 and 1"):
        InnovationFeedback(1.0)


def test_a_correction_is_found_by_its_place():
    assert isinstance(build_correction(ADAPTIVE, lam=0.5), AdaptiveErrorFeedback)
    with pytest.raises(UserError, match="cannot be found"):
        build_correction("slipstream.study.adaptive:Nothing")
    with pytest.raises(UserError, match="is no correction"):
        build_correction("slipstream.study.adaptive:Tensor")
