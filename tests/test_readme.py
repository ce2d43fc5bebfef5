"""The README does what it says: its snippet runs as pasted, and its commands make a newcomer's first minute."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path

import pytest

from run_script import run_ranks

launch = import_module(
    "slipstream.distributed.launch"
)  # its way to start a process: warm, where there is no GPU
ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
SMALL = [
    "model.dim=32",
    "model.layers=2",
    "model.heads=2",
    "model.kv_heads=1",
    "model.ffn=64",
    "data.sequence=32",
]
SMALL += ["pipeline.microbatches=2", "train.eval_batches=1", "train.device=cpu"]


def commands(first: str) -> list[str]:
    """The indented block of the README that begins with a line that starts like `first`."""
    lines = README.splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith(f"    {first}"))
    block = []
    for line in lines[start:]:
        if not line.startswith("    "):
            break
        block.append(line.split("  #")[0].strip())
    return block


@pytest.fixture
def shell(tmp_path):
    """Runs a line as a newcomer would in an installed checkout: `slipstream`, `torchrun` and `python` are "
    "on the path."""
    bins = tmp_path / "bin"
    bins.mkdir()
    modules = {"slipstream": "-m slipstream", "torchrun": "-m torch.distributed.run", "python": ""}
    for name, module in modules.items():
        (bins / name).write_text(f'#!/bin/sh\nexec {sys.executable} {module} "$@"\n')
        (bins / name).chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{bins}:{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "80",
    }
    place = tmp_path / "here"
    place.mkdir()

    def run(line: str, *more: str, stop_at: int | None = None) -> tuple[int, str]:
        """Our command starts warm (`tests/test_cli.py` starts it cold), any other in a fresh interpreter."""
        words = [*shlex.split(line), *more]
        options = {"cwd": place, "env": environment, "text": True}
        options |= {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        if words[0] != "slipstream":
            process = subprocess.Popen(words, **options)
        else:
            process = launch.subprocess.Popen([sys.executable, "-m", *words], **options)
        if stop_at is not None:
            folder = next(word.removeprefix("run.dir=") for word in words if word.startswith("run.dir="))
            wait_for_step(place / folder, stop_at)
            process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=280)
        return process.returncode, out

    run.place = place
    return run


def wait_for_step(folder: Path, step: int) -> None:
    deadline = time.monotonic() + 200
    while time.monotonic() < deadline:
        log = folder / "events.jsonl"
        if log.exists() and f'"step": {step},' in log.read_text():
            return
        time.sleep(0.05)
    raise AssertionError(f"step {step} was never reached")


def snippet_and_line() -> tuple[str, str]:
    (snippet,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    (line,) = [line for line in commands("torchrun") if line.startswith("torchrun")]
    return snippet, line


def learns(out: str) -> None:
    losses = [float(found) for found in re.findall(r"loss ([0-9.]+)", out)]
    assert len(losses) == 6
    assert losses[-1] < losses[0]


def test_the_snippet_runs_as_pasted(tmp_path):
    """On as many ranks as the line beside it names, with what torchrun would set for them."""
    snippet, line = snippet_and_line()
    _, ranks, name = line.split()
    (tmp_path / name).write_text(snippet)
    learns(run_ranks(tmp_path, name.removesuffix(".py"), int(ranks.removeprefix("--nproc-per-node="))))


@pytest.mark.slow
def test_the_snippet_runs_with_the_line_beside_it(shell):
    snippet, line = snippet_and_line()
    (shell.place / line.split()[-1]).write_text(snippet)
    code, out = shell(line)
    assert code == 0, out
    learns(out)


def test_build_is_imported_the_same_way_everywhere():
    files = [
        *(ROOT / "src").rglob("*.py"),
        *(ROOT / "examples").rglob("*.py"),
        *(ROOT / "tests").rglob("*.py"),
    ]
    files += [*(ROOT / "docs").glob("*.md"), ROOT / "README.md"]
    other = "from slipstream.optim" + ".build import build\n"
    found = [str(path) for path in files if other in path.read_text()]
    assert not found, found


@pytest.mark.timeout(600)
def test_a_newcomers_first_minute(shell):
    """make train, the report, own text, a run that is stopped and resumed, a text, an export that "
    "transformers loads."""
    assert "make train" in commands("make train")[0]
    recipe = re.search(
        r"^train: .*\n\t\$\(BIN\)/(slipstream train.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE
    )
    code, out = shell(recipe[1], *SMALL, "train.steps=3")
    assert code == 0, out
    assert re.search(r"Validation loss \d\.\d+, (against|which does not beat) \d\.\d+ for guessing", out)
    assert "runs/default/report.html" in out
    page = (shell.place / "runs/default/report.html").read_text()
    assert "slipstream train model.dim=32" in page  # the command as it was typed

    prepare, train, generate, export, load, listing = commands("slipstream data prepare")
    texts = shell.place / "my_texts"
    texts.mkdir()
    for number in range(8):
        (texts / f"tale-{number}.txt").write_text(
            f"Once upon a time there were {number} little pigs.\n" * 300
        )
    code, out = shell(prepare)
    assert code == 0, out
    assert f"Next: slipstream train data.path={prepare.split()[-1]}" in out

    small = [*SMALL, "pipeline.schedule=emulate", "optim.schedule=constant", "train.eval_every=0"]
    code, out = shell(train, *small, "train.steps=100000", "checkpoint.every=0", stop_at=3)
    assert code == 75, out
    stopped = int(re.search(r"Stopped at step (\d+), saved. The same command resumes it.", out)[1])
    code, out = shell(
        train, *small, "train.steps=100000", "checkpoint.every=0", "train.callback=", stop_at=stopped + 2
    )
    assert code == 75, out
    assert f"The run goes on from step {stopped}" in out
    steps = [json.loads(line)["step"] for line in (shell.place / "runs/mine/events.jsonl").read_text().splitlines()
             if '"event": "step"' in line]  # fmt: skip
    assert steps == list(range(1, len(steps) + 1))

    code, out = shell(generate, "--tokens", "12")
    assert code == 0, out
    assert out.startswith("Once upon a time")
    code, out = shell(export)
    assert code == 0, out
    pytest.importorskip("transformers")
    code, out = shell(load)
    assert code == 0, out
    assert "LlamaForCausalLM" in out
    code, out = shell(listing)
    assert code == 0, out
    assert "default" in out
    assert "mine" in out
    assert "stopped" in out
