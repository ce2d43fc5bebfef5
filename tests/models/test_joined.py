"""q, k and v as one product: the same outputs and gradients, and only where nothing stands against it."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from slipstream.models.llama import Attention, rotary_table
from slipstream.models.sizes import ModelConfig

SHAPE = ModelConfig(vocab=61, dim=48, layers=1, heads=6, kv_heads=2, ffn=40)


@pytest.fixture
def products(monkeypatch):
    """As compiled code computes, without compiling; the output sides of the products of `F.linear`."""
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    found, linear = [], F.linear

    def counted(x, weight, bias=None):
        found.append(weight.shape[0])
        return linear(x, weight, bias)

    monkeypatch.setattr(F, "linear", counted)
    return found


def attention(dtype=torch.float64, **changes):
    torch.manual_seed(0)
    return Attention(ModelConfig(**{**vars(SHAPE), **changes})).to(dtype)


def passed(module, mask=None):
    """Output, and gradients of the input and of every parameter."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, 5, SHAPE.dim, generator=generator, dtype=torch.float64, requires_grad=True)
    x_here = x.to(module.o.weight.dtype)
    tables = rotary_table(5, 8, 1e4, torch.device("cpu"))
    out = module(x_here, *tables, mask)
    seed = torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out.dtype)
    names, parameters = zip(*module.named_parameters(), strict=True)
    grads = torch.autograd.grad(out, (x, *parameters), seed)
    return {"out": out.detach(), **dict(zip(("x", *names), grads, strict=True))}


@pytest.mark.parametrize("heads", [(6, 2), (6, 6)], ids=str)
@pytest.mark.parametrize("masked", [False, True])
def test_joined_products_give_what_separate_ones_do(heads, masked, products, monkeypatch):
    module = attention(heads=heads[0], kv_heads=heads[1])
    mask = torch.ones(5, 5, dtype=torch.bool).tril() if masked else None
    joined = passed(module, mask)
    assert products == [(heads[0] + 2 * heads[1]) * 8, SHAPE.dim]
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: False)
    apart = passed(module, mask)
    assert len(products) == 6
    for name, expected in apart.items():
        torch.testing.assert_close(joined[name], expected, rtol=1e-12, atol=1e-13, msg=name)


def test_the_backward_does_not_keep_the_joined_product(products):
    kept = []

    def keep(tensor):
        kept.append(tensor.untyped_storage().nbytes())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        passed(attention())
    assert 2 * 5 * products[0] * 8 not in kept  # B T and the columns of q, k and v, in float64
    assert 2 * 5 * SHAPE.kv_heads * SHAPE.head_dim * 8 in kept  # v by itself


def test_eager_code_is_as_it_was(products, monkeypatch):
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: False)
    passed(attention())
    assert len(products) == 4


class Narrow(nn.Linear):
    """Of another library, as those in fp8 are."""


class Sharded(torch.Tensor):
    """As a DTensor is: another class, whose products are its own."""


def with_another_class(module):
    narrow = Narrow(48, 16, bias=False, dtype=torch.float64)
    narrow.weight = module.v.weight
    module.v = narrow


def with_another_tensor(module):
    module.k.weight = nn.Parameter(module.k.weight.detach().as_subclass(Sharded))


def with_a_bias(module):
    module.q.bias = nn.Parameter(torch.zeros(48, dtype=torch.float64))


@pytest.mark.parametrize("change", [with_another_class, with_another_tensor, with_a_bias])
def test_what_is_no_plain_product_stays_apart(change, products):
    module = attention()
    plain = passed(copy.deepcopy(module))["out"]
    assert len(products) == 2
    change(module)
    torch.testing.assert_close(passed(module)["out"].as_subclass(torch.Tensor), plain)
    assert len(products) >= 6


def test_norms_of_queries_and_keys_stand_between(products):
    passed(attention(qk_norm=True))
    assert len(products) == 4
