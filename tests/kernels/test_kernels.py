"""Each kernel against its plain spelling: on a GPU, or on a CPU in Triton's interpreter where that is installed."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch

from slipstream.kernels import dither
from slipstream.kernels.compiler import INTERPRETED, runs_on
from slipstream.kernels.dither import add_dithered
from slipstream.kernels.divide import divided
from slipstream.kernels.symmetric import in_tiles, symmetric_product
from slipstream.lists import add_, extrapolate, lerp_and_add
from slipstream.optim import newton_schulz
from slipstream.optim.newton_schulz import orthogonalise

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# Triton's interpreter has no bf16 products.
HALF = torch.bfloat16 if DEVICE.type == "cuda" else torch.float16
TOO_NEW = find_spec("triton") is not None and (
    version("triton").startswith("3.6.") and np.lib.NumpyVersion(np.__version__) >= "2.4.0"
)
SIZES = [(7,), (16, 16), (3, 5, 700)]


def some(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(DEVICE, dtype)


# Large shapes lie on one side or the other of the kernel's limits. Where there is no kernel they go the way of the
# small ones, and a CPU may take half a minute of float16 for each.
SMALL = [((2, 200, 96), False), ((3, 33, 17), True)]
IN_TILES = [((2, 600, 96), False), ((3, 520, 40), False), ((2, 128, 600), True), ((1, 64, 1032), True)]
WHOLE = [((2, 96, 600), True), ((2, 601, 64), False)]


@pytest.mark.parametrize(("shape", "tall"), [*SMALL, *IN_TILES, *WHOLE] if runs_on(DEVICE) else SMALL)
def test_a_symmetric_product(shape, tall):
    x = some(shape, torch.float16)
    wide = x.double().mT if tall else x.double()
    product = symmetric_product(x, x, tall=tall, diagonal=3.0)
    exact = wide @ wide.mT + 3 * torch.eye(product.shape[1], device=DEVICE)
    torch.testing.assert_close(product.double(), exact, rtol=2e-3, atol=1e-3 * exact.abs().max().item())

    small = product * 0.01
    combined = symmetric_product(small, small, 2.0, ((0.5, small), (-1.0, product)))
    d, e = small.double(), product.double()
    exact = 2 * d @ d + 0.5 * d - e
    torch.testing.assert_close(combined.double(), exact, rtol=2e-3, atol=1e-3 * exact.abs().max().item())
    if runs_on(DEVICE) and in_tiles(torch.float16, *product.shape[1:], tall=False):
        assert torch.equal(combined, combined.mT)


def test_a_stack_is_divided_matrix_by_matrix():
    stack, divisors = some((3, 50, 90)), torch.tensor([2.0, 0.0, 4.0], device=DEVICE)
    expected = stack / torch.tensor([2.0, 0.5, 4.0], device=DEVICE).view(3, 1, 1)
    out = torch.empty_like(stack, dtype=torch.float16)
    torch.testing.assert_close(divided(stack, divisors, 0.5, out), expected.half(), atol=0, rtol=1e-3)


def test_a_stack_is_divided_in_its_own_memory():
    stack, divisors = some((3, 50, 90)).bfloat16(), torch.tensor([2.0, 3.0, 4.0], device=DEVICE)
    expected = stack.float() / divisors.view(3, 1, 1)
    found = divided(stack, divisors, 0.5, stack.view(torch.float16))
    torch.testing.assert_close(found, expected.half(), atol=0, rtol=1e-3)


@pytest.mark.parametrize("shape", [(7,), (3, 1000), (0, 4)])
def test_a_dithered_sum_has_the_same_bits_in_one_pass(shape, monkeypatch):
    total, term = some(shape, torch.bfloat16), some(shape, torch.bfloat16, seed=1)
    apart = total.clone()
    add_dithered(total, term, -12345)
    monkeypatch.setattr(dither, "runs_on", lambda device: False)
    add_dithered(apart, term, -12345)
    assert torch.equal(total, apart)


def test_lists_of_two_dtypes_are_added():
    targets = [some(shape) for shape in SIZES]
    others = [some(shape, HALF, seed=1) for shape in SIZES]
    expected = [0.5 * t + 3 * o.float() for t, o in zip(targets, others, strict=True)]
    add_(targets, others, alpha=3.0, factor=0.5)
    torch.testing.assert_close(targets, expected)


def test_momentum_and_what_is_made_of_it():
    momenta, grads = ([some(shape, seed=seed) for shape in SIZES] for seed in (0, 1))
    outs = [torch.empty(shape, dtype=HALF, device=DEVICE) for shape in SIZES]
    moved = [torch.lerp(m, g, 0.25) for m, g in zip(momenta, grads, strict=True)]
    lerp_and_add(momenta, grads, 0.25, outs, 2.0)
    torch.testing.assert_close(momenta, moved)
    for out, m, g in zip(outs, moved, grads, strict=True):
        torch.testing.assert_close(out, (m + 2 * g).to(HALF), rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("in_place", [True, False])
def test_extrapolation(in_place):
    starts, ends = ([some(shape, seed=seed) for shape in SIZES] for seed in (0, 1))
    expected = [s + 2.5 * (e - s) for s, e in zip(starts, ends, strict=True)]
    outs = starts if in_place else [torch.empty(shape, dtype=HALF, device=DEVICE) for shape in SIZES]
    extrapolate(outs, starts, ends, 2.5)
    dtype = torch.float32 if in_place else HALF
    torch.testing.assert_close(outs, [e.to(dtype) for e in expected], rtol=1e-2, atol=1e-2)


def test_lists_of_nothing():
    """What a rank holds of matrices that have fewer rows than there are ranks."""
    targets, others = [torch.empty(0, 5, device=DEVICE)], [torch.empty(0, 5, dtype=HALF, device=DEVICE)]
    add_(targets, others)
    assert targets[0].shape == (0, 5)


@pytest.mark.parametrize("limits", [{"MOST_MATRICES": 3}, {"_SCRATCH_BYTES": 20_000}])
@pytest.mark.parametrize("steps", [3, 5])
@pytest.mark.parametrize("shape", [(7, 24, 40), (7, 40, 24)])
def test_a_stack_in_pieces_comes_out_the_same(shape, steps, limits, monkeypatch):
    stack = some(shape, torch.bfloat16)
    together = orthogonalise(stack.clone(), steps)
    for name, value in limits.items():
        monkeypatch.setattr(newton_schulz, name, value)
    assert torch.equal(orthogonalise(stack, steps), together)


@pytest.mark.skipif(INTERPRETED or DEVICE.type == "cuda", reason="the kernels run in this process already")
@pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")
@pytest.mark.skipif(TOO_NEW, reason="Triton 3.6's interpreter does not run with numpy 2.4 or later")
def test_all_of_this_file_in_tritons_interpreter():
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(Path(__file__))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout[-3000:]
