"""studies/stage_libraries.py on a CPU: what is in use is measured, and what is not installed is a line that says so."""

from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as F

from scripts import loaded


@pytest.fixture(scope="module")
def study():
    with loaded("stage_products"), loaded("stage_libraries") as module:
        yield module


def test_without_the_libraries_the_rest_is_measured(study, tmp_path):
    out, shape = tmp_path / "out.jsonl", study.base.TINY
    study.base.measure(out, 1e5, study.jobs(shape, tuned=False))
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    missing = {row["error"] for row in rows if row["library"] in ("quack", "flash4")}
    assert missing == {
        "ModuleNotFoundError: No module named 'quack'",
        "ModuleNotFoundError: No module named 'flash_attn'",
    }
    own = [row for row in rows if row["library"] in ("torch", "ours")]
    assert not [row for row in own if "error" in row]
    assert {row["what"] for row in own} == {"gated", "attention", "symmetric"}
    # Each is held against torch, rounding apart; so a kernel that computes something else is seen.
    assert all(row["ms"] > 0 and row["off"] < 1e-5 for row in own)
    assert {row["what"] for row in rows} - {row["what"] for row in own} == {"product"}


def test_the_way_back_that_is_compared_with_is_the_gradient(study):
    shape = study.base.TINY
    by_torch = {
        head["pass"]: job.args[0] for head, job in study.swiglu(shape, 8, False) if head["library"] == "torch"
    }
    (forward,), _ = by_torch["forward"]()
    (backward,), _ = by_torch["backward"]()
    both, h = forward()
    seed, second, joined = backward.args
    torch.testing.assert_close(joined, both)
    leaf = both.clone().requires_grad_()
    gate, up = leaf.chunk(2, dim=-1)
    (expected,) = torch.autograd.grad((F.silu(gate) * up) @ second.mT, leaf, seed)
    found, again = backward()
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(again, h)


def test_what_is_wrong_is_seen(study):
    x = torch.randn(4, 4)
    assert study.off(x, x) == 0.0
    assert study.off((x, 2 * x), (x, x)) == pytest.approx(0.5**0.5)
