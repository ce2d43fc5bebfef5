"""Products in fp8: what is exchanged and what is not. On a CPU by torchao's own emulation."""

import copy

import pytest
import torch

from slipstream.errors import UserError
from slipstream.models.loss import TokenLoss
from slipstream.models.sizes import ModelConfig
from slipstream.models.stages import build_model, build_stage
from slipstream.optim import build
from slipstream.train import fp8

SHAPE = ModelConfig(vocab=64, dim=32, layers=2, heads=2, kv_heads=1, ffn=48, tied=False)
ROUTED = ModelConfig(
    vocab=64, dim=32, layers=2, heads=2, kv_heads=1, ffn=48, tied=False, experts=16, experts_per_token=2
)
TOKENS = torch.randint(0, 64, (2, 32), generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def library():
    pytest.importorskip("torchao.float8")


def exchanged(model):
    return {name for name, part in model.named_modules() if type(part).__name__ == "Float8Linear"}


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
@pytest.mark.parametrize("shape", [SHAPE, ROUTED])
def test_hidden_matrices_are_multiplied_in_fp8_and_nothing_else_changes(shape, recipe):
    plain = build_model(shape, 0)
    model = copy.deepcopy(plain)
    before = list(model.named_parameters())
    fp8.in_fp8(model, recipe)
    parts = ["attention.q", "attention.k", "attention.v", "attention.o"]
    parts += [] if shape.experts else ["mlp.gate", "mlp.up", "mlp.down"]
    assert exchanged(model) == {f"layers.{i}.{part}" for i in range(2) for part in parts}
    for (name, parameter), (same, other) in zip(model.named_parameters(), before, strict=True):
        assert (name, id(parameter), parameter.dtype) == (same, id(other), torch.float32)
    losses = [TokenLoss()(each(TOKENS), TOKENS) for each in (model, plain)]
    assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-2)
    assert losses[0].item() != losses[1].item()
    for loss in losses:
        loss.backward()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert (one.grad - other.grad).norm() < 0.25 * other.grad.norm()


def test_odd_sides_are_left_as_they_are():
    linear = torch.nn.Linear(32, 40)
    assert not fp8.suits(linear, "layers.0.mlp.up")
    assert fp8.suits(torch.nn.Linear(32, 48), "layers.0.mlp.up")
    assert not fp8.suits(torch.nn.Linear(32, 48), "layers.0.moe.router")
    assert not fp8.suits(torch.nn.LayerNorm(32), "layers.0.norm")


def test_it_learns():
    model = build_model(SHAPE, 0)
    fp8.in_fp8(model, "tensorwise")
    optimizer = build("muon", model, lr=0.02)
    losses = []
    for _ in range(30):
        loss = TokenLoss()(model(TOKENS), TOKENS)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


def test_stages_compute_what_the_whole_model_computes():
    """Scales are of single products, so they do not depend on how a model is cut."""
    whole = build_model(SHAPE, 0)
    first = build_stage(SHAPE, 0, 0.5, embedding=True, head=False, seed=0)
    second = build_stage(SHAPE, 0.5, 2, embedding=False, head=True, seed=0)
    for module in (whole, first, second):
        fp8.in_fp8(module, "tensorwise")
    losses = [TokenLoss()(logits, TOKENS) for logits in (whole(TOKENS), second(first(TOKENS)))]
    for loss in losses:
        loss.backward()
    assert torch.equal(*losses)
    expected = dict(whole.named_parameters())
    for name, parameter in [*first.named_parameters(), *second.named_parameters()]:
        assert torch.equal(parameter.grad, expected.pop(name).grad), name
    assert not expected


def test_where_it_cannot_be_had_it_is_refused(monkeypatch):
    fp8.check_fp8(torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(UserError, match=r"compute capability 8\.9"):
        fp8.check_fp8(torch.device("cuda", 0))
    monkeypatch.setattr(fp8, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"torchao, which is not installed.*\[fp8\]"):
        fp8.check_fp8(torch.device("cpu"))


def test_a_run_on_a_cpu_emulates_it(runs, reference):
    """In float32, for which nothing else is done to a replica."""
    runs.train("run", "pipeline.schedule=emulate", "train.fp8=rowwise", "train.steps=2", "checkpoint.every=0")
    found = [event["loss"] for event in runs.events("run", "step")]
    plain = [event["loss"] for event in reference.events("2bw", "step")][:2]
    assert found == pytest.approx(plain, rel=0.05)
    assert found[0] != plain[0]
