"""What is decided before a process group is made: configs, refusals, how many copies of a stage a rank has."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch

from slipstream.errors import ConfigError, UserError

pytest.importorskip(
    "torchtitan.trainer",
    reason="needs torchtitan and a torch that it takes: see docs/torchtitan.md",
    exc_type=ImportError,
)

from torchtitan.components.loss import ChunkedLossWrapper
from torchtitan.config import ConfigManager
from torchtitan.models.llama3.config_registry import llama3_debugmodel, llama3_debugmodel_float8
from torchtitan.models.qwen3.config_registry import qwen3_moe_debug

from slipstream.pipeline.versions import Versions
from slipstream.schedule.cutover import Cutover, never
from slipstream.torchtitan import Settings, check_torch, with_2bw
from slipstream.torchtitan.configs import configs_of
from slipstream.torchtitan.optimizers import Optimizers2BW
from slipstream.torchtitan.settings import check, refused

EXAMPLES = Path(__file__).parent.parent.parent / "examples" / "torchtitan"


def ready(source=llama3_debugmodel, **parallelism):
    config = with_2bw(source())
    config.parallelism = replace(config.parallelism, **{"pipeline_parallel_degree": 2, **parallelism})
    return config


def test_a_torch_that_torchtitan_cannot_be_imported_with_is_named():
    check_torch("2.13.0+cpu")
    check_torch("3.0.0a0+git1234")
    with pytest.raises(
        UserError, match=r"cannot be imported with torch 2\.11\.0\+cu130\. Install torch 2\.14\.1"
    ):
        check_torch("2.11.0+cu130")


def test_a_config_of_torchtitan_passes_with_two_stages():
    check(ready())


def test_the_loss_in_chunks_is_taken_in_one_piece():
    stock = llama3_debugmodel()
    assert isinstance(stock.loss, ChunkedLossWrapper.Config)
    assert with_2bw(stock).loss == stock.loss.loss_fn
    config = ready()
    config.loss = stock.loss
    with pytest.raises(ConfigError, match="loss: ChunkedLossWrapper"):
        check(config)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"pipeline_parallel_degree": 1}, "pipeline_parallel_degree is 1"),
        ({"pipeline_parallel_schedule": "Interleaved1F1B"}, "2BW takes its place"),
        ({"context_parallel_degree": 2}, "context_parallel_degree"),
        ({"expert_parallel_degree": 2}, "expert_parallel_degree"),
        ({"spmd_backend": "full_dtensor"}, "full_dtensor"),
    ],
)
def test_a_layout_that_the_engine_does_not_know_is_refused_by_name(change, words):
    with pytest.raises(ConfigError, match=words):
        check(ready(**change))


def test_float8_is_refused_by_name():
    pytest.importorskip("torchao", reason="torchtitan's float8 configs need torchao")
    with pytest.raises(ConfigError, match="quantized layers"):
        check(ready(llama3_debugmodel_float8))


def test_balancing_of_experts_is_refused_by_name_and_experts_without_it_are_not():
    config = ready(qwen3_moe_debug)
    with pytest.raises(ConfigError, match="load_balance_coeff to None"):
        check(config)
    for layer in config.model_spec.model.layers:
        if layer.moe is not None:
            layer.moe.load_balance_coeff = None
    check(config)


def test_every_problem_is_told_at_once():
    config = ready(context_parallel_degree=2, spmd_backend="full_dtensor")
    config.training.enable_cpu_offload = True
    assert len(list(refused(config))) == 3


def test_a_trainer_with_its_own_step_is_refused():
    with pytest.raises(UserError, match="Trainer2BW has its own"):
        with_2bw(with_2bw(llama3_debugmodel()))


def test_an_optimizer_s_options_need_its_name():
    with pytest.raises(UserError, match=r"slipstream\.optimizer"):
        Settings(lr=1e-3)


@pytest.mark.parametrize("module", ["llama3", "qwen3"])
def test_ready_modules_have_torchtitans_configs_under_their_names(module):
    names = configs_of(module)
    assert f"{module}_debugmodel" in names or "qwen3_debugmodel" in names
    found = ConfigManager().parse_args(
        [
            "--module", f"slipstream.torchtitan.{module}", "--config", f"{module}_debugmodel",
            "--parallelism.pipeline_parallel_degree", "2", "--slipstream.cutover", "3",
            "--slipstream.optimizer", "muon", "--slipstream.lr", "0.002",
        ]
    )  # fmt: skip
    assert found.slipstream == Settings(cutover=3, optimizer="muon", lr=0.002)
    assert found.training.disable_cuda_graphs


@pytest.mark.parametrize("name", ["debug", "large"])
def test_the_example_is_a_config(name, monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    stages = ["--parallelism.pipeline_parallel_degree", "2"]
    check(ConfigManager().parse_args(["--module", "llama3_2bw", "--config", name, *stages]))


@pytest.mark.parametrize("module", [torch.nn.LayerNorm(8), torch.nn.Linear(8, 8, bias=False)])
def test_a_stage_without_matrices_or_without_anything_else_is_saved_and_loaded(module):
    made = Optimizers2BW(
        Optimizers2BW.Config(name="muon", options={"lr": 0.25}), model_parts=[torch.nn.Sequential(module)]
    )
    made.load_state_dict(made.state_dict())
    (optimizer,) = made
    assert [entry["lr"] for entry in optimizer.param_groups] == [0.25, 0.25]
    assert {len(entry["params"]) == 0 for entry in optimizer.param_groups} == {True, False}


@pytest.mark.parametrize(
    ("correction", "cutover"),
    [
        *product(("error_feedback", "none"), (None, 0, 2, 8)),
        *product(("delay_compensation",), (None, 0, 8)),  # which takes no mixed group
    ],
)
def test_as_many_copies_are_made_as_the_engine_asks_for(correction, cutover):
    settings = Settings(correction=correction, cutover=cutover)
    old = settings.old_part(2, 8, on_host=False)
    versions = Versions(
        torch.nn.Linear(2, 2), Cutover(8, old, never), looks_ahead=settings.made().looks_ahead
    )
    assert settings.replicas(2, 8, on_host=False) == len(versions.replicas)


def test_processors_have_as_many_old_as_the_engine_there():
    settings = Settings()
    assert [settings.old_part(8, 24, on_host) for on_host in (False, True)] == [9, 13]
