"""The kernel that is asked for is the one that runs, in compiled code too."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend

from slipstream.models import attention
from slipstream.models.attention import attention_kernel
from slipstream.train.timeline import recorder

FLASH = "aten::_scaled_dot_product_flash_attention_for_cpu"


def attend(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).square().sum()


def operations(call) -> set[str]:
    """What a call and its backward run, after a first time."""
    inputs = [torch.randn(2, 4, 16, 8, requires_grad=True) for _ in range(3)]
    call(*inputs).backward()
    with recorder() as recorded:
        call(*inputs).backward()
    return {event.key for event in recorded.key_averages()}


@pytest.fixture
def one_without_flash(monkeypatch):
    """A CPU has one fused kernel: "flash" takes it here, and "cudnn" must not."""
    monkeypatch.setattr(attention, "ORDERS", {"flash": (SDPBackend.FLASH_ATTENTION,), "cudnn": ()})
    monkeypatch.setattr(attention, "_LAST", (SDPBackend.MATH,))


def test_the_order_holds_inside_and_no_longer(one_without_flash):
    with attention_kernel("cudnn"):
        assert FLASH not in operations(attend)
    with attention_kernel("flash"):
        assert FLASH in operations(attend)
    with attention_kernel("auto"):
        assert FLASH in operations(attend)


def test_code_on_disk_is_known_by_the_kernel_it_was_made_for():
    """torch's key names the operation and not the kernel that it was traced to."""
    before = torch.compiler.config.cache_key_tag
    tags = []
    for first in ("auto", "cudnn", "flash"):
        with attention_kernel(first):
            tags.append(torch.compiler.config.cache_key_tag)
        assert torch.compiler.config.cache_key_tag == before
    assert tags[0] == before
    assert len(set(tags)) == 3


@pytest.mark.slow
@pytest.mark.parametrize("reset", [True, False], ids=["another process", "the same process"])
def test_code_that_was_compiled_for_one_kernel_does_not_serve_another(
    one_without_flash, reset, tmp_path, monkeypatch
):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    for first, fused in (
        ("flash", True),
        ("cudnn", False),
        ("flash", True),
        ("auto", True),
        ("cudnn", False),
    ):
        if reset:  # what another process has not: the code in memory; what it has: the folder
            torch.compiler.reset()
        with attention_kernel(first):
            assert (FLASH in operations(torch.compile(attend))) is fused, first
