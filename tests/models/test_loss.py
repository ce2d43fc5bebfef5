"""The loss against torch's cross entropy, and the law that cutting a group does not move its mean."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from slipstream.models import loss as loss_module
from slipstream.models.loss import IGNORE, TokenLoss, with_group_count


def reference(logits, targets, z_loss):
    rows, flat = logits.reshape(-1, logits.shape[-1]), targets.reshape(-1)
    z = (rows.logsumexp(-1).square() * (flat != IGNORE)).sum() / (flat != IGNORE).sum()
    return F.cross_entropy(rows, flat, ignore_index=IGNORE) + z_loss * z


@pytest.mark.parametrize("z_loss", [0.0, 0.01])
@pytest.mark.parametrize("chunk_values", [1 << 25, 3 * 11])
def test_value_and_gradient_are_cross_entropy_with_z(z_loss, chunk_values, monkeypatch):
    monkeypatch.setattr(loss_module, "_CHUNK_VALUES", chunk_values)
    generator = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(2, 7, 11, generator=generator, dtype=torch.float64)).requires_grad_()
    targets = torch.randint(0, 11, (2, 7), generator=generator)
    targets[0, 3] = targets[1, 6] = IGNORE
    ours = TokenLoss(z_loss=z_loss)(logits, targets)
    (grad,) = torch.autograd.grad(2.5 * ours, logits)
    theirs = reference(logits, targets, z_loss)
    (expected,) = torch.autograd.grad(2.5 * theirs, logits)
    assert torch.allclose(ours, theirs, rtol=1e-12)
    assert torch.allclose(grad, expected, rtol=1e-12, atol=1e-15)
    with torch.no_grad():  # a validation loss is the plain one
        assert torch.allclose(TokenLoss(z_loss=z_loss)(logits, targets), reference(logits, targets, 0.0))


def test_mean_over_microbatches_is_the_mean_over_tokens():
    """Counted tokens fall unevenly; a mean of microbatch means would be wrong by far more than rounding."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(6, 5, 13, generator=generator, dtype=torch.float64)
    targets = torch.randint(0, 13, (6, 5), generator=generator)
    targets[0] = IGNORE  # a row that counts nothing
    targets[1, 1:] = IGNORE
    whole = TokenLoss()(logits, targets)
    for m in (1, 2, 3, 6):
        parts = zip(logits.chunk(m), with_group_count(targets).chunk(m), strict=True)
        cut = torch.stack([TokenLoss(shares=m)(*part) for part in parts]).mean()
        assert torch.allclose(cut, whole, rtol=1e-12)
    halves = [TokenLoss()(logits[i : i + 2], targets[i : i + 2]) for i in (0, 2, 4)]
    assert abs(torch.stack(halves).mean() - whole) > 1e-3


def test_a_microbatch_that_counts_nothing_has_a_zero_gradient():
    logits = torch.randn(1, 4, 5, requires_grad=True)
    value = TokenLoss(shares=2)(logits, torch.full((1, 5), IGNORE).index_fill(1, torch.tensor(4), 9))
    value.backward()
    assert value == 0
    assert logits.grad is not None
    assert not logits.grad.any()


def test_half_precision_logits_keep_a_float32_loss():
    logits = (4 * torch.randn(1, 64, 300)).to(torch.bfloat16)
    targets = torch.randint(0, 300, (1, 64))
    value = TokenLoss()(logits, targets)
    assert value.dtype == torch.float32
    assert torch.allclose(value, F.cross_entropy(logits.float().view(64, 300), targets.view(64)), rtol=1e-5)


def of_head(hidden, weight, targets, z_loss):
    """(loss, gradients) the usual way, and with the head's product inside the loss."""
    found = []
    for output in (hidden @ weight.mT, (hidden, weight)):
        loss = TokenLoss(shares=3, z_loss=z_loss)(output, with_group_count(targets))
        found.append((loss.detach(), *torch.autograd.grad(0.25 * loss, (hidden, weight))))
    return found


@pytest.mark.parametrize("z_loss", [0.0, 0.01])
@pytest.mark.parametrize("chunk_values", [1 << 28, 3 * 11, 1])
def test_with_the_heads_product_inside_the_loss_nothing_changes(z_loss, chunk_values, monkeypatch):
    monkeypatch.setattr(loss_module, "_HEAD_VALUES", chunk_values)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, 7, 5, generator=generator, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(11, 5, generator=generator, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(0, 11, (2, 7), generator=generator)
    targets[0, 3] = targets[1, 6] = IGNORE
    for one, other in zip(*of_head(hidden, weight, targets, z_loss), strict=True):
        assert torch.allclose(one, other, rtol=1e-12, atol=1e-15)


def test_in_bfloat16_chunks_err_by_one_rounding_more_than_whole_logits(monkeypatch):
    """Against float64 on the same numbers, in norm. Two independent roundings make sqrt(2) of one."""
    monkeypatch.setattr(loss_module, "_HEAD_VALUES", 32 * 512)  # eight chunks
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, 256, 64, generator=generator).bfloat16().requires_grad_()
    weight = torch.randn(512, 64, generator=generator).div(8).bfloat16().requires_grad_()
    targets = torch.randint(0, 512, (1, 256), generator=generator)
    whole, chunked = of_head(hidden, weight, targets, 0.0)
    wide = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight)]
    exact = of_head(*wide, targets, 0.0)[0]

    def errors(found):
        return [float((a.double() - b).norm() / b.norm()) for a, b in zip(found, exact, strict=True)]

    for plain, cut in zip(errors(whole), errors(chunked), strict=True):
        assert cut < max(2**0.5 * plain, 1e-5), (plain, cut)
    assert [grad.dtype for grad in chunked[1:]] == [torch.bfloat16] * 2


def test_logits_never_exist_whole(monkeypatch):
    monkeypatch.setattr(loss_module, "_HEAD_VALUES", 4 * 11)
    seen, gradient = [], loss_module._gradient
    monkeypatch.setattr(
        loss_module, "_gradient", lambda logits, *rest: seen.append(logits.shape) or gradient(logits, *rest)
    )
    hidden, weight = torch.randn(2, 5, 3, requires_grad=True), torch.randn(11, 3, requires_grad=True)
    TokenLoss()((hidden, weight), torch.zeros(2, 5, dtype=torch.long)).backward()
    assert seen == [(4, 11), (4, 11), (2, 11)]
