"""studies/stage_products.py on a CPU: what will run on a GPU runs here, at toy size and not compiled."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from scripts import loaded


@pytest.fixture(scope="module")
def study():
    with loaded("stage_products") as module:
        yield module


def test_a_rehearsal_measures_everything(study, tmp_path):
    out = tmp_path / "out.jsonl"
    study.run(out, 1e5, study.TINY)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert not [row for row in rows if "error" in row]
    assert all(row["ms"] > 0 and row["kernels"] for row in rows)
    found = {(row["what"], row["name"], row["pass"], row["tokens"]) for row in rows}
    names = ("q", "kv", "qkv", "o", "gate", "gate_up", "down", "head")
    for tokens in study.TINY.tokens:
        assert {one for one in found if one[0] == "product" and one[3] == tokens} == {
            ("product", name, which, tokens) for name in names for which in study.PASSES
        }
    assert {one[:2] for one in found if one[0] != "product"} == {
        ("attention", "math"),
        *(("norm", name) for name in study.NORM_SETTINGS),
        *(("swiglu", name) for name in ("apart", "joined")),
    }
    head = next(row for row in rows if (row["name"], row["pass"]) == ("head", "dX"))
    assert head["tflops"] == pytest.approx(2 * 64 * 24 * 96 / (head["ms"] * 1e9))
    gate = next(row for row in rows if (row["what"], row["pass"]) == ("swiglu", "backward"))
    assert gate["gb_per_s"] == pytest.approx(5 * 64 * 40 * 4 / (gate["ms"] * 1e6))


@pytest.mark.parametrize("part", ["operands", "milliseconds"])
def test_what_fails_is_a_line_with_an_error_and_the_others_go_on(study, part, tmp_path, monkeypatch):
    """Where operands do not fit, and where a product cannot be computed."""
    whole = getattr(study, part)

    def failing(*args):
        if part == "operands" or len(args[0]) > 1:  # the calls of a product take turns
            raise torch.OutOfMemoryError("too\nlarge")
        return whole(*args)

    monkeypatch.setattr(study, part, failing)
    out = tmp_path / "out.jsonl"
    study.run(out, 1e5, study.TINY)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(rows) == 112
    for row in rows:
        assert row.get("error") == ("OutOfMemoryError: too large" if row["what"] == "product" else None)


def test_nothing_is_begun_when_the_time_is_over(study, tmp_path, monkeypatch, capsys):
    assert study.run(tmp_path / "out.jsonl", 0.0, study.TINY) == []
    now = iter(range(100))
    monkeypatch.setattr(study.time, "perf_counter", lambda: next(now))
    monkeypatch.setattr(study, "attempt", lambda job: {"ms": 1.0, "kernels": []})
    assert len(study.run(tmp_path / "out.jsonl", 10.0, study.TINY)) == 10
    assert capsys.readouterr().out.splitlines()[-1] == "not done after 10 s"


def test_compiled_code_has_backwards_that_run_more_than_once(study, monkeypatch):
    whole = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **options: whole(f, backend="aot_eager", **options))
    shape = replace(study.TINY, compiled=True)
    for part in (study.swiglu, study.norm):
        rows = [head | study.attempt(job) for head, job in part(shape, 64)]
        assert not [row for row in rows if "error" in row]
    torch.compiler.reset()


@pytest.mark.parametrize("which", ["forward", "dX", "dW"])
def test_operands_are_those_of_a_linear_layer_and_take_turns(study, which):
    sets = study.operands(which, 7, 3, 5, study.TINY)
    assert len({tensor.data_ptr() for one in sets for tensor in one}) == 3 * len(sets) >= 6
    for a, b, out in sets:
        sizes = {"forward": (7, 3, 5), "dX": (7, 5, 3), "dW": (5, 7, 3)}[which]
        assert (*a.shape, b.shape[1]) == sizes
        assert out.shape == (a @ b).shape
        assert out.is_contiguous()
