"""AdamW with a bound on its longest directions: what is cut, by either basis, in batches and after a reload."""

from __future__ import annotations

import copy
from operator import is_

import pytest
import torch
from torch import nn

from optim.test_build import Toy, train
from slipstream.optim import build, capped
from slipstream.torch_private import copy_


@pytest.mark.parametrize(("basis", "updates"), [("qr", 8), ("cholesky", 16)])
def test_the_longest_directions_are_followed_and_cut(basis, updates):
    """Of 40 directions 8 are followed, and one is long, as where a gradient agrees all over. Once they are found, the
    longest that is left is the ninth. The first step is of rank one but for 1e-8, which QR alone starts from."""
    module = nn.Sequential(nn.Linear(40, 64, bias=False)).double()
    optimizer = build("adamw_capped", module, lr=1.0, weight_decay=0.0, cap=0.3, basis=basis)
    generator = torch.Generator().manual_seed(0)
    signs = torch.randn(64, 40, generator=generator).sign().double()
    signs[:, :30] = signs[:, :1]
    steps = []
    for _ in range(updates):
        before = module[0].weight.detach().clone()
        module[0].weight.grad = signs + 0.1 * torch.randn(64, 40, generator=generator).double()
        optimizer.step()
        steps.append(torch.linalg.svdvals(module[0].weight.detach() - before))
    plain = torch.linalg.svdvals(signs).tolist()
    assert plain[0] > 40
    assert all(step[0] < plain[1] for step in steps)  # the one long direction from the first update on
    assert float(steps[-1][0]) == pytest.approx(plain[8], rel=0.05)
    bound = torch.full((5,), 0.3 * 64**0.5, dtype=torch.float64)
    torch.testing.assert_close(steps[-1][3:8], bound)


@pytest.mark.parametrize("shape", [(40, 64), (640, 400), (5, 6), (3, 24, 40)])
@pytest.mark.parametrize("noise", [1.0, 0.3, 0.01])
def test_a_basis_by_cholesky_cuts_what_one_by_qr_cuts(shape, noise):
    """In float32, in a step that has one long direction in noise."""
    generator = torch.Generator().manual_seed(0)
    step = 1 + noise * torch.randn(shape, generator=generator)
    side = min(shape[-2:])
    before = torch.linalg.qr(torch.randn(*shape[:-2], side, min(8, side), generator=generator)).Q
    cut = []
    for orthonormal in capped.BASES.values():
        basis = orthonormal(capped._followed(step, before))
        whole = torch.eye(basis.shape[-1]).expand(*shape[:-2], -1, -1)
        torch.testing.assert_close(basis.mT @ basis, whole, atol=2e-6, rtol=0)
        cut.append(capped._excess(step, basis, cap=0.1))
    assert float((cut[0] - cut[1]).norm() / step.norm()) < 5e-6


def test_capped_adamw_by_cholesky_trains_also_after_a_copy_and_from_an_older_state():
    module = Toy()
    optimizer = build("adamw_capped", module, basis="cholesky")
    train(module, optimizer, range(2))
    assert copy.deepcopy(optimizer).param_groups[0]["basis"] == "cholesky"
    state = optimizer.state_dict()
    for group in state["param_groups"]:
        del group["basis"]
    optimizer.load_state_dict(state)
    train(module, optimizer, range(2, 4))
    assert all(parameter.isfinite().all() for parameter in module.parameters())


@pytest.mark.parametrize("step", [torch.zeros(40, 64), torch.ones(40, 64), torch.eye(40, 64)])
def test_a_step_of_few_directions_leaves_a_whole_basis(step):
    """Zero, one and equal ones; and the one that is long is in it."""
    basis = capped._by_cholesky(capped._followed(step, capped._start(step)))
    torch.testing.assert_close(basis.mT @ basis, torch.eye(8), atol=2e-6, rtol=0)
    if step.count_nonzero() == step.numel():
        assert float((basis.mT @ torch.ones(40)).norm()) == pytest.approx(40**0.5)
    again = capped._by_cholesky(capped._followed(torch.ones(40, 64), basis))
    assert float((again.mT @ torch.ones(40)).norm()) == pytest.approx(40**0.5)


def test_capped_adamw_in_batches_as_on_a_gpu(monkeypatch):
    alone, together = Toy(), Toy()
    train(alone, build("adamw_capped", alone), range(4))

    def by_shape(parameters):
        shapes = {parameter.shape for parameter in parameters}
        return [[p for p in parameters if p.shape == shape] for shape in shapes]

    monkeypatch.setattr(capped, "_together", by_shape)
    train(together, build("adamw_capped", together), range(4))
    for one, other in zip(alone.parameters(), together.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


def test_equal_shapes_share_a_batch_unless_bits_may_not_depend_on_it():
    shapes = [(4, 6), (4, 6), (6, 4)]

    def sizes(device):
        params = [nn.Parameter(torch.empty(shape, device=device)) for shape in shapes]
        return [len(batch) for batch in capped._together(params)]

    assert (sizes("meta"), sizes("cpu")) == ([2, 1], [1, 1, 1])
    torch.use_deterministic_algorithms(True)
    try:
        assert sizes("meta") == [1, 1, 1]
    finally:
        torch.use_deterministic_algorithms(False)


def test_capped_adamw_takes_narrow_weights_also_after_a_reload():
    module = nn.Sequential(nn.Linear(6, 6, bias=False)).bfloat16()
    optimizer = build("adamw_capped", module)
    train(module, optimizer, range(2))
    again = build("adamw_capped", module)
    again.load_state_dict(optimizer.state_dict())  # torch narrows the state to the weights' kind
    before = module[0].weight.detach().clone()
    train(module, again, range(2, 4))
    assert module[0].weight.isfinite().all()
    assert not torch.equal(module[0].weight, before)


def test_the_basis_is_state_like_any_other(monkeypatch):
    """Written in place, all of a batch in one call, in memory of its own and in float32, whatever was loaded."""
    calls = []
    monkeypatch.setattr(capped, "_together", lambda parameters: [parameters])
    monkeypatch.setattr(capped, "copy_", lambda outs, given: calls.append(len(outs)) or copy_(outs, given))
    module = nn.ModuleList(nn.Linear(6, 5, bias=False) for _ in range(3)).bfloat16()
    optimizer = build("adamw_capped", module)

    def bases():
        for parameter in module.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
        return [optimizer.state[parameter]["basis"] for parameter in module.parameters()]

    first = bases()
    assert all(basis.untyped_storage().nbytes() == basis.nbytes for basis in first)
    assert all(map(is_, bases(), first))
    optimizer.load_state_dict(optimizer.state_dict())
    assert {basis.dtype for basis in bases()} == {torch.float32}
    assert calls == [3, 3, 3]
