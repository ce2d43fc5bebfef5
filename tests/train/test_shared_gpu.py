"""A run whose ranks share one GPU: the losses of one process, whatever the schedule; and its partitions."""

from __future__ import annotations

import shutil

import pytest
import torch
from tests.train.conftest import assert_equal_weights
from torch import nn

from slipstream.errors import ConfigError, UserError
from slipstream.pipeline.replica import Replica
from slipstream.train import checkpoint
from slipstream.train.start import start
from slipstream.train.synchronous import _as_module

on_gpu = pytest.mark.skipif(torch.cuda.device_count() != 1, reason="needs one CUDA device")


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16_autocast", "bfloat16"])
@pytest.mark.parametrize(
    ("schedule", "stages"), [("2bw", 4), ("2bw", 2), ("1f1b", 4), ("interleaved_1f1b", 2), ("zbv", 2)]
)
def test_ranks_on_one_gpu_train_like_one_process(runs, schedule, stages, dtype):
    common = ["train.device=cuda", f"train.dtype={dtype}", "train.eval_every=5"]
    runs.train("run", f"pipeline.schedule={schedule}", f"pipeline.stages={stages}", *common)
    delay = 1 if schedule == "2bw" else 0
    runs.train("one", "pipeline.schedule=emulate", f"pipeline.delay={delay}", *common)
    losses = [[event["loss"] for event in runs.events(name, "step")] for name in ("run", "one")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4 if dtype == "float32" else 2e-2)


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16_autocast", "bfloat16"])
@pytest.mark.parametrize("schedule", ["2bw", "1f1b", "gpipe", "interleaved_1f1b"])
def test_stages_as_cuda_graphs_train_as_plain_ones(runs, schedule, dtype):
    """Validations between updates, and the last updates fresh: both are computed plainly, or at other weights."""
    common = [
        "train.device=cuda",
        f"train.dtype={dtype}",
        "train.eval_every=5",
        f"pipeline.schedule={schedule}",
    ]
    stages = 2 if schedule == "interleaved_1f1b" else 4
    finish = ["optim.sync_finish=3"] if schedule == "2bw" else []
    for name, graphs in (("plain", "false"), ("recorded", "true")):
        runs.train(name, f"pipeline.stages={stages}", f"train.cuda_graphs={graphs}", *common, *finish)
    for kind in ("step", "validation"):
        plain, recorded = ([e["loss"] for e in runs.events(name, kind)] for name in ("plain", "recorded"))
        assert recorded == pytest.approx(plain, rel=1e-5 if dtype == "float32" else 1e-3)


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("more", [[], ["pipeline.data_ranks=2", "pipeline.shard_optimizer=true"]])
def test_a_bfloat16_run_resumes_from_a_master_in_halves(runs, more):
    narrow = ["pipeline.stages=2", "train.device=cuda", "train.dtype=bfloat16", "checkpoint.keep=9", *more]
    runs.train("whole", *narrow, "health.hash_every=3")
    cut = runs.folder / "cut"
    shutil.copytree(runs.folder / "whole", cut)
    for path in checkpoint.committed(cut / "checkpoints"):
        if path != checkpoint.folder_of(cut / "checkpoints", 8):
            shutil.rmtree(path)
    runs.train("cut", *narrow)
    assert runs.events("cut", "start")[-1]["resumed"]
    assert_equal_weights(runs.weights("cut"), runs.weights("whole"))


@pytest.mark.gpu
@on_gpu
def test_a_partitioned_gpu_trains(runs):
    start(runs.config("run", "pipeline.stages=2", "pipeline.partitions=true", "train.device=cuda"))
    assert runs.steps("run") == list(range(1, 13))


def test_partitions_without_a_gpu_are_refused(runs):
    with pytest.raises(ConfigError, match=r"pipeline.partitions cuts one GPU"):
        runs.config("run", "pipeline.partitions=true")
    if not torch.cuda.is_available():
        config = runs.config("run", "pipeline.partitions=true", "train.device=auto")
        with pytest.raises(UserError, match="torch sees none"):
            start(config)


def test_a_wrapped_replica_shows_its_parameters():
    """Torch's zero-bubble schedules take weight gradients of the parameters they find in a stage's module."""
    module = nn.Linear(2, 2)
    wrapped = _as_module(Replica(module, lambda x: module(x), list(module.parameters()), []))
    assert list(wrapped.parameters()) == list(module.parameters())
    assert wrapped(torch.ones(1, 2)).shape == (1, 2)
