"""`slipstream runs` and `slipstream completion`: what there is, told apart, and completed."""

from __future__ import annotations

import fcntl
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from slipstream.cli import main
from slipstream.cli.completion import SCRIPTS, candidates


def make(folder: Path, loss: float, *, lr: float = 0.01, tags: str = "[]", finished: bool = True) -> Path:
    folder.mkdir(parents=True)
    events = [
        {"event": "start", "step": 0, "time": 100.0, "schedule": "2bw", "stages": 2},
        {"event": "step", "step": 4, "time": 110.0, "loss": 4.0, "tokens": 400, "tokens_per_second": 40.0},
        {"event": "validation", "step": 4, "time": 111.0, "loss": loss},
    ]
    if finished:
        events.append({"event": "finish", "step": 4, "time": 112.0, "tokens": 400})
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    (folder / "lock").write_text("1\n")
    (folder / "config.toml").write_text(
        f'[run]\ndir = "{folder}"\ntags = {tags}\n[train]\nsteps = 4\n[optim]\nname = "muon"\nlr = {lr}\n'
    )
    return folder


def run(capsys, *arguments: str) -> tuple[int, str]:
    with pytest.raises(SystemExit) as ended:
        main(["runs", *arguments])
    told = capsys.readouterr()
    return ended.value.code, told.out + told.err


def test_runs_are_listed_with_how_they_stand(tmp_path, capsys):
    make(tmp_path / "a", 3.25)
    make(tmp_path / "deep" / "b", 3.5, tags='["sweep"]', finished=False)
    held = make(tmp_path / "c", 3.75, finished=False)
    with (held / "lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        code, told = run(capsys, str(tmp_path))
    assert code == 0
    rows = {
        line.split()[0]: line for line in told.splitlines() if line.split()[:1] and line.split()[0] in "abc"
    }
    assert "finished" in rows["a"]
    assert "3.2500" in rows["a"]
    assert "4/4" in rows["a"]
    assert "stopped" in rows["b"]
    assert "sweep" in rows["b"]
    assert "running" in rows["c"]
    _, tagged = run(capsys, str(tmp_path), "--tag", "sweep", "--json")
    assert [row["run"] for row in json.loads(tagged)["runs"]] == ["b"]


def test_two_runs_are_compared_by_figures_and_settings(tmp_path, capsys):
    a, b = make(tmp_path / "a", 3.25), make(tmp_path / "b", 3.5, lr=0.02)
    _, told = run(capsys, str(a), str(b))
    assert "3.2500" in told
    assert "3.5000" in told
    assert any(line.split() == ["optim.lr", "0.01", "0.02"] for line in told.splitlines())
    assert "train.steps" not in told
    _, only = run(capsys, str(a), str(b), "--diff")
    assert "optim.lr" in only
    assert "3.2500" not in only


def test_no_runs_and_no_folder_are_said(tmp_path, capsys):
    assert run(capsys, str(tmp_path)) == (
        2,
        f"error: There is no run in {tmp_path}. `slipstream train` makes one.\n",
    )
    assert "There is no folder" in run(capsys, str(tmp_path / "nowhere"))[1]


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("slipstream tr", ["train"]),
        ("slipstream train optim.na", ["optim.name="]),
        ("slipstream train model.preset=llama3-8", ["model.preset=llama3-8b"]),
        ("slipstream train pipeline.schedule=1", ["pipeline.schedule=1f1b"]),
        ("slipstream train train.quiet=t", ["train.quiet=true"]),
        ("slipstream train --dr", ["--dry-run"]),
        ("slipstream plan --micro", ["--microbatch-size", "--microbatches"]),
        ("slipstream study ex", ["export"]),
        ("slipstream data prepare --valid-f", ["--valid-fraction"]),
        ("slipstream nothing x", []),
    ],
)
def test_a_line_is_completed(line, wanted):
    assert candidates(line) == wanted


def test_files_are_completed_where_nothing_else_fits(tmp_path, monkeypatch):
    (tmp_path / "texts").mkdir()
    (tmp_path / "run.toml").write_text("")
    monkeypatch.chdir(tmp_path)
    assert candidates("slipstream data prepare te") == ["texts/"]
    assert candidates("slipstream train ru") == [
        "run.dir=",
        "run.fork_from=",
        "run.name=",
        "run.switch=",
        "run.tags=",
    ]
    assert candidates("slipstream train data.path=te") == ["data.path=texts/"]
    assert candidates("slipstream train ./ru") == ["./run.toml"]


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
def test_bash_completes_a_value_after_the_equals_sign(tmp_path):
    """Bash takes `=` for the end of a word: only what follows it is replaced."""
    shim = tmp_path / "slipstream"
    shim.write_text(f'#!/bin/sh\nexec {sys.executable} -m slipstream "$@"\n')
    shim.chmod(0o755)
    line = "slipstream train model.preset=mixtral-8x2"
    script = (
        f"{SCRIPTS['bash']}\nCOMP_WORDBREAKS=$' =:'\nCOMP_LINE='{line}'\nCOMP_POINT={len(line)}\n"
        '_slipstream\nprintf "%s\\n" "${COMPREPLY[@]}"'
    )
    path = f"{tmp_path}:/usr/bin:/bin"
    done = subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True,
        env={"PATH": path, "PYTHONPATH": ":".join(filter(None, sys.path)), "HOME": str(tmp_path)},
    )  # fmt: skip
    assert done.stdout == "mixtral-8x22b\n", done.stderr


def test_an_unknown_shell_is_said(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["completion", "tcsh"])
    assert ended.value.code == 2
    assert "Choose bash, zsh, fish" in capsys.readouterr().err
