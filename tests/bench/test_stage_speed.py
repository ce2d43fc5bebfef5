"""studies/stage_speed.py on a CPU: what will run on a GPU runs here, at toy size and not compiled."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from scripts import loaded
from slipstream.config.resolve import model_config
from slipstream.models.sizes import PRESETS

RIVAL = "hf_compiled"


@pytest.fixture(scope="module")
def study():
    with loaded("stage_speed") as module:
        yield module


def rows_of(out: Path):
    return [json.loads(line) for line in out.read_text().splitlines()]


def test_a_rehearsal_measures_every_candidate_and_outlives_one_that_fails(study, tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    monkeypatch.setitem(study.CANDIDATES, "broken", study.Candidate(("train.stepz=3",)))
    monkeypatch.setattr(
        study.optim, "CONTENDERS", {study.optim.OURS: study.optim.CONTENDERS[study.optim.OURS]}
    )
    out = tmp_path / "out.jsonl"
    names = ["base", "broken", RIVAL, study.STEPS, "chunked_loss_rows_x2"]
    study.run(out, 1e5, study.TINY, names, turns=1)
    rows = {(row["shape"], row["candidate"]): row for row in rows_of(out)}
    assert "train.steps" in rows["dense", "broken"]["error"]
    assert ("moe", RIVAL) not in rows  # it is dense
    assert rows["cpu-default", study.STEPS]["contenders"][study.optim.OURS]["ms"] > 0
    for name in ("base", "chunked_loss_rows_x2", RIVAL):
        row = rows["dense", name]
        assert row["tokens_per_second"] == pytest.approx(64 / row["step_seconds"])
        assert sum(row["shares"].values()) == pytest.approx(1)
        assert row["peak_memory_bytes"] > 0
        assert 0 < len(row["kernels"]) <= 25
        assert all(kernel["ms"] > 0 and len(kernel["name"]) <= 120 for kernel in row["kernels"])
        assert row["kernels"][0]["ms"] == max(kernel["ms"] for kernel in row["kernels"])
        assert {"ms", "at_ms", "after", "before"} == set(row["gaps"]["longest"][0])
        assert sum(group["count"] for group in row["gaps"]["by_length"]) > 0
    assert (rows["dense", "chunked_loss_rows_x2"]["rows"], rows["dense", "base"]["rows"]) == (4, 2)
    assert rows["moe", "base"]["shares"]["MLP or experts"] > 0


def test_without_time_nothing_is_begun_and_what_takes_too_long_is_an_error(study, tmp_path):
    out = tmp_path / "out.jsonl"
    study.run(out, 0.0, study.TINY, ["base"])
    assert rows_of(out) == []
    assert "TimeoutError: not done after 0 s" in study.attempt(lambda: time.sleep(60), 0.1)["error"]


def test_every_candidate_is_a_run_that_can_be_made(study):
    """On a GPU: its settings are resolved, a microbatch of each stays below 2^31 logits."""
    for shape in study.SHAPES.values():
        for candidate in study.CANDIDATES.values():
            setting = study.setting_of(shape, candidate)
            config = study.train_contenders.config_of(setting, Path("data"), Path("run"), delayed=True)
            assert config.tokens_per_step == shape.tokens_per_step
            assert (
                setting.rows * setting.sequence * model_config(config.model).vocab < 2**31
                or candidate.rows > 1
            )
    assert all(shape.model in PRESETS for shape in study.SHAPES.values())


def test_updates_are_as_large_as_such_models_are_trained_with(study):
    tokens = {key: shape.tokens_per_step for key, shape in study.SHAPES.items()}
    assert tokens == {"360m-1024": 2**19, "360m-2048": 2**19, "1.7b": 2**18, "moe": 2**18}


def test_a_rehearsal_leaves_out_what_only_a_gpu_can_do(study):
    assert set(study.all_names(tiny=False)) == {*study.CANDIDATES, *study.RIVALS, study.STEPS}
    names = study.all_names(tiny=True)
    assert names[0] == study.all_names(tiny=False)[0] == "base"
    for name in set(names) & set(study.CANDIDATES):
        for shape in study.TINY.values():
            setting = study.setting_of(shape, study.CANDIDATES[name])
            study.train_contenders.config_of(setting, Path("data"), Path("run"), delayed=True)
