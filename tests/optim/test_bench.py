"""`bench optim`: every contender in one run, a failing one named, error feedback leaves no bytes behind."""

from __future__ import annotations

import json

import pytest
import torch

from slipstream.bench import optim as bench
from slipstream.errors import UserError
from slipstream.models.sizes import ModelConfig

TINY = ModelConfig(vocab=32, dim=16, layers=2, heads=2, kv_heads=1, ffn=24)


def test_matrices_are_those_of_the_model():
    from slipstream.models.stages import build_model
    from slipstream.optim.build import split_parameters

    shapes = sorted(tuple(p.shape) for p in bench.matrices(TINY, "cpu"))
    assert shapes == sorted(tuple(p.shape) for p in split_parameters(build_model(TINY, seed=0))[0])


def test_steps_name_a_contender_that_fails(monkeypatch):
    def broken(params):
        raise RuntimeError("no such thing")

    contenders = {**bench.CONTENDERS, "broken": broken}
    monkeypatch.setattr(bench, "CONTENDERS", contenders)
    result = bench.measure_steps(TINY, "cpu", rounds=2)
    rows = result["contenders"]
    assert set(rows) == set(contenders)
    assert rows["broken"] == {"error": "RuntimeError: no such thing"}
    assert rows[bench.OURS]["times_ours"] == 1.0
    assert all(rows[name]["ms"] > 0 for name in (bench.OURS, bench.TORCH, bench.LIBRARY))
    assert result["matrices"] == 14


def test_error_feedback_keeps_nothing():
    result = bench.measure_corrections(TINY, "cpu", rounds=1)
    assert result["error_feedback_lasting_bytes"] == 0
    assert result["lasting_bytes"]["none"] > 0


def test_live_bytes_see_a_tensor():
    before = bench._live_bytes("cpu")
    kept = torch.zeros(1000)
    assert bench._live_bytes("cpu") - before == 4 * len(kept)


def test_json_is_all_there_is_on_stdout(capsys, monkeypatch):
    monkeypatch.setattr(bench, "PRESETS", {"tiny": TINY})
    returned = bench.run(as_json=True, device="cpu", preset="tiny", rounds=1)
    assert json.loads(capsys.readouterr().out) == returned
    bench.run(device="cpu", preset="tiny", rounds=1)
    assert "error feedback" in capsys.readouterr().out
    with pytest.raises(UserError, match="'tinny'"):
        bench.run(preset="tinny")


def test_mistakes_say_what_to_change(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for arguments, words in (
        ({"rounds": 0}, "1 round or more"),
        ({"device": "tpu"}, "choose cpu or cuda"),
        ({"device": "cuda"}, "Set --device cpu"),
    ):
        with pytest.raises(UserError, match=words):
            bench.run(**arguments)
