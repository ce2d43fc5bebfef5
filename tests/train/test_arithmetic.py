"""How a run computes ends with it, and a deterministic one gives the same bits every time, at every depth."""

from __future__ import annotations

import os

import pytest
import torch
from tests.train.conftest import assert_equal_weights
from torch.utils import deterministic

from slipstream.config.settings import TrainSettings
from slipstream.errors import ConfigError
from slipstream.train.arithmetic import arithmetic

CPU = torch.device("cpu")


def test_a_narrow_run_leaves_float32_products_as_it_found_them():
    """A study's process trains one run after another: those in float32 must not depend on what came before."""
    before = torch.get_float32_matmul_precision()
    with arithmetic(TrainSettings(dtype="float32"), CPU):
        assert torch.get_float32_matmul_precision() == before
    with arithmetic(TrainSettings(dtype="bfloat16"), CPU):
        assert torch.get_float32_matmul_precision() == "high"
    assert torch.get_float32_matmul_precision() == before


def test_a_deterministic_run_leaves_torch_as_it_found_it(monkeypatch):
    from torch._inductor import config

    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)

    def state():
        filled = deterministic.fill_uninitialized_memory
        return torch.are_deterministic_algorithms_enabled(), filled, config.deterministic

    def interrupted():
        with arithmetic(TrainSettings(deterministic=True), torch.device("cuda")):
            assert state() == (True, False, True)
            assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
            raise KeyboardInterrupt

    assert state() == (False, True, False)
    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert state() == (False, True, False)
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ
    for settings, device in (
        (TrainSettings(), torch.device("cuda")),
        (TrainSettings(deterministic=True), CPU),
    ):
        with arithmetic(settings, device):
            assert state() == (False, True, False)


def test_a_deterministic_run_has_the_bits_of_any_other_on_a_cpu(runs, reference):
    runs.train("run", "pipeline.stages=2", "train.deterministic=true")
    assert_equal_weights(runs.weights("run"), reference.weights("2bw"))


def test_a_kernel_that_is_not_deterministic_is_refused(runs):
    with pytest.raises(
        ConfigError, match=r"train.attention = cudnn cannot take effect with train.deterministic"
    ):
        runs.config("run", "train.attention=cudnn", "train.deterministic=true")
    runs.config("run", "train.attention=flash", "train.deterministic=true")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "bfloat16_autocast"])
@pytest.mark.parametrize("optimizer", ["muon", "adamw_capped", "adamw"])
def test_a_deterministic_run_on_a_gpu_has_the_same_bits_at_every_depth(runs, dtype, optimizer):
    common = ["train.device=cuda", f"train.dtype={dtype}", f"optim.name={optimizer}"]
    found = {}
    for name, schedule in {"one": "emulate", "again": "emulate", "two": "2bw", "four": "2bw"}.items():
        stages = {"two": 2, "four": 4}.get(name, 1)
        layout = [f"pipeline.schedule={schedule}", f"pipeline.stages={stages}"]
        runs.train(name, *common, *layout, "train.deterministic=true")
        found[name] = [event["loss"] for event in runs.events(name, "step")]
    assert found["again"] == found["one"]
    assert found["two"] == found["one"]
    assert found["four"] == found["one"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("how", ["layers", "stage"])
def test_a_compiled_deterministic_run_on_a_gpu_repeats_itself(runs, how):
    words = ["train.device=cuda", "train.dtype=bfloat16", f"train.compile={how}", "train.cuda_graphs=true"]
    for name in ("one", "again"):
        runs.train(name, *words, "pipeline.stages=2", "train.deterministic=true")
    assert_equal_weights(runs.weights("again"), runs.weights("one"))
