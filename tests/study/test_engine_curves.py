"""studies/engine.py: what it starts is a run that the trainer takes, and what it compares are curves of one seed."""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path

import pytest

from scripts import loaded
from slipstream.config import load


@pytest.fixture(scope="module")
def study():
    with loaded("engine") as module:
        yield module


def test_both_train_the_same(study):
    commands = [
        study.Run(kind, 4, 1).command(Path("runs/x"), 4, ["model.vocab=2048"])
        for kind in (study.EMULATOR, study.ENGINE)
    ]
    one, other = (load(None, command[command.index("train") + 1 :]).model_dump() for command in commands)
    assert one["pipeline"]["schedule"] == "emulate"
    assert (other["pipeline"]["schedule"], other["pipeline"]["stages"]) == ("2bw", 4)
    for config in (one, other):
        assert config["pipeline"]["cutover"] == 4
        for key in ("schedule", "stages"):
            del config["pipeline"][key]
    assert one == other


def test_curves_are_compared_within_a_seed(study, tmp_path, monkeypatch, capsys):
    def line(kind: str, seed: int, losses: list[float]) -> dict:
        fields = {
            "cutover": 4,
            "seed": seed,
            "losses": losses,
            "validation": losses[1:],
            "seconds": 1.0,
            "tokens": 1,
        }
        return {"kind": kind, **fields}

    lines = [
        line(study.EMULATOR, 0, [3.0, 2.0]),
        line(study.ENGINE, 0, [3.5, 2.25]),
        line(study.EMULATOR_AGAIN, 0, [3.0, 1.75]),
        line(study.EMULATOR, 1, [9.0, 8.0]),
        line(study.ENGINE, 1, [9.0, 8.0]),
        line(study.ENGINE, 2, [5.0, 4.0]),  # whose pair is yet to be run
        line(study.ENGINE_AGAIN, 2, [5.0, 4.0]),
    ]
    (tmp_path / "engine.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    monkeypatch.setattr(sys, "argv", ["engine.py", str(tmp_path), "--table"])
    study.main()
    rows = capsys.readouterr().out.splitlines()[2:]
    assert rows == [
        "| 4 | engine and emulator | 2 | 0 of 2, 2 of 2 | 0.37500, 0.00000 | 0.25000, 0.00000 | +0.25000, +0.00000 |",
        "| 4 | engine again and engine | 1 | 2 of 2 | 0.00000 | 0.00000 | +0.00000 |",
        "| 4 | emulator again and emulator | 1 | 1 of 2 | 0.12500 | 0.25000 | -0.25000 |",
    ]


def test_partitions_without_a_service_are_a_mistake(study, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path / "none"))
    monkeypatch.setattr(sys, "argv", ["engine.py", str(tmp_path / "out"), "--partitions"])
    with pytest.raises(SystemExit):
        study.main()
    assert "no CUDA MPS service is running" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_page_shows_what_was_measured(study):
    results = Path(__file__).parents[2] / "docs/results"
    with gzip.open(results / "engine-losses.json.gz", "rt") as file:
        lines = [json.loads(line) for line in file]
    assert study.table(lines) in (results / "engine.md").read_text()
    ends = {line["validation"][-1] for line in lines}
    assert len(ends) == 6  # two cutovers, three seeds, and whatever made them
