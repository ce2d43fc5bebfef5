"""Laws of stages: cutting a model changes neither its weights, its function nor its gradient."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from slipstream.errors import UserError
from slipstream.models.cut import split
from slipstream.models.loss import TokenLoss
from slipstream.models.sizes import ModelConfig
from slipstream.models.stages import build_model, build_stage
from slipstream.train.engine import tied_names

DENSE = ModelConfig(vocab=61, dim=32, layers=4, heads=4, kv_heads=2, ffn=40)
ROUTED = replace(
    DENSE, tied=False, ffn=16, experts=4, experts_per_token=2, balance_loss=0.3, router_z_loss=0.2
)
MASKED = replace(DENSE, document_mask=True, end_of_document=7)
ALL = {"dense": DENSE, "routed": ROUTED, "masked": MASKED, "qk_norm": replace(DENSE, qk_norm=True)}


def tokens_of(config, rows=2, length=24):
    return torch.randint(0, config.vocab, (rows, length), generator=torch.Generator().manual_seed(3))


def cut(config, num_stages, seed=0, boundaries=None):
    ranges = split(config, num_stages, boundaries, sequence=24)
    last = len(ranges) - 1
    return [
        build_stage(config, part.start, part.stop, embedding=i == 0, head=i == last, seed=seed)
        for i, part in enumerate(ranges)
    ]


def run(stages, tokens):
    values = (tokens,)
    for stage in stages:
        output = stage(*values)
        values = output if isinstance(output, tuple) else (output,)
    return values[0]


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("boundaries", [[2], [1, 2, 3], [1.5], [0.5, 1.5, 2, 3, 3.5]])
def test_stages_compute_the_whole_model_bit_for_bit(name, boundaries):
    config, tokens = ALL[name], tokens_of(ALL[name])
    whole, stages = build_model(config, 0), cut(config, len(boundaries) + 1, boundaries=boundaries)
    expected = whole.state_dict()
    for stage in stages:
        for key, tensor in stage.state_dict().items():
            assert torch.equal(tensor, expected.pop(key)), key
    assert not expected

    logits = run(stages, tokens)
    reference = whole(tokens)
    assert torch.equal(logits, reference)
    logits.square().mean().backward()
    reference.square().mean().backward()
    gradients = {k: p.grad for stage in stages for k, p in stage.named_parameters()}
    if config.tied:
        gradients["embedding.weight"] = gradients["embedding.weight"] + gradients.pop("head.weight")
    for key, parameter in whole.named_parameters():
        assert torch.allclose(gradients[key], parameter.grad, rtol=1e-5, atol=1e-8), key
        assert parameter.grad.any(), f"{key} takes no part"


def test_initial_weights_come_from_the_seed_and_the_name():
    first, again, other = build_model(ROUTED, 0), build_model(ROUTED, 0), build_model(ROUTED, 1)
    for (name, a), b, c in zip(first.named_parameters(), again.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
        assert a.ndim == 1 or not torch.equal(a, c)
        expected = 0.02 / 8**0.5 if name.endswith(("o.weight", "moe.down")) else 0.02
        if a.ndim > 1:
            assert a.std().item() == pytest.approx(expected, rel=0.15), name
    q = [layer.attention.q.weight for layer in first.layers.values()]
    assert not torch.equal(q[0], q[1])


def test_tied_matrices_are_one_parameter_on_one_stage_and_equal_tensors_on_two():
    whole, stages = build_model(DENSE, 0), cut(DENSE, 2)
    assert whole.head.weight is whole.embedding.weight
    assert tied_names(DENSE, whole) == {}
    assert torch.equal(stages[0].embedding.weight, stages[1].head.weight)
    ties = [tied_names(DENSE, stage) for stage in stages]
    assert ties == [{"embedding": "embedding.weight"}, {"embedding": "head.weight"}]
    assert tied_names(replace(DENSE, tied=False), stages[0]) == {}


@pytest.mark.parametrize("name", ALL)
def test_a_later_token_never_changes_an_earlier_logit(name):
    config, tokens = ALL[name], tokens_of(ALL[name])
    model = build_model(config, 0)
    changed = tokens.clone()
    changed[:, 15] = (changed[:, 15] + 1) % config.vocab
    with torch.no_grad():
        before, after = model(tokens), model(changed)
    assert torch.allclose(before[:, :15], after[:, :15], atol=1e-6)
    assert not torch.allclose(before[:, 15:], after[:, 15:], atol=1e-6)


def test_masked_documents_do_not_see_one_another():
    """A packed document has the logits it would have alone: attention is relative in position."""
    model = build_model(replace(MASKED, init_std=0.3), 0)
    first, second = torch.tensor([3, 9, 12, 7]), torch.tensor([5, 20, 33, 7])
    with torch.no_grad():
        packed = model(torch.cat((first, second)).unsqueeze(0))[0]
        assert torch.allclose(packed[:4], model(first.unsqueeze(0))[0], atol=1e-4)
        assert torch.allclose(packed[4:], model(second.unsqueeze(0))[0], atol=1e-4)
        model.config = replace(model.config, document_mask=False)
        assert not torch.allclose(
            packed[4:], model(torch.cat((first, second)).unsqueeze(0))[0, 4:], atol=1e-2
        )


@pytest.mark.parametrize("boundaries", [[], [2], [1, 2, 3], [0.5, 1.5, 3]])
@pytest.mark.parametrize("seeded", [True, False])
def test_router_losses_under_pipelining_are_those_of_one_loss(boundaries, seeded):
    """Against mean over microbatches of (loss + aux) written out, for both ways engines divide by m."""
    m, tokens = 3, tokens_of(ROUTED, rows=6)
    loss = TokenLoss()
    whole = build_model(replace(ROUTED, balance_loss=0.0, router_z_loss=0.0), 0).double()
    total = torch.zeros((), dtype=torch.float64)
    aux = []
    for layer in whole.layers.values():
        layer.register_forward_hook(lambda _, __, output: aux.append(output[1]))
    for part in tokens.chunk(m):
        aux.clear()
        total = total + loss(whole(part), part)
        balance, z = torch.stack(aux).mean(0)
        total = total + 0.3 * balance + 0.2 * z
    (total / m).backward()

    stages = [stage.double() for stage in cut(ROUTED, len(boundaries) + 1, boundaries=boundaries)]
    for stage in stages:
        stage.auxiliary_weight = 1 / m if seeded else 1.0
    for part in tokens.chunk(m):
        loss(run(stages, part), part).backward(torch.tensor(1 / m if seeded else 1.0, dtype=torch.float64))
    expected = dict(whole.named_parameters())
    for stage in stages:
        routed = sum(layer.moe is not None for layer in stage.layers.values())
        assert (len(stage.router_losses) if routed else stage.router_losses) == (routed or None)
        for key, parameter in stage.named_parameters():
            gradient = parameter.grad if seeded else parameter.grad / m
            assert torch.allclose(gradient, expected[key].grad, rtol=1e-9, atol=1e-12), key


def test_router_losses_are_not_added_without_gradients():
    model = build_model(ROUTED, 0)
    with torch.no_grad():
        assert not model(tokens_of(ROUTED)).requires_grad
    assert torch.isfinite(model.router_losses).all()


@pytest.mark.parametrize("name", ALL)
def test_activation_checkpointing_changes_no_bit(name):
    config, tokens = ALL[name], tokens_of(ALL[name])
    plain = build_model(config, 0)
    lean = copy.deepcopy(plain)
    lean.activation_checkpointing = True
    for model in (plain, lean):
        TokenLoss()(model(tokens), tokens).backward()
    for (key, a), b in zip(plain.named_parameters(), lean.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad), key


@pytest.mark.parametrize("lean", [False, True])
@pytest.mark.parametrize("name", ALL)
def test_a_forward_and_backward_exchange_nothing_with_the_host(name, lean, monkeypatch):
    """On a GPU each such number waits for the queue, and none can be had while a CUDA graph is recorded."""

    class Queued(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            assert function not in (
                torch.ops.aten.lift_fresh.default,
                torch.ops.aten._local_scalar_dense.default,
            )
            return function(*args, **(kwargs or {}))

    def refused(*_):
        raise AssertionError("the state of a generator was read")

    model, tokens = build_model(ALL[name], 0), tokens_of(ALL[name])
    model.activation_checkpointing = lean
    monkeypatch.setattr(torch, "get_rng_state", refused)
    with Queued():
        TokenLoss()(model(tokens), tokens).backward()


def test_a_second_replica_compiles_nothing_new():
    """Two banks must not cost two compilations."""
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    replicas = [build_model(DENSE, 0)]
    replicas.append(copy.deepcopy(replicas[0]))
    for model in replicas:
        model.prepare_for_compiler()
        torch.compile(model, backend=backend)(tokens_of(DENSE)).sum().backward()
    assert len(graphs) == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dense", "routed"])
def test_a_compiled_stage_gives_the_same_gradient(name):
    config, tokens = ALL[name], tokens_of(ALL[name])
    plain = build_model(config, 0)
    compiled = copy.deepcopy(plain)
    compiled.prepare_for_compiler()
    compiled.compile()
    for model in (plain, compiled):
        TokenLoss()(model(tokens), tokens).backward()
    for (key, a), b in zip(plain.named_parameters(), compiled.parameters(), strict=True):
        assert torch.allclose(a.grad, b.grad, rtol=1e-4, atol=1e-6), key


def test_layers_outside_the_model_are_refused():
    with pytest.raises(UserError, match="4 layers"):
        build_stage(DENSE, 2, 5, embedding=False, head=True, seed=0)
