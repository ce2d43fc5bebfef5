"""Every file in examples/ has a pulse: runs train a few steps (shrunk to this machine), scripts run as they are."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from tests.train.conftest import VOCAB

from run_script import run_ranks
from slipstream.config import load, resolve
from slipstream.train import session

EXAMPLES = Path(__file__).parents[2] / "examples"
RUNS = sorted(EXAMPLES.glob("*.toml"))
SCRIPTS = {"drop_in.py", "delay_on_one_device.py"}
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
SHRUNK = [
    f"model.vocab={VOCAB}", "model.dim=16", "model.layers=4", "model.heads=2", "model.kv_heads=1", "model.ffn=32",
    "data.sequence=16", "train.steps=2", "train.device=cpu", "train.dtype=float32", "train.compile=false",
    "train.eval_every=0", "train.eval_batches=1", "checkpoint.every=1", "pipeline.stages=2",
    "pipeline.microbatch_size=2", "optim.warmup=0",
]  # fmt: skip


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.stem)
def test_an_example_run_trains(path, data, tmp_path, pool):
    resolve(load(path))  # valid as it stands
    emulated = load(path).pipeline.schedule == "emulate"
    overrides = [text for text in SHRUNK if not (emulated and text.startswith("pipeline.stages"))]
    config = resolve(load(path, [*overrides, f"data.path={data}", f"run.dir={tmp_path / 'run'}"]))
    if emulated:
        result = session.run_rank(None, config.model_dump())
    else:
        ranks = config.pipeline.stages * config.pipeline.data_ranks
        result = pool.run(session.run_rank, config.model_dump(), ranks=ranks, timeout=250)[0]
    assert (result["step"], result["reason"]) == (2, "finished")


def test_an_example_script_runs(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["delay_on_one_device.py", "--steps", "3"])
    runpy.run_path(str(EXAMPLES / "delay_on_one_device.py"), run_name="__main__")
    assert "muon" in capsys.readouterr().out


def test_an_example_script_runs_on_two_ranks():
    assert "3 updates" in run_ranks(EXAMPLES, "drop_in", given=("--steps", "3"))


@pytest.mark.slow
def test_an_example_script_runs_under_torchrun():
    command = [sys.executable, *TORCHRUN, str(EXAMPLES / "drop_in.py"), "--steps", "3"]
    environment = dict(os.environ, OMP_NUM_THREADS="1")
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, env=environment)
    assert done.returncode == 0, done.stderr
    assert "3 updates" in done.stdout


def test_every_example_is_covered():
    found = {path.name for path in EXAMPLES.iterdir() if path.is_file()}
    assert found == {path.name for path in RUNS} | SCRIPTS | {"two_nodes.slurm"}


def test_the_script_for_two_nodes_starts_an_example():
    script = EXAMPLES / "two_nodes.slurm"
    subprocess.run(["bash", "-n", str(script)], check=True)
    named = re.findall(r"slipstream train (\S+)", script.read_text())
    assert set(named) == {"examples/cluster_360m.toml"}
