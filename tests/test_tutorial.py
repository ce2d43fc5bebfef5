"""The scripts of the guide pages run as pasted, on CPU, and say what the pages say they do."""

from __future__ import annotations

import re
import runpy

import pytest

import pages
from run_script import run_ranks
from slipstream.config import load, resolve
from slipstream.train import session

TUTORIAL, OWN = (pages.ROOT / f"docs/{name}.md" for name in ("tutorial", "own_model"))


@pytest.fixture
def scripts(tmp_path):
    """The titled code blocks of both pages, as files."""
    for block in pages.blocks(TUTORIAL) + pages.blocks(OWN):
        if block.language == "python" and block.title:
            (tmp_path / block.title).write_text(block.text)
    return tmp_path


def losses(text: str) -> list[str]:
    return re.findall(r"^(update \d+  loss [\d.]+)$", text, re.MULTILINE)


def test_from_torch_to_2bw(scripts, monkeypatch, capsys):
    """Both scripts learn, and one process follows two to every digit that is printed."""
    shown = [block.text for block in pages.blocks(TUTORIAL) if block.language == "text"]
    before, after = losses(run_ranks(scripts, "before")), losses(run_ranks(scripts, "after"))
    monkeypatch.syspath_prepend(scripts)
    runpy.run_path(str(scripts / "one_process.py"), run_name="__main__")
    alone = losses(capsys.readouterr().out)
    assert after == alone
    assert len(before) == len(after) == 5
    assert [len(losses(text)) for text in shown] == [5, 5, 5]
    assert losses(shown[1]) == losses(shown[2])
    for said in (before, after):
        assert float(said[-1].split()[-1]) < 0.5 < float(said[0].split()[-1])


def test_what_else_a_script_needs(scripts, monkeypatch, capsys):
    monkeypatch.syspath_prepend(scripts)
    runpy.run_path(str(scripts / "more.py"), run_name="__main__")
    out = capsys.readouterr().out
    assert "validation loss" in out
    assert "resumed bit for bit: True" in out


def test_your_own_model_data_hook_and_correction(scripts, monkeypatch, tmp_path):
    """The commands of the page, for a few updates in one process."""
    monkeypatch.syspath_prepend(scripts)
    monkeypatch.chdir(tmp_path)
    (line,) = [line for line in pages.commands(OWN, "slipstream") if "data.module" in line]
    (correction,) = [line for line in pages.commands(OWN, "slipstream") if "correction" in line]
    keys = [word for word in f"{line} {correction}".split() if "=" in word]
    small = [
        "pipeline.schedule=emulate",
        "train.steps=2",
        "train.device=cpu",
        "data.sequence=16",
        "train.eval_batches=1",
    ]
    config = resolve(load(None, [*keys, *small, f"run.dir={tmp_path / 'run'}", "train.report=false"]))
    assert session.run_rank(None, config.model_dump())["reason"] == "finished"


def test_the_role_of_a_parameter_decides_as_the_page_says():
    (block,) = [block for block in pages.blocks(OWN) if block.language == "python" and not block.title]
    exec(compile(block.text, OWN.name, "exec"), {})  # it asserts
