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

from slipstream.kernels import dither, halves
from slipstream.kernels.compiler import INTERPRETED, runs_on
from slipstream.kernels.dither import add_dithered
from slipstream.kernels.normalise import normalised
from slipstream.kernels.product import product
from slipstream.kernels.symmetric import in_tiles, symmetric_product
from slipstream.kernels.tables import tables
from slipstream.lists import add_, extrapolate, lerp_and_add, round_into
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


@pytest.mark.parametrize("shape", [(2, 600, 640), (3, 640, 1032)] if runs_on(DEVICE) else [(2, 40, 64)])
def test_a_product(shape):
    a, b = some(shape, torch.float16), some((shape[0], shape[2], 520), torch.float16, seed=1) * 0.1
    found = product(a, b, torch.empty(shape[0], shape[1], 520, dtype=torch.float16, device=DEVICE))
    torch.testing.assert_close(found.double(), a.double() @ b.double(), rtol=2e-3, atol=5e-3)


@pytest.mark.parametrize(
    "shape", [(640, 1280), (1280, 640), (576, 576)] if DEVICE.type == "cuda" else [(24, 40)]
)
def test_a_matrix_comes_out_the_same_in_every_stack(shape):
    stack = some((12, *shape), torch.bfloat16 if DEVICE.type == "cuda" else torch.float32)
    together = orthogonalise(stack.clone())
    for size in (1, 3, 5):
        apart = torch.cat([orthogonalise(part.clone()) for part in stack.split(size)])
        assert torch.equal(apart, together)


@pytest.mark.parametrize("shape", [(3, 50, 90), (3, 130, 300)])
@pytest.mark.parametrize("in_place", [False, True])
def test_a_stack_is_divided_by_its_norms(shape, in_place):
    stack = some(shape, torch.bfloat16)
    stack[1] = 0
    norms = torch.linalg.vector_norm(stack.double(), dim=(1, 2)).clamp(min=0.5).view(3, 1, 1)
    expected = (stack.double() / norms).half()
    out = stack.view(torch.float16) if in_place else torch.empty_like(stack, dtype=torch.float16)
    torch.testing.assert_close(normalised(stack, 0.5, out), expected, atol=1e-6, rtol=1e-3)


@pytest.mark.parametrize("shape", [(7,), (3, 1000), (0, 4)])
def test_a_dithered_sum_has_the_same_bits_in_one_pass(shape, monkeypatch):
    total, term = some(shape, torch.bfloat16), some(shape, torch.bfloat16, seed=1)
    apart = total.clone()
    add_dithered(total, term, -12345)
    monkeypatch.setattr(dither, "runs_on", lambda device: False)
    add_dithered(apart, term, -12345)
    assert torch.equal(total, apart)


def test_halves_have_the_same_bits_in_one_launch(monkeypatch):
    ends = torch.tensor(
        [0x7FFFFFFF, -1, 0x7FC00000, 0x7FFF8000, -0x8000, 0x7F800000, 0x7F7FFFFF, 0, -(2**31)]
    )
    random = torch.Generator().manual_seed(0)
    bits = [torch.randint(-(2**31), 2**31, shape, generator=random) for shape in (*SIZES, (0, 4))]
    wholes = [found.to(torch.int32).view(torch.float32).to(DEVICE) for found in (ends, *bits)]

    def taken_apart_and_back():
        highs, rounded = ([torch.empty_like(w, dtype=torch.bfloat16) for w in wholes] for _ in range(2))
        lows, back = [torch.empty_like(w, dtype=torch.int16) for w in wholes], [w.clone() for w in wholes]
        halves.split(wholes, highs, lows)
        round_into(rounded, wholes)
        halves.join(highs, lows, back)
        return [tensor.view(torch.uint8) for tensor in (*highs, *rounded, *lows, *back)]

    found = taken_apart_and_back()
    monkeypatch.setattr(halves, "runs_on", lambda device: False)
    for one, other in zip(found, taken_apart_and_back(), strict=True):
        assert torch.equal(one, other)


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


def test_addresses_are_copied_once_and_never_mistaken():
    """Lists at the same places read what was copied; a list of which one tensor has moved does not."""
    ones, others = [some(shape) for shape in SIZES], [some(shape, seed=1) for shape in SIZES]
    first, again, swapped = (tables(*lists) for lists in ((ones, others), (ones, others), (others, ones)))
    assert first is not None
    assert again is not None
    assert swapped is not None
    assert again[0] is first[0]
    assert again[1] is first[1]
    for found, lists in ((first, (ones, others)), (swapped, (others, ones))):
        assert found[0].tolist() == [tensor.data_ptr() for tensors in lists for tensor in tensors]
    moved = [*ones[:-1], ones[-1].clone()]
    found = tables(moved, others)
    assert found is not None
    assert found[0].tolist()[len(SIZES) - 1] == moved[-1].data_ptr()
