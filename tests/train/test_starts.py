"""A start that is a share of the run stays what it was when the run is made longer, or forked."""

import pytest

from slipstream.config import load
from slipstream.errors import CheckpointError
from slipstream.train.checkpoint import Manifest
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
