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


def in_turns(joined):
    """Columns [all of gate, all of up] as gate and up by turns."""
    return joined.unflatten(-1, (2, -1)).mT.flatten(-2)


class Quack:
    """What QuACK says that it computes."""

    @staticmethod
    def gemm(a, b, out, tuned):
        return torch.mm(a, b, out=out)

    @staticmethod
    def gemm_gated(a, b, activation, tuned, concat_layout):
        assert (activation, concat_layout) == ("swiglu", ("B",))
        joined = in_turns(a @ b)
        return joined, F.silu(joined[:, ::2]) * joined[:, 1::2]

    @staticmethod
    def gemm_dgated(a, b, joined, activation, tuned):
        assert activation == "swiglu"
        gate, up = (joined[:, turn::2].detach().requires_grad_() for turn in (0, 1))
        h = F.silu(gate) * up
        return torch.stack(torch.autograd.grad(h, (gate, up), a @ b), dim=-1).flatten(1), h.detach()

    @staticmethod
    def gemm_symmetric(a, b, C, out, alpha, beta):
        torch.testing.assert_close(a.mT, b)
        return out.copy_(alpha * a @ b + (0 if C is None else beta * C))


@pytest.mark.parametrize("fault", [None, "gemm", "gemm_gated", "gemm_dgated", "gemm_symmetric"])
def test_a_library_that_computes_what_it_says_is_not_off_and_one_that_errs_is(
    study, fault, tmp_path, monkeypatch
):
    class Library(Quack):
        pass

    if fault:
        whole = getattr(Quack, fault)

        def wrong(*args, **rest):
            found = whole(*args, **rest)
            return tuple(1.01 * x for x in found) if isinstance(found, tuple) else found.mul_(1.01)

        setattr(Library, fault, staticmethod(wrong))
    monkeypatch.setattr(study, "quack", lambda: Library)
    out = tmp_path / "out.jsonl"
    study.base.measure(
        out, 1e5, (one for one in study.jobs(study.base.TINY, False) if one[0]["library"] == "quack")
    )
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    of = {
        "gemm": ("product", None),
        "gemm_gated": ("gated", "forward"),
        "gemm_dgated": ("gated", "backward"),
        "gemm_symmetric": ("symmetric", None),
    }
    assert len(rows) == 24 + 2 + 2
    for row in rows:
        errs = fault is not None and row["what"] == of[fault][0] and of[fault][1] in (None, row.get("pass"))
        assert row["off"] == pytest.approx(0.01 if errs else 0.0, abs=1e-5), row


def test_what_is_wrong_is_seen(study):
    x = torch.randn(4, 4)
    assert study.off(x, x) == 0.0
    assert study.off((x, 2 * x), (x, x)) == pytest.approx(0.5**0.5)
