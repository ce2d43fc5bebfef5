"""A start that is a share of the run stays what it was when the run is made longer, or forked."""

import pytest

from slipstream.config import load
from slipstream.errors import CheckpointError
from slipstream.train.banner import banner, facts
from slipstream.train.cutovers import expected
from slipstream.train.manifest import Manifest
from slipstream.train.starts import Starts

CONSTANT = ["pipeline.schedule=emulate", "optim.schedule=constant", "optim.warmup=0", "checkpoint.keep=9"]
FINE = ["pipeline.fine_start=0.5", "pipeline.fine_microbatches=8", "pipeline.cutover=3"]


def manifest(**meta):
    return Manifest(4, (), {}, meta)


def losses(runs, name):
    return [(event["step"], event["loss"]) for event in runs.events(name, "step")]


@pytest.mark.parametrize(
    ("share", "number"), [(FINE, "pipeline.fine_start=3"), (["optim.sync_start=0.5"], "optim.sync_start=3")]
)
def test_more_steps_do_not_lead_back_into_a_start(runs, share, number):
    """Half of 6 is 3; half of 16 would be 8. A fork did so with either start, a longer run with a synchronous one."""
    settings = [*CONSTANT, "train.steps=6", *share]
    runs.train("run", *settings)
    runs.train("fork", *settings, "train.steps=16", f"run.fork_from={runs.folder / 'run'}")
    runs.train("run", *settings, "train.steps=16")
    runs.train("whole", *settings, "train.steps=16", number)
    assert losses(runs, "run") == losses(runs, "whole")
    assert losses(runs, "fork") == losses(runs, "whole")[6:]
    runs.train("run", *settings, "train.steps=18")
    runs.train("whole", *settings, "train.steps=18", "run.fork_from=", number)
    assert losses(runs, "run") == losses(runs, "whole")


def test_a_fork_may_be_shorter_than_the_start_it_is_in(runs):
    settings = [*CONSTANT, *FINE, "train.steps=12", "checkpoint.every=2"]
    runs.train("run", *settings)
    early = runs.folder / "run/checkpoints/step-00000002"
    assert runs.train("fork", *settings, "train.steps=5", f"run.fork_from={early}")["step"] == 5


def test_what_is_printed_first_knows_the_starts_that_are_kept(runs):
    """The banner and `--dry-run` told of half of the new length."""
    settings = [*CONSTANT, *FINE, "train.steps=6", "checkpoint.every=2"]
    runs.train("run", *settings)
    longer = expected(runs.config("run", *settings, "train.steps=16"))
    assert "m=4, delay 1, c=3, the first c of m one update old; the first 3 updates m=8, c=3" in banner(
        longer
    )
    assert facts(longer)["old part"] == "3 of 4 microbatches, 3 of 8 in the first 3 updates"
    early = f"run.fork_from={runs.folder / 'run/checkpoints/step-00000002'}"
    shorter = expected(runs.config("fork", *settings, "train.steps=3", early))
    assert "m=8, delay 1, c=3" in banner(shorter)
    assert facts(shorter)["old part"] == "3 of 8 microbatches"
    flushed = [*CONSTANT, "optim.sync_start=0.5", "train.steps=6"]
    runs.train("flushed", *flushed)
    told = facts(expected(runs.config("flushed", *flushed, "train.steps=16")))["flushed updates"]
    assert told == "3 at the start, 0 at the end"


def test_a_fork_that_is_shorter_than_a_synchronous_start(runs):
    """It ended in a sentence about a start of 6 that nobody had asked for, once the ranks had begun."""
    settings = [*CONSTANT, "optim.sync_start=0.5", "optim.sync_finish=0.2"]
    runs.train("run", *settings, "train.steps=12", "checkpoint.every=2")
    early = f"run.fork_from={runs.folder / 'run/checkpoints/step-00000002'}"
    assert runs.train("fork", *settings, "train.steps=5", early)["step"] == 5
    said = [event["message"] for event in runs.events("fork", "warning")]
    assert any(
        "The synchronous start ends with update 4, as in the run so far, and not with 2" in text
        for text in said
    ), said
    assert not any("run.fork_from" in text for text in said), said


def test_a_start_that_is_asked_for_anew_is_not_kept():
    made = load(None, ["train.steps=40", "optim.sync_start=0.25", "pipeline.fine_start=0.5"])
    had = Starts.had(manifest(starts={"fine": 7, "synchronous": 3}), made)
    assert had == Starts(7, 3)
    assert Starts.had(manifest(), made) == Starts(20, 10)  # of before they were kept
    assert Starts.had(manifest(fine_updates=7), made) == Starts(7, 10)
    for forged in ("x", {"fine": "7"}, {"other": 1}, {"fine": None}):
        with pytest.raises(CheckpointError, match="not one of a run"):
            Starts.had(manifest(starts=forged), made)
    other = made.changed(optim={"sync_start": 4.0})
    assert had.where_asked_alike(made, other) == Starts(7, None)
    kept = had.where_asked_alike(made, other).kept(other)
    assert (kept.pipeline.fine_start, kept.optim.sync_start) == (7.0, 4.0)


def test_starts_of_which_one_is_a_share_go_on_in_a_longer_run(runs):
    """That one flushes all of the other was said of the new length, of a start that is over."""
    settings = [*CONSTANT, "pipeline.fine_start=4", "pipeline.fine_microbatches=8", "pipeline.cutover=3"]
    settings.append("optim.sync_start=0.17")
    runs.train("run", *settings, "train.steps=12")
    assert runs.train("run", *settings, "train.steps=36")["step"] == 36
