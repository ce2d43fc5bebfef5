"""`slipstream bench` and `slipstream bench race` over NCCL, as a user calls them."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from train.conftest import TINY, make_data

pytestmark = [pytest.mark.gpu]


def bench(surroundings: dict[str, str], *arguments: str) -> str:
    command = [sys.executable, "-m", "slipstream", "bench", *arguments, "--json"]
    environment = {**os.environ, **surroundings, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, timeout=200, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_every_contender_runs(surroundings):
    options = (
        "--device cuda --work language --model llama-8m --rows 1 --sequence 64 --stages 2 --microbatches 4"
    )
    (row,) = json.loads(bench(surroundings, *options.split(), "--rounds", "1", "--updates", "4"))
    assert row["carrier"] == "nccl"
    assert not row["errors"], row["errors"]
    times = [
        row[name] for name in row if name.endswith("_ms") and name.startswith(("torch_", "slip", "bound"))
    ]
    assert all(time > 0 for time in times), row


def test_a_race(surroundings, tmp_path):
    data = make_data(tmp_path / "data")
    settings = [*TINY, f"data.path={data}", "train.device=cuda", "pipeline.stages=2", "train.steps=40"]
    settings += ["train.eval_every=10", "train.sample_tokens=0", "checkpoint.every=0"]
    result = json.loads(
        bench(surroundings, "race", *settings, "--schedules", "2bw,1f1b", "--out", str(tmp_path / "race"))
    )
    assert result["complete"]
    assert result["target_loss"] > 0
    for name in ("2bw", "1f1b"):
        environment = json.loads((tmp_path / "race" / name / "environment.json").read_text())
        assert "nccl" in environment["versions"]
