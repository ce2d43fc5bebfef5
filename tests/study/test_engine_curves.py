"""studies/engine.py: what it starts is a run that the trainer takes, and what it compares are curves of one seed."""

from __future__ import annotations

import gzip
import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from scripts import loaded
from slipstream.config import load, resolve
from slipstream.data.shards import write_shard
from slipstream.train import session
from slipstream.train.provenance import code


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


SMALL = [
    "model.vocab=64", "model.dim=16", "model.layers=2", "model.heads=2", "model.kv_heads=1", "model.ffn=32",
    "data.sequence=16", "pipeline.microbatches=4", "pipeline.microbatch_size=2", "train.steps=4", "train.eval_every=2",
    "train.eval_batches=1", "train.device=cpu", "train.dtype=float32",
]  # fmt: skip


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    tokens = np.arange(5000, dtype="<u2") * 7 % 64
    for split in ("train", "val"):
        write_shard(folder / f"{split}_000.bin", tokens)
    return folder


def test_a_line_says_what_made_it(study, data, pool, tmp_path, monkeypatch):
    """Of the emulator and of the engine: by hand what their commands do, on ranks that are warm."""

    def train(command, **_):
        config = resolve(load(None, command[command.index("train") + 1 :]))
        if config.pipeline.schedule == "emulate":
            session.run_rank(None, config.model_dump())
        else:
            pool.run(session.run_rank, config.model_dump(), ranks=2, timeout=250)

    monkeypatch.setattr(study, "subprocess", SimpleNamespace(run=train))  # git is still asked
    changes, made = [*SMALL, f"data.path={data}"], []
    for kind in (study.EMULATOR, study.ENGINE):
        made.append(study.measure(study.Run(kind, 2, 0), tmp_path, 2, False, changes, time.monotonic() + 250))
    for line in made:
        assert len(line["losses"]) == 4
        assert len(line["validation"]) == 2
        assert line["changes"] == changes
        assert line["device"] == "cpu"
        assert len(line["data"]) == len(line["held_out"]) == 64
        assert line["versions"]["torch"] == torch.__version__
        assert (line["commit"], line["source"]) == (code().commit or "", code().source)
    assert [line["stages"] for line in made] == [1, 2]
    assert study.table(made).count("4 of 4") == 1  # equal to the bit, on a CPU
    events = (
        tmp_path / "emulator-c2-0" / "events.jsonl"
    )  # as where a first attempt was stopped: the log goes on
    begun = events.read_text().splitlines(keepends=True)
    events.write_text("".join([*begun[:-2], *begun]))
    assert study.curve(events.parent).items() <= made[0].items()
    named = code().commit or f"code {code().source[:12]}"
    assert study.makers(made) == f"Made by {named}, torch {torch.__version__}, cpu: 2 runs."


def test_a_run_that_has_not_ended_has_no_line(study, tmp_path):
    (tmp_path / "events.jsonl").write_text(json.dumps({"event": "start", "step": 0}) + "\n")
    with pytest.raises(OSError, match="no run that has ended"):
        study.curve(tmp_path)


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
    *rows, blank, made = capsys.readouterr().out.splitlines()[2:]
    assert (blank, made) == ("", "Made by what was not noted: 7 runs.")
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
    page = (results / "engine.md").read_text()
    assert study.table(lines) in page
    assert study.makers(lines) == "Made by what was not noted: 20 runs."
    assert "the file of losses holds neither versions nor commit" in page
    repeats = [line for line in lines if line["kind"] == study.EMULATOR_AGAIN]
    assert len(repeats) == 2
    assert "**four of the six repeats of the emulator are missing**" in page
    ends = {line["validation"][-1] for line in lines}
    assert len(ends) == 6  # two cutovers, three seeds, and whatever made them
