"""`slipstream train` over NCCL, end to end: a kill, a resume into another number of stages, both launchers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NoReturn

import pytest

from train.conftest import TINY, make_data

pytestmark = [pytest.mark.gpu]
OURS = [sys.executable, "-m", "slipstream"]
SETTINGS = [
    *TINY,
    "train.steps=200",
    "train.device=cuda",
    "train.dtype=float32",
    "optim.name=adamw",  # Muon works in bf16 on a GPU, and rounds otherwise when its matrices are stacked otherwise
    "pipeline.cutover=4",  # all old; the default is another trajectory at every number of stages
    "checkpoint.every=20",
    "train.eval_every=50",
]


def torchrun(ranks: int, *options: str) -> list[str]:
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return [*start, *options, "-m", "slipstream"]


def steps(folder: Path) -> dict[int, float]:
    path = folder / "events.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    events = [json.loads(line) for line in lines if line.endswith("}")]
    return {event["step"]: event["loss"] for event in events if event["event"] == "step"}


@pytest.fixture(scope="module")
def setting(
    tmp_path_factory: pytest.TempPathFactory, library: dict[str, str]
) -> tuple[list[str], dict[int, float]]:
    """Settings, and the losses of a run that nothing disturbed, in one process."""
    folder = tmp_path_factory.mktemp("nccl")
    settings = [*SETTINGS, f"data.path={make_data(folder / 'data')}"]
    command = [*OURS, "train", *settings, f"run.dir={folder / 'plain'}", "pipeline.schedule=emulate"]
    subprocess.run(command, check=True, timeout=150, stdout=subprocess.DEVNULL)
    return settings, steps(folder / "plain")


def start(library: dict[str, str], command: list[str], log: Path) -> subprocess.Popen:
    environment = {**os.environ, **library, "OMP_NUM_THREADS": "1"}
    with log.open("a") as out:
        return subprocess.Popen(
            command, env=environment, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )


def reach(folder: Path, step: int, process: subprocess.Popen, log: Path) -> None:
    deadline = time.monotonic() + 120
    while step not in steps(folder):
        assert process.poll() is None, log.read_text()[-3000:]
        if time.monotonic() > deadline:
            give_up(process, log, f"step {step} was not reached")
        time.sleep(0.02)


def finish(process: subprocess.Popen, log: Path) -> None:
    try:
        code = process.wait(timeout=150)
    except subprocess.TimeoutExpired:
        give_up(process, log, "it did not end")
    assert code == 0, log.read_text()[-3000:]


def give_up(process: subprocess.Popen, log: Path, why: str) -> NoReturn:
    """With the stacks of every rank, which they print when they are asked."""
    for pid in ranks_of(process.pid):
        os.kill(pid, signal.SIGUSR2)
    time.sleep(2)
    os.killpg(process.pid, signal.SIGKILL)
    pytest.fail(f"{why}:\n{log.read_text()[-20000:]}")


def ranks_of(pid: int) -> list[int]:
    """Processes of ours below this one; torchrun itself would die of the signal."""
    below = [int(text) for text in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return below + [rank for child in below for rank in ranks_of(child)]


def test_a_kill_and_a_resume_into_another_depth(setting, library, tmp_path):
    settings, expected = setting
    folder, log = tmp_path / "run", tmp_path / "log"
    four = start(library, [*OURS, "train", *settings, f"run.dir={folder}", "pipeline.stages=4"], log)
    reach(folder, 50, four, log)
    os.killpg(four.pid, signal.SIGKILL)
    four.wait()
    time.sleep(2)
    command = [*torchrun(2), "train", *settings, f"run.dir={folder}", "pipeline.stages=2"]
    finish(start(library, command, log), log)
    found = steps(folder)
    assert sorted(found) == list(range(1, 201))
    assert [found[s] for s in sorted(found)] == pytest.approx([expected[s] for s in sorted(found)], rel=1e-4)
    assert "nccl" in json.loads((folder / "environment.json").read_text())["versions"]


def test_torchrun_restarts_after_a_lost_rank(setting, library, tmp_path):
    settings, _ = setting
    folder, log = tmp_path / "run", tmp_path / "log"
    command = [
        *torchrun(2, "--max-restarts=2"),
        "train",
        *settings,
        "pipeline.stages=2",
        "train.timeout_seconds=20",
    ]
    finish(start(library, [*command, f"run.dir={tmp_path / 'plain'}"], log), log)
    process = start(library, [*command, f"run.dir={folder}"], log)
    reach(folder, 50, process, log)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(children[-1]), signal.SIGKILL)
    finish(process, log)
    assert sorted(steps(folder)) == list(range(1, 201))
    assert steps(folder) == steps(tmp_path / "plain")  # to the bit


def test_kernels_that_wait_leave_room_on_a_gpu_that_eight_ranks_share(surroundings, tmp_path):
    """Messages of a real size: NCCL takes as many multiprocessors for them as it may, on each of the ranks."""
    folder, log = tmp_path / "run", tmp_path / "log"
    layout = ["pipeline.stages=4", "pipeline.data_ranks=2", "pipeline.shard_optimizer=true"]
    batch = ["pipeline.microbatches=8", "pipeline.microbatch_size=8", "data.sequence=1024"]
    model = ["model.preset=smollm2-135m", "optim.name=muon", "train.dtype=bfloat16", "train.device=cuda"]
    brief = ["train.steps=3", "train.log_every=1", "train.eval_every=0", "checkpoint.keep=0"]
    command = [*OURS, "train", *model, *layout, *batch, *brief, f"run.dir={folder}"]
    finish(start(surroundings, command, log), log)
    assert sorted(steps(folder)) == [1, 2, 3]
