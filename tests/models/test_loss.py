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
    monkeypatch.setattr(loss_module, "_TILE", 1)
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
    monkeypatch.setattr(loss_module, "_TILE", 32)
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
    monkeypatch.setattr(loss_module, "_TILE", 2)
    seen, gradient = [], loss_module._gradient
    monkeypatch.setattr(
        loss_module, "_gradient", lambda logits, *rest: seen.append(logits.shape) or gradient(logits, *rest)
    )
    hidden, weight = torch.randn(2, 5, 3, requires_grad=True), torch.randn(11, 3, requires_grad=True)
    TokenLoss()((hidden, weight), torch.zeros(2, 5, dtype=torch.long)).backward()
    assert seen == [(4, 11), (4, 11), (2, 11)]


@pytest.mark.parametrize("chunked", [False, True])
def test_wide_copies_are_of_some_rows(chunked, monkeypatch):
    """What the planner counts beside the logits (`LOSS_SCRATCH_MOST`), with either loss."""
    monkeypatch.setattr(loss_module, "_CHUNK_VALUES", 4 * 11)
    seen, wide = [], loss_module._wide
    monkeypatch.setattr(loss_module, "_wide", lambda x: seen.append(x.numel()) or wide(x))
    hidden, weight = torch.randn(2, 5, 3, requires_grad=True), torch.randn(11, 3, requires_grad=True)
    output = (hidden, weight) if chunked else hidden @ weight.mT
    TokenLoss()(output, torch.zeros(2, 5, dtype=torch.long)).backward()
    assert sorted(seen) == [22, 22, 44, 44, 44, 44]


@pytest.mark.parametrize("values", [1, 2**20, 2**28, 2**30])
@pytest.mark.parametrize("columns", [11, 49_152, 2**29])
@pytest.mark.parametrize("rows", [1, 127, 128, 129, 300, 4_095, 10_922, 32_768, 32_770, 65_536])
def test_chunks_are_alike_and_none_is_small(rows, columns, values, monkeypatch):
    monkeypatch.setattr(loss_module, "_HEAD_VALUES", values)
    sizes, tile = loss_module._chunks(rows, columns), 128
    assert sum(sizes) == rows
    assert min(sizes) >= min(tile, rows)
    assert len(set(sizes[:-1])) <= 1  # two sizes of code, and no more
    assert all(size % tile == 0 for size in sizes[:-1])
    most = values // columns
    assert max(sizes) < max(most, tile) + 2 * tile  # a remainder is one more tile at most
    assert len(sizes) <= -(-rows // max(1, most))


def test_chunks_of_the_shapes_that_are_trained(monkeypatch):
    """Without a care for the remainder six of 5,461 rows would leave a seventh of 2."""
    assert loss_module._chunks(32_768, 49_152) == [4_736] * 6 + [4_352]
    monkeypatch.setattr(loss_module, "_HEAD_VALUES", 2**30)
    assert loss_module._chunks(32_768, 49_152) == [16_384] * 2
    assert loss_module._chunks(65_536, 49_152) == [16_384] * 4


@pytest.mark.parametrize("rows", [1, 6, 11, 13])
@pytest.mark.parametrize("tile", [1, 2, 5])
def test_uneven_chunks_give_the_loss_of_whole_logits(rows, tile, monkeypatch):
    monkeypatch.setattr(loss_module, "_HEAD_VALUES", 4 * 11)
    monkeypatch.setattr(loss_module, "_TILE", tile)
    generator = torch.Generator().manual_seed(rows)
    hidden = torch.randn(1, rows, 5, generator=generator, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(11, 5, generator=generator, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(0, 11, (1, rows), generator=generator)
    for one, other in zip(*of_head(hidden, weight, targets, 0.01), strict=True):
        assert torch.allclose(one, other, rtol=1e-12, atol=1e-15)


@pytest.fixture
def online(monkeypatch):
    """As compiled code computes it, although nothing is compiled."""
    monkeypatch.setattr(loss_module, "ONLINE_LSE", True)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)


@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float64, 1e-14), (torch.float32, 1e-6)])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 30.0, 1e4])
def test_an_online_log_sum_is_logsumexp(dtype, rtol, scale, online):
    x = scale * torch.randn(64, 300, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x[0], x[1, 3:], x[2] = 5.0, -torch.inf, torch.linspace(-1, 1, 300, dtype=torch.float64) * 1e30
    x = x.to(dtype)
    torch.testing.assert_close(loss_module._log_sum(x), x.logsumexp(-1), rtol=rtol, atol=rtol)


@pytest.mark.parametrize("z_loss", [0.0, 0.01])
def test_with_an_online_log_sum_both_losses_are_cross_entropy_with_z(z_loss, online, monkeypatch):
    monkeypatch.setattr(loss_module, "_HEAD_VALUES", 3 * 11)
    monkeypatch.setattr(loss_module, "_TILE", 2)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, 7, 5, generator=generator, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(11, 5, generator=generator, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(0, 11, (2, 7), generator=generator)
    targets[0, 3] = targets[1, 6] = IGNORE
    theirs = 0.25 * reference(hidden @ weight.mT, targets, z_loss) * 3
    expected = (theirs.detach() / 0.25, *torch.autograd.grad(theirs, (hidden, weight)))
    for found in of_head(hidden, weight, targets, z_loss):
        for one, other in zip(found, expected, strict=True):
            assert torch.allclose(one, other, rtol=1e-12, atol=1e-15)


def test_an_eager_log_sum_is_torchs_to_the_bit(monkeypatch):
    x = torch.randn(9, 31, generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr(loss_module, "ONLINE_LSE", True)
    assert torch.equal(loss_module._log_sum(x), x.logsumexp(-1))
