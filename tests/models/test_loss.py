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
