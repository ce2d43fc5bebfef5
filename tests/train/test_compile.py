"""How replicas are compiled: by layer or as one, one compilation for all of them, the same numbers."""

from __future__ import annotations

import copy
from functools import partialmethod

import pytest
import torch
from torch import nn

from slipstream.config import load
from slipstream.models import loss
from slipstream.models.loss import TokenLoss
from slipstream.models.sizes import ModelConfig
from slipstream.models.stages import build_model
from slipstream.train import build

SHAPE = ModelConfig(vocab=32, dim=16, layers=3, heads=4, kv_heads=2, ffn=32)


@pytest.fixture
def graphs(monkeypatch):
    """Every graph that torch.compile captures; each runs as it was captured."""
    torch.compiler.reset()
    found = []

    def backend(graph, _):
        found.append(graph)
        return graph.forward

    monkeypatch.setattr(nn.Module, "compile", partialmethod(nn.Module.compile, backend=backend))
    whole = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda function, **options: whole(function, **{"backend": backend} | options)
    )
    yield found
    torch.compiler.reset()


@pytest.mark.parametrize(("how", "count"), [("layers", 2), ("stage", 1), (True, 1)])
def test_replicas_and_layers_share_their_compilations(graphs, how, count):
    plain = build_model(SHAPE, 0)
    tokens = torch.randint(32, (2, 8), generator=torch.Generator().manual_seed(0))
    TokenLoss()(plain(tokens), tokens).backward()
    for _ in range(2):
        replica = copy.deepcopy(plain)
        replica.zero_grad()
        TokenLoss()(build._compiled(replica, how, None)(tokens), tokens).backward()
        for (name, a), b in zip(plain.named_parameters(), replica.parameters(), strict=True):
            assert torch.allclose(a.grad, b.grad, rtol=1e-4, atol=1e-6), name
    assert len(graphs) == count  # by layer: one for the layers and one for the last norm


@pytest.mark.parametrize(
    ("start", "fixed"), [("pipeline.fine_start=3", True), ("pipeline.fine_start=0", False)]
)
def test_the_microbatches_of_a_fine_start_are_compiled_for_their_own_size(graphs, start, fixed):
    """Code for any size, to which the compiler would go over at the second, is slower."""
    dynamic = build.dynamic(load(None, [start]))
    for rows in (2, 8):
        replica = build._compiled(build_model(SHAPE, 0), "layers", dynamic)
        replica(torch.zeros(rows, 8, dtype=torch.long)).sum().backward()
    assert len(graphs) == 4
    assert any("SymInt" in graph.code for graph in graphs) != fixed


def test_joined_products_are_compiled_and_eager_ones_are_apart(graphs):
    plain = build_model(SHAPE, 0)
    replica = copy.deepcopy(plain)
    tokens = torch.randint(32, (2, 8), generator=torch.Generator().manual_seed(0))
    TokenLoss()(plain(tokens), tokens).backward()
    TokenLoss()(build._compiled(replica, "layers", None)(tokens), tokens).backward()
    for (name, a), b in zip(plain.named_parameters(), replica.parameters(), strict=True):
        assert torch.allclose(a.grad, b.grad, rtol=1e-4, atol=1e-6), name
    layer = next(graph for graph in graphs if "scaled_dot_product" in graph.code)
    assert layer.code.count("linear(") == 5  # q, k and v as one, o, and three of the MLP


@pytest.mark.parametrize(("how", "count"), [("layers", 3), ("stage", 2)])
def test_a_chunked_loss_is_one_graph_beside_those_of_the_model(graphs, monkeypatch, how, count):
    monkeypatch.setattr(loss, "_HEAD_VALUES", 5 * 32)  # four chunks
    monkeypatch.setattr(loss, "_TILE", 1)
    plain = build_model(SHAPE, 0)
    plain.chunked_loss = True
    replica = copy.deepcopy(plain)
    tokens = torch.randint(32, (2, 8), generator=torch.Generator().manual_seed(0))
    TokenLoss()(plain(tokens), tokens).backward()
    torch.compile(TokenLoss().__call__)(build._compiled(replica, how, None)(tokens), tokens).backward()
    for (name, a), b in zip(plain.named_parameters(), replica.parameters(), strict=True):
        assert torch.allclose(a.grad, b.grad, rtol=1e-4, atol=1e-6), name
    assert len(graphs) == count


def test_deep_stages_are_compiled_by_layer(graphs, monkeypatch):
    monkeypatch.setattr(build, "DEEP", 2)
    module = build_model(SHAPE, 0)
    assert build._compiled(module, True, None) is module
    assert isinstance(build._compiled(module, "stage", None), torch.nn.Module)
    module(torch.zeros(1, 4, dtype=torch.int64)).sum().backward()
    assert len(graphs) == 2


def test_a_chunked_loss_of_another_length_is_one_graph_too(graphs, monkeypatch):
    """The second length makes torch's compiler take lengths as unknown, and the number of chunks hangs on them."""
    monkeypatch.setattr(loss, "_HEAD_VALUES", 64 * 32)
    monkeypatch.setattr(loss, "_TILE", 4)
    plain, compiled = TokenLoss(), torch.compile(TokenLoss().__call__, fullgraph=True)
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(32, 8, generator=generator, requires_grad=True)
    for rows in (200, 130, 64, 201):
        hidden = torch.randn(1, rows, 8, generator=generator, requires_grad=True)
        targets = torch.randint(32, (1, rows), generator=generator)
        found, expected = (
            torch.autograd.grad(one((hidden, weight), targets), (hidden, weight)) for one in (compiled, plain)
        )
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other)
