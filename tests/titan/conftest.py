"""Runs of torchtitan on this machine's cores, all started by one process. See `job.py`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
SOURCE = HERE.parent.parent / "src"
STEPS = 20
PATIENCE = 1800  # seconds; four ranks of torchtitan on two cores start slowly
ROWS = 8  # of a step, over all data ranks


class Runs:
    """Named runs: `add` some, `start` them, then ask for what they logged."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._jobs, self._names = folder, [], set()
        for model in ("llama3", "qwen3"):
            self.add(f"seed {model}", "seed", model=model, config={"checkpoint.create_seed_checkpoint": True})

    def checkpoint(self, name: str, step: int) -> str:
        return str(self.folder / name / "checkpoint" / f"step-{step}")

    def add(
        self, name, kind="2bw", stages=1, fsdp=1, tp=1, load=None, config=None, model="llama3", **more
    ) -> None:
        """A run from the seed, or from checkpoint `load`, with one row of a microbatch on each data rank."""
        assert name not in self._names, name
        self._names.add(name)
        settings = {
            "training.steps": STEPS,
            "training.local_batch_size": ROWS // fsdp,
            "training.global_batch_size": ROWS,
            "parallelism.pipeline_parallel_degree": stages,
            "parallelism.data_parallel_shard_degree": fsdp,
            "parallelism.tensor_parallel_degree": tp,
            "checkpoint.enable": True,
            "comm.init_timeout_seconds": PATIENCE,
        }
        if kind == "2bw":
            settings["slipstream.timeout_seconds"] = float(PATIENCE)
        if kind != "seed":
            settings["checkpoint.initial_load_path"] = load or self.checkpoint(f"seed {model}", 0)
            settings["checkpoint.initial_load_model_only"] = load is None
            settings["checkpoint.load_only"] = True
        folder = str(self.folder / name)
        job = {
            "kind": kind,
            "ranks": stages * fsdp * tp,
            "folder": folder,
            "config": settings | (config or {}),
        }
        self._jobs.append(job | {"model": model} | more)

    def start(self, launcher: Sequence[str] = (), surroundings: Mapping[str, str] | None = None) -> None:
        """Each run's ranks are forked, or started by `launcher` (torchrun), once for every run added since."""
        plan = self.folder / "jobs.json"
        plan.write_text(json.dumps(self._jobs))
        self._jobs = []
        path = os.pathsep.join([str(SOURCE), str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
        device = {"CUDA_VISIBLE_DEVICES": ""} if surroundings is None else surroundings
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **device}
        done = subprocess.run(
            [sys.executable, *launcher, str(HERE / "job.py"), str(plan)],
            env=environment, cwd=self.folder, capture_output=True, text=True, check=False,
        )  # fmt: skip
        self.said = done.stdout + done.stderr
        assert done.returncode == 0, self.said[-6000:]

    def _record(self, name: str) -> dict:
        """Of the rank that has the loss: the others log -1."""
        found = [
            json.loads(path.read_text()) for path in sorted((self.folder / name / "record").glob("*.json"))
        ]
        return next(record for record in found if any(s["loss"] >= 0 for s in record["steps"].values()))

    def losses(self, name: str) -> dict[int, float]:
        return {int(step): logged["loss"] for step, logged in self._record(name)["steps"].items()}

    def norms(self, name: str) -> dict[int, float]:
        """Of stock torchtitan as it logs them, of ours as the engine knows them when the run has ended."""
        record = self._record(name)
        logged = {step: found["norm"] for step, found in record["steps"].items() if "norm" in found}
        return {int(step): norm for step, norm in (record["norms"] or logged).items()}

    def validations(self, name: str) -> dict[int, float]:
        return {int(step): loss for step, loss in self._record(name)["validations"].items()}


def require(least: tuple[int, int] = (2, 13)) -> None:
    """Skip where there is no torchtitan, or a torch that is too old for it. 2.14: for torchtitan's own pipelines."""
    pytest.importorskip("torchtitan", reason="needs torchtitan: see docs/torchtitan.md for the versions")
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < least:
        wanted = ".".join(map(str, least))
        pytest.skip(f"needs torch {wanted}: torchtitan 0.3.0 does not work with {torch.__version__}")


@pytest.fixture(scope="session")
def runs(tmp_path_factory):
    require()
    return Runs(tmp_path_factory.mktemp("titan"))
