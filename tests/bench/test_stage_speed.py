"""studies/stage_speed.py on a CPU: what will run on a GPU runs here, at toy size and not compiled."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F

from scripts import loaded
from slipstream.config.resolve import model_config
from slipstream.models import llama, loss
from slipstream.models.sizes import PRESETS

RIVAL = "hf_compiled"


@pytest.fixture(scope="module")
def study():
    with loaded("stage_speed") as module:
        yield module


def rows_of(out: Path):
    return [json.loads(line) for line in out.read_text().splitlines()]


def test_a_rehearsal_measures_candidates_of_every_kind_and_outlives_one_that_fails(
    study, tmp_path, monkeypatch, capsys
):
    pytest.importorskip("transformers")
    monkeypatch.setitem(study.CANDIDATES, "broken", study.Candidate(("train.stepz=3",)))
    monkeypatch.setattr(
        study.optim, "CONTENDERS", {study.optim.OURS: study.optim.CONTENDERS[study.optim.OURS]}
    )
    out = tmp_path / "out.jsonl"
    ours = ["base", "apart+online", "chunked_loss_rows_x2", "autotune", "base_last"]
    names = ["base", "broken", RIVAL, study.STEPS, *ours[1:]]
    study.run(out, 1e5, study.TINY, names, turns=1)
    rows = {(row["shape"], row["candidate"]): row for row in rows_of(out)}
    assert "train.steps" in rows["dense", "broken"]["error"]
    assert ("moe", RIVAL) not in rows  # it is dense
    assert rows["cpu-default", study.STEPS]["contenders"][study.optim.OURS]["ms"] > 0
    for name in (*ours, RIVAL):
        row = rows["dense", name]
        assert row["tokens_per_second"] == pytest.approx(64 / row["step_seconds"])
        assert sum(row["shares"].values()) == pytest.approx(1)
        assert row["peak_memory_bytes"] > 0
        assert 25 < len(row["kernels"]) <= 100
        assert all(kernel["ms"] > 0 and len(kernel["name"]) <= 120 for kernel in row["kernels"])
        assert row["kernels"][0]["ms"] == max(kernel["ms"] for kernel in row["kernels"])
        assert {"ms", "at_ms", "after", "before"} == set(row["gaps"]["longest"][0])
        assert sum(group["count"] for group in row["gaps"]["by_length"]) > 0
    assert (rows["dense", "chunked_loss_rows_x2"]["rows"], rows["dense", "base"]["rows"]) == (4, 2)
    assert rows["moe", "base"]["shares"]["MLP or experts"] > 0
    for shape in study.TINY:  # the same weights and tokens
        losses = [rows[shape, name]["loss"] for name in ours]
        assert losses == pytest.approx([losses[0]] * len(ours), rel=1e-5)
    last = capsys.readouterr().out.splitlines()[-2:]
    assert [line.split(":")[0] for line in last] == list(study.TINY)
    assert all("broken failed" in line and "base_last " in line for line in last)


def test_an_environment_is_that_of_a_process_of_its_own(study, monkeypatch):
    row = study.measured(study.TINY["dense"], "workspace")
    assert row["tokens_per_second"] > 0
    assert "CUBLASLT_WORKSPACE_SIZE" not in os.environ
    monkeypatch.setitem(
        study.CANDIDATES, "workspace", study.Candidate(environment=(("PYTHONHOME", "/none"),))
    )
    assert (
        "RuntimeError" in study.attempt(lambda: study.measured(study.TINY["dense"], "workspace"), 60)["error"]
    )


def test_without_time_nothing_is_begun_and_what_takes_too_long_is_an_error(study, tmp_path):
    out = tmp_path / "out.jsonl"
    study.run(out, 0.0, study.TINY, ["base"])
    assert rows_of(out) == []
    assert "TimeoutError: not done after 0 s" in study.attempt(lambda: time.sleep(60), 0.1)["error"]


class Clock:
    """Measurements that take as long as they are said to."""

    def __init__(self, study, monkeypatch, seconds):
        self.now, self.seconds, self.begun = 0.0, seconds, []
        monkeypatch.setattr(study.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(study, "attempt", lambda job, left: job() if left > 0 else {})
        monkeypatch.setattr(study, "measured", lambda shape, name: self.measure(name))

    def measure(self, name):
        self.begun.append((name, self.now))
        self.now += self.seconds[name]
        return {"tokens_per_second": 1000 / self.seconds[name], "mfu": None}


def test_time_is_kept_for_the_last_base_and_nothing_is_begun_that_cannot_end(
    study, tmp_path, monkeypatch, capsys
):
    clock = Clock(study, monkeypatch, {"base": 10, "apart": 20, "pdl": 30, "stage": 8, "base_last": 10})
    names = ["base", "apart", "pdl", "stage", "base_last"]
    one = {"dense": study.TINY["dense"]}
    study.run(tmp_path / "out.jsonl", 75.0, one, names, turns=1)
    # After 60 s five are left beside the ten of the base.
    assert clock.begun == [("base", 0), ("apart", 10), ("pdl", 30), ("base_last", 60)]
    assert (
        capsys.readouterr().out.splitlines()[-1]
        == "dense: base +0.00%, base_last +0.00%, apart -50.00%, pdl -66.67%"
    )


def test_a_summary_names_what_failed_and_what_has_no_base(study):
    assert study.summary({}) == "nothing was measured"
    assert study.summary({"apart": [3.0], "pdl": [None]}) == "apart 3 tokens/s, pdl failed"
    found = study.summary({"base": [100.0, 102.0], "apart": [103.0], "base_last": [99.0]})
    assert found == "apart +3.00%, base +1.00%, base_last -1.00%"


def test_candidates_joined_by_plus_are_set_together(study):
    both = study.candidate_of("stage+apart+workspace+chunked_loss_rows_x2")
    assert both.overrides == (study.STAGE, study.CHUNKED)
    assert both.constants == (study.APART, study.LARGE)
    assert both.rows == 2
    assert dict(both.environment)["CUBLASLT_WORKSPACE_SIZE"] == "131072"
    assert study.candidate_of("base+cublaslt").blas == "cublaslt"


def test_what_a_candidate_sets_exists_and_is_set_inside_only(study):
    from torch._inductor import config

    def found():
        return [
            *(llama.Attention._can_join, loss.ONLINE_LSE, loss._HEAD_VALUES, config.triton.enable_pdl),
            *(config.max_autotune_gemm, config.coordinate_descent_tuning, llama.MLP.forward),
        ]

    before = found()
    for candidate in study.CANDIDATES.values():
        if candidate.flash4:
            continue
        with study.under(candidate, "cpu"):
            changed = sum(one != other for one, other in zip(found(), before, strict=True))
            seen = {name for name, _ in (*candidate.constants, *candidate.inductor)}
            assert changed == len({n for n in seen if "mix_order" not in n and "persistent_tma" not in n})
        assert found() == before


@pytest.fixture
def library(monkeypatch):
    """A module where a library that is not installed would be."""

    def made(name: str, **contents):
        module = ModuleType(name)
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, name, module)
        return module

    return made


def test_flash_attention_4_gives_torch_what_torch_expects_and_only_inside(study, library, monkeypatch):
    for name in ("flash_attn", "flash_attn.cute"):
        library(name)

    def forward(q, causal):
        # As the library does it: what has been compiled is found by the name of the function.
        return q, causal, *interface._flash_attn_fwd.compile_cache

    forward.compile_cache = [None, None, None]
    interface = library("flash_attn.cute.interface", _flash_attn_fwd=forward)
    whole, calls = interface._flash_attn_fwd, []
    torchs = ("activate_flash_attention_impl", "restore_flash_attention_impl")
    for name in torchs:
        monkeypatch.setattr(torch.nn.attention, name, lambda *given, name=name: calls.append((name, *given)))
    with study.under(study.CANDIDATES["flash4"], "cpu"):
        assert interface._flash_attn_fwd(1, causal=True) == (1, True)
    assert interface._flash_attn_fwd is whole
    assert calls == [(torchs[0], "FA4"), (torchs[1],)]


def test_an_mlp_of_other_products_is_the_mlp(study, library):
    """In QuACK against what it says of itself: gate's rows above up's, h = silu(gate) * up."""

    def mlp_func(x, first, second, activation, tuned, concat_layout):
        assert (activation, tuned, concat_layout) == ("swiglu", False, True)
        gate, up = (x @ first.mT).chunk(2, dim=-1)
        return (F.silu(gate) * up) @ second.mT

    library("quack")
    library("quack.mlp", mlp_func=mlp_func)
    mlp, x = llama.MLP(PRESETS["cpu-default"]), torch.randn(2, 3, PRESETS["cpu-default"].dim)
    expected = mlp(x)
    for name in ("gate_up", "quack"):
        with study.under(study.CANDIDATES[name], "cpu"):
            torch.testing.assert_close(mlp(x), expected)


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
    assert tokens == {
        "360m-1024": 2**19,
        "360m-8-layers": 2**19,
        "360m-2048": 2**19,
        "1.7b": 2**18,
        "moe": 2**18,
    }


def test_a_few_layers_are_compiled_one_by_one_unless_a_candidate_says_otherwise(study):
    shape = study.SHAPES["360m-8-layers"]
    for name, how in (("base", "layers"), ("apart", "layers"), ("stage_chunked_x2", "stage")):
        setting = study.setting_of(shape, study.candidate_of(name))
        config = study.train_contenders.config_of(setting, Path("data"), Path("run"), delayed=True)
        assert (config.train.compile, model_config(config.model).layers) == (how, 8)


def test_a_rehearsal_leaves_out_what_only_a_gpu_can_do(study):
    assert set(study.all_names(tiny=False)) == {*study.CANDIDATES, *study.RIVALS, study.STEPS}
    names = study.all_names(tiny=True)
    assert names[0] == study.all_names(tiny=False)[0] == "base"
    for name in set(names) & set(study.CANDIDATES):
        for shape in study.TINY.values():
            setting = study.setting_of(shape, study.CANDIDATES[name])
            study.train_contenders.config_of(setting, Path("data"), Path("run"), delayed=True)
