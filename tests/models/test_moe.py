"""Routed experts against a reference that loops over tokens, in value and gradient."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from slipstream.models.moe import MoE
from slipstream.models.sizes import ModelConfig

CONFIG = ModelConfig(vocab=8, dim=16, layers=1, heads=2, kv_heads=1, ffn=24, experts=5, experts_per_token=2)


def routed(dtype, config=CONFIG):
    moe = MoE(config)
    generator = torch.Generator().manual_seed(0)
    for parameter in moe.parameters():
        parameter.data = 0.4 * torch.randn(parameter.shape, generator=generator)
    return moe.to(dtype)


def reference(moe, x):
    """One token at a time, as the definition reads."""
    rows = []
    for token in x.reshape(-1, x.shape[-1]):
        weights, chosen = (moe.router.weight @ token).softmax(0).topk(moe.top_k)
        experts = [
            moe.down[e] @ (F.silu(moe.gate[e] @ token) * (moe.up[e] @ token)) * w
            for e, w in zip(chosen.tolist(), weights / weights.sum(), strict=True)
        ]
        rows.append(torch.stack(experts).sum(0))
    return torch.stack(rows).view_as(x)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
@pytest.mark.parametrize("top_k", [1, 2, 5])
def test_value_and_gradient_are_those_of_the_definition(dtype, tolerance, top_k):
    moe = routed(dtype, replace(CONFIG, experts_per_token=top_k))
    x = torch.randn(3, 7, 16, dtype=dtype, generator=torch.Generator().manual_seed(1)).requires_grad_()
    inputs = [x, *moe.parameters()]
    y, _ = moe(x)
    expected = reference(moe, x)
    assert torch.allclose(y, expected, rtol=tolerance, atol=tolerance)
    ours = torch.autograd.grad(y.square().sum(), inputs, allow_unused=True)
    theirs = torch.autograd.grad(expected.square().sum(), inputs, allow_unused=True)
    scale = max(
        gradient.abs().max() for gradient in theirs
    )  # with k = 1 the router's is zero but for rounding
    for a, b in zip(ours, theirs, strict=True):
        assert torch.allclose(a / scale, b / scale, rtol=0, atol=10 * tolerance)


def test_an_expert_without_tokens_is_no_special_case():
    moe = routed(torch.float32)
    with torch.no_grad():
        moe.router.weight[3] = -100 * torch.ones(16)
    x = torch.rand(1, 9, 16)  # positive, so expert 3 is never chosen
    y, _ = moe(x)
    assert torch.allclose(y, reference(moe, x), atol=1e-5)
    y.sum().backward()
    assert not moe.gate.grad[3].any()
    assert moe.gate.grad[0].any()


def test_losses_are_their_definitions():
    moe = routed(torch.float64)
    x = torch.randn(2, 11, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    _, (balance, z) = moe(x)
    logits = x.reshape(-1, 16) @ moe.router.weight.T
    chosen = F.one_hot(logits.topk(2).indices, 5).sum((0, 1)) / (22 * 2)
    assert torch.allclose(balance, 5 * (chosen * logits.softmax(-1).mean(0)).sum())
    assert torch.allclose(z, torch.log(logits.exp().sum(-1)).square().mean())


def test_even_routing_has_balance_one_and_collapse_has_more():
    moe = routed(torch.float32)
    torch.nn.init.zeros_(moe.router.weight)
    assert moe(torch.randn(1, 8, 16))[1][0].item() == pytest.approx(1.0)
    with torch.no_grad():
        moe.router.weight[0] += 50
        moe.router.weight[1] += 49
    assert moe(torch.rand(1, 8, 16))[1][0].item() > 2.0


def test_two_runs_agree_to_the_bit():
    results = []
    for _ in range(2):
        moe = routed(torch.float32)
        x = torch.randn(4, 16, 16, generator=torch.Generator().manual_seed(3)).requires_grad_()
        moe(x)[0].square().sum().backward()
        results.append([x.grad, *(p.grad for p in moe.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("autocast", [False, True])
def test_bfloat16_takes_the_grouped_product_and_stays_close(autocast):
    """The path a GPU takes: bfloat16 weights, or float32 weights under autocast."""
    exact = routed(torch.float32)
    narrow = routed(torch.float32 if autocast else torch.bfloat16)
    x = torch.randn(2, 16, 16, generator=torch.Generator().manual_seed(4)).bfloat16()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y, losses = narrow(x.float() if autocast else x)
    assert y.dtype == (torch.float32 if autocast else torch.bfloat16)
    assert losses.dtype == torch.float32  # routing is decided in float32 whatever the rest is in
    expected, exact_losses = exact(x.float())
    # Routing near a tie may differ by the rounding of the router's weights; no token is near one here.
    assert (y - expected).norm() < 0.03 * expected.norm()
    assert torch.allclose(losses, exact_losses, rtol=0.02)
    y.float().square().sum().backward()
    assert all(torch.isfinite(p.grad).all() and p.grad.any() for p in narrow.parameters())
