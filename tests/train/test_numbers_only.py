"""What studies ask of the trainer: runs that leave numbers and no weights, and weights that differ in a step."""

from __future__ import annotations

import pytest

from slipstream.errors import UserError

EMULATE = "pipeline.schedule=emulate"
NOTHING_KEPT = (EMULATE, "checkpoint.keep=0", "checkpoint.every=0")


def losses(runs, name: str) -> list[float]:
    return [event["loss"] for event in runs.events(name, "step")]


def test_a_run_that_keeps_nothing_has_the_same_numbers(runs, reference):
    assert runs.train("run", *NOTHING_KEPT)["reason"] == "finished"
    assert losses(runs, "run") == losses(reference, "2bw")
    assert not (runs.folder / "run" / "checkpoints").exists()
    assert runs.events("run", "sample") == []
    (end,) = runs.events("run", "finish")
    assert end["validation_loss"] == reference.events("2bw", "finish")[0]["validation_loss"]


def test_it_is_known_as_finished_without_a_checkpoint(runs, capfd):
    runs.train("run", *NOTHING_KEPT)
    before = runs.events("run")
    capfd.readouterr()
    assert runs.train("run", *NOTHING_KEPT)["reason"] == "finished"
    told = capfd.readouterr().out
    assert "This run is finished: 12 steps" in told
    assert "slipstream generate" not in told  # there is nothing to generate from
    assert runs.events("run") == before
    with pytest.raises(UserError, match=r"(?s)holds another run, finished:.*optim\.lr"):
        runs.train("run", *NOTHING_KEPT, "optim.lr=0.5")
    for other in (("train.steps=3",), ("optim.lr=0.5", "checkpoint.keep=2")):
        with pytest.raises(UserError, match="holds another run, finished"):
            runs.train("run", *NOTHING_KEPT, *other)
    assert runs.events("run") == before


def test_the_log_of_another_run_without_a_checkpoint_is_kept(runs, capfd):
    runs.train("run", *NOTHING_KEPT)
    events = runs.folder / "run" / "events.jsonl"
    events.write_text("".join(events.read_text().splitlines(keepends=True)[:6]))
    before = events.read_text()
    runs.train("run", *NOTHING_KEPT, "optim.lr=0.5")
    (kept,) = (runs.folder / "run").glob("events-*.jsonl")
    assert kept.read_text() == before
    assert f"kept as '{kept.name}'" in capfd.readouterr().out


def test_a_run_cut_short_begins_again(runs, reference):
    runs.train("run", *NOTHING_KEPT)
    events = runs.folder / "run" / "events.jsonl"
    events.write_text("".join(events.read_text().splitlines(keepends=True)[:6]))
    runs.train("run", *NOTHING_KEPT)
    assert losses(runs, "run") == losses(reference, "2bw")


def test_a_mismatch_changes_the_gradient_and_not_the_first_losses(runs):
    """Forwards read what they read without it, until the first update that a newer backward has changed."""
    delays = "pipeline.delay=[1, 1, 1, 0]"
    runs.train("kept", EMULATE, delays, "optim.correction=none")
    runs.train("newer", EMULATE, delays, "optim.correction=none", "pipeline.mismatch=[1, 1, 1, 0]")
    kept, newer = losses(runs, "kept"), losses(runs, "newer")
    # Groups 0 and 1 read z_0 throughout; the backward of group 1 is the first to see newer weights (z_1).
    assert kept[:2] == newer[:2]
    assert kept[2:] != newer[2:]
