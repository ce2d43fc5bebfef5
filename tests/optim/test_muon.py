"""Muon: the same bits in any company, references, torch's own, look-ahead, experts, state, refusals."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor, nn

from optim import references
from slipstream.errors import UserError
from slipstream.optim.muon import Muon
from slipstream.optim.newton_schulz import (
    COEFFICIENTS,
    STEPS,
    orthogonal_stacks,
    orthogonalise,
    orthogonalise_by_gram,
    stacks,
)

SHAPES = [(128, 128), (64, 128), (384, 128), (128, 384), (7, 13), (3, 5), (2, 3), (31, 97), (1, 8), (40, 6)]


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_matrix_gets_the_same_bits_in_any_stack(shape, dtype):
    """The law behind equality across P: a stage split changes which matrices share a stack."""
    torch.manual_seed(0)
    matrices = torch.randn(9, *shape, dtype=dtype) * 10.0 ** torch.randn(9, 1, 1)
    together = orthogonalise(matrices.clone())
    for members in ([0], [4], [8], [3, 7], [5, 1, 2], [8, 7, 6, 5, 4, 3, 2, 1, 0]):
        assert torch.equal(orthogonalise(matrices[members].clone()), together[members]), members


def test_a_step_gives_the_same_bits_in_any_split():
    """All parameters in one optimizer, or split over stages as a pipeline would: identical weights."""
    torch.manual_seed(1)
    shapes = [shape for shape in SHAPES[:6] for _ in range(3)] + [(4, 24, 16), (4, 24, 16)]
    grads = [[torch.randn(shape) for shape in shapes] for _ in range(3)]
    start = [torch.randn(shape) for shape in shapes]

    def train(splits: list[list[int]]) -> list[Tensor]:
        params = [nn.Parameter(value.clone()) for value in start]
        optimizers = [Muon([{"params": [params[i] for i in part], "algorithm": "muon"}]) for part in splits]
        for step in grads:
            for parameter, grad in zip(params, step, strict=True):
                parameter.grad = grad.clone()
            for optimizer in optimizers:
                optimizer.step()
        return [p.detach() for p in params]

    everything = list(range(len(shapes)))
    whole = train([everything])
    for splits in ([everything[:7], everything[7:]], [everything[::3], everything[1::3], everything[2::3]]):
        for one, other in zip(whole, train(splits), strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("shape", [(128, 384), (384, 128), (96, 96), (31, 97)])
def test_orthogonalise_agrees_with_an_fp32_reference(shape):
    torch.manual_seed(2)
    matrix = torch.randn(shape)
    ours = orthogonalise(matrix[None].clone())[0]
    torch.testing.assert_close(ours, references.orthogonal(matrix), rtol=1e-5, atol=1e-5)
    singular = torch.linalg.svdvals(ours)
    assert singular.min() > 0.3
    assert singular.max() < 1.3


@pytest.mark.parametrize("decades", [0, 2, 4])
@pytest.mark.parametrize("shape", [(60, 160), (160, 60), (96, 96)])
def test_the_gram_form_in_fp16_is_nearer_to_the_exact_polynomial_than_the_plain_form_in_bf16(shape, decades):
    generator = torch.Generator().manual_seed(decades)
    u, s, v = torch.linalg.svd(
        torch.randn(shape, generator=generator, dtype=torch.float64), full_matrices=False
    )
    matrix = u @ torch.diag(torch.logspace(0, -decades, len(s), dtype=torch.float64) if decades else s) @ v
    exact = references.orthogonal(matrix)
    plain = orthogonalise(matrix[None].bfloat16())[0].double()
    gram = orthogonalise_by_gram((matrix / matrix.norm())[None].half(), STEPS, COEFFICIENTS)[0].double()
    assert (gram - exact).norm() < (plain - exact).norm()
    assert (gram - exact).norm() < 0.1 * exact.norm()


@pytest.mark.parametrize("shape", [(2, 64), (4, 512), (96, 160)])
@pytest.mark.parametrize("noise", [0.0, 0.01, 0.1])
def test_the_gram_form_survives_matrices_of_low_rank(shape, noise):
    """Routers of experts are this small."""
    generator = torch.Generator().manual_seed(0)
    for rank in (1, 2, 4):
        left, right = (
            torch.randn(30, *sides, generator=generator) for sides in ((shape[0], rank), (rank, shape[1]))
        )
        low = left @ right + noise * torch.randn(30, *shape, generator=generator)
        low /= torch.linalg.matrix_norm(low, keepdim=True)
        found = orthogonalise_by_gram(low.half(), STEPS, COEFFICIENTS)
        assert torch.isfinite(found).all()
        assert torch.linalg.matrix_norm(found.double(), 2).max() < 1.3


@pytest.mark.parametrize("scale", ["match_rms_adamw", "original", "spectral"])
@pytest.mark.parametrize("lookahead", [0, 1, 2])
@pytest.mark.parametrize("shape", [(48, 96), (96, 48)])
def test_the_rule(shape, lookahead, scale):
    torch.manual_seed(3)
    start, grads = torch.randn(shape), [torch.randn(shape) for _ in range(4)]
    options = {"lr": 0.02, "momentum": 0.9, "lookahead": lookahead, "weight_decay": 0.1, "scale": scale}
    weight = nn.Parameter(start.clone())
    optimizer = Muon([{"params": [weight], "algorithm": "muon"}], **options)
    for grad in grads:
        weight.grad = grad.clone()
        optimizer.step()
    expected = references.muon(start.double(), [grad.double() for grad in grads], **options)
    torch.testing.assert_close(weight.detach().double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("adjust", ["match_rms_adamw", "original"])
def test_agrees_with_torch_within_its_bf16(adjust):
    """torch.optim.Muon runs Newton-Schulz in bf16: each step may differ by 3 %."""
    torch.manual_seed(4)
    start, grads = torch.randn(64, 160), [torch.randn(64, 160) for _ in range(3)]
    ours, theirs = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    mine = Muon([{"params": [ours], "algorithm": "muon"}], lr=0.01, weight_decay=0.1, scale=adjust)
    torchs = torch.optim.Muon([theirs], lr=0.01, weight_decay=0.1, adjust_lr_fn=adjust)
    for grad in grads:
        before = ours.detach().clone()
        theirs.data.copy_(before)
        ours.grad, theirs.grad = grad.clone(), grad.clone()
        mine.step()
        torchs.step()
        step = ours.detach() - before
        assert (theirs.detach() - ours.detach()).norm() < 0.03 * step.norm()


def test_experts_are_matrices():
    torch.manual_seed(5)
    start, grad = torch.randn(4, 24, 16), torch.randn(4, 24, 16)
    stack = nn.Parameter(start.clone())
    each = [nn.Parameter(matrix.clone()) for matrix in start]
    stack.grad = grad.clone()
    for parameter, piece in zip(each, grad, strict=True):
        parameter.grad = piece.clone()
    Muon([{"params": [stack], "algorithm": "muon"}]).step()
    Muon([{"params": each, "algorithm": "muon"}]).step()
    assert torch.equal(stack.detach(), torch.stack([p.detach() for p in each]))


def test_the_rest_is_torchs_adamw():
    torch.manual_seed(6)
    start, grads = torch.randn(50), [torch.randn(50) for _ in range(5)]
    ours, theirs = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    mine = Muon([{"params": [ours], "algorithm": "adamw", "lr": 0.01, "betas": (0.8, 0.9)}], weight_decay=0.2)
    torchs = torch.optim.AdamW([theirs], lr=0.01, betas=(0.8, 0.9), weight_decay=0.2, foreach=False)
    for grad in grads:
        ours.grad, theirs.grad = grad.clone(), grad.clone()
        mine.step()
        torchs.step()
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)


def small() -> tuple[list[nn.Parameter], Muon]:
    torch.manual_seed(7)
    params = [
        nn.Parameter(torch.randn(12, 8)),
        nn.Parameter(torch.randn(12, 8)),
        nn.Parameter(torch.randn(9)),
    ]
    return params, Muon(
        [{"params": params[:2], "algorithm": "muon"}, {"params": params[2:], "algorithm": "adamw"}]
    )


def advance(params: list[nn.Parameter], optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for parameter in params:
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()


def test_state_is_made_with_the_optimizer():
    params, optimizer = small()
    assert set(optimizer.state[params[0]]) == {"momentum_buffer"}
    assert set(optimizer.state[params[2]]) == {"step", "exp_avg", "exp_avg_sq"}


def test_frozen_parameters_have_no_state_and_do_not_move():
    params = [nn.Parameter(torch.ones(4, 4), requires_grad=False), nn.Parameter(torch.ones(4, 4))]
    optimizer = Muon([{"params": params, "algorithm": "muon"}])
    params[1].grad = torch.eye(4)
    optimizer.step()
    assert params[0] not in optimizer.state
    assert torch.equal(params[0], torch.ones(4, 4))
    assert not torch.equal(params[1], torch.ones(4, 4))


def test_deep_copies_go_on_alone():
    params, optimizer = small()
    advance(params, optimizer, range(2))
    twins, twin = copy.deepcopy((params, optimizer))
    advance(params, optimizer, range(2, 5))
    before = [p.detach().clone() for p in twins]
    advance(twins, twin, range(2, 5))
    assert all(torch.equal(p, q) for p, q in zip(params, twins, strict=True))
    assert not any(torch.equal(p, q) for p, q in zip(before, twins, strict=True))


def test_lookahead_two_is_the_blend_applied_twice():
    """One matrix, known numbers: U = (1 - μ²) G + μ² M."""
    weight = nn.Parameter(torch.zeros(2, 2, dtype=torch.float64))
    optimizer = Muon(
        [{"params": [weight], "algorithm": "muon"}], momentum=0.5, lookahead=2, weight_decay=0.0, lr=1.0
    )
    momentum = torch.tensor([[1.0, 2.0], [0.0, 1.0]], dtype=torch.float64)
    grad = torch.tensor([[0.0, 1.0], [3.0, 0.0]], dtype=torch.float64)
    optimizer.state[weight]["momentum_buffer"].copy_(momentum)
    weight.grad = grad.clone()
    optimizer.step()
    blended = 0.75 * grad + 0.25 * (0.5 * momentum + 0.5 * grad)
    expected = -0.2 * math.sqrt(2) * references.orthogonal(blended)
    torch.testing.assert_close(weight.detach(), expected, rtol=1e-12, atol=1e-12)


def test_zero_gradients_do_not_make_nan():
    weight = nn.Parameter(torch.ones(4, 8))
    optimizer = Muon([{"params": [weight], "algorithm": "muon"}], weight_decay=0.0)
    weight.grad = torch.zeros(4, 8)
    optimizer.step()
    assert torch.equal(weight, torch.ones(4, 8))


def test_refusals():
    vector = nn.Parameter(torch.zeros(3))
    with pytest.raises(UserError, match=r"not \(3,\).*adamw"):
        Muon([{"params": [vector], "algorithm": "muon"}])
    with pytest.raises(UserError, match="match_rms_adamw"):
        Muon([], scale="rms")
    with pytest.raises(UserError, match="momentum=1"):
        Muon([], momentum=1.0)


def test_empty_tensors_are_passed_over():
    """A rank that holds no expert of a sharded stack has an empty local tensor."""
    assert list(orthogonal_stacks(stacks([torch.empty(0, 4, 4)]), lambda indices, outs: None)) == []
