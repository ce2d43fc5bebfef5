"""A fine start, of more and smaller microbatches: one trajectory, at every depth and through stops."""

from __future__ import annotations

import shutil

import pytest
import torch
from tests.train.conftest import assert_equal_weights

from pipeline import reference
from slipstream.config import load, resolve
from slipstream.errors import ConfigError, HealthError
from slipstream.train import assemble, build, cutovers, fine
from slipstream.train.banner import banner, facts
from slipstream.train.claim import memory_of
from slipstream.train.cutovers import expected
from slipstream.train.sources import datasets

EMULATE = "pipeline.schedule=emulate"
# Of an update's eight sequences: for five updates in eight microbatches, five of them old, then in four, all old.
FINE = ["pipeline.fine_start=5", "pipeline.fine_microbatches=8", "pipeline.cutover=5", "checkpoint.keep=9"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory, data, four_ranks):
    from tests.train.conftest import Runs

    made = Runs(tmp_path_factory.mktemp("whole"), data, four_ranks)
    made.train("run", EMULATE, *FINE, "train.eval_every=5")
    return made


def losses(runs, name, kind="step"):
    return [(event["step"], event["loss"]) for event in runs.events(name, kind)]


def test_it_follows_the_rule(runs):
    """Against the rule with another m and c for each group, which knows nothing of stretches."""
    plain = ["optim.schedule=constant", "optim.warmup=0", "optim.max_grad_norm=0", "model.tied=false"]
    config = runs.config("run", EMULATE, *FINE, *plain, "optim.name=sgd", "optim.lr=0.1")
    torch.set_num_threads(1)
    model = build.shape(config, runs.data)
    (module,) = build.stage_modules(config, model, 1, [0], torch.device("cpu"))
    batches = [datasets(config, runs.data)[0].batch(group) for group in range(config.train.steps)]
    found, master = reference.train(
        module,
        batches,
        lambda group: 8 if group < 5 else 4,
        lambda logits, targets: torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()),
        build.optimizer_factory(config),
        lam=1.0,
        cutover=lambda group: 5 if group < 5 else 4,
    )
    runs.train("run", EMULATE, *FINE, *plain, "optim.name=sgd", "optim.lr=0.1")
    means = [sum(found[8 * g : 8 * g + 8]) / 8 for g in range(5)]
    means += [sum(found[40 + 4 * g : 44 + 4 * g]) / 4 for g in range(7)]
    assert [loss for _, loss in losses(runs, "run")] == pytest.approx(means, rel=1e-5)
    weights = runs.weights("run")
    for name, parameter in master.named_parameters():
        torch.testing.assert_close(weights[name], parameter.detach(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_every_depth_trains_the_same(runs, whole, stages):
    runs.train("run", f"pipeline.stages={stages}", *FINE, "train.eval_every=5")
    assert_equal_weights(runs.weights("run"), whole.weights("run"))
    assert losses(runs, "run") == losses(whole, "run")
    assert [step for step, _ in losses(runs, "run")] == list(range(1, 13))
    assert [step for step, _ in losses(runs, "run", "validation")] == [5, 10, 12]
    starts = [
        (event["step"], event["microbatches"], event["cutover"]) for event in runs.events("run", "start")
    ]
    assert starts == [(0, 8, 5), (5, 4, 4)]


@pytest.mark.parametrize("step", [4, 5, 8])
def test_it_goes_on_from_either_stretch_and_from_between_them(runs, whole, step):
    shutil.copytree(whole.folder / "run", runs.folder / "run")
    for path in (runs.folder / "run/checkpoints").iterdir():
        if path.is_dir() and int(path.name.rpartition("-")[2]) > step:
            shutil.rmtree(path)
    runs.train("run", "pipeline.stages=2", *FINE, "train.eval_every=5")
    assert_equal_weights(runs.weights("run"), whole.weights("run"))
    assert [step for step, _ in losses(runs, "run", "validation")] == [5, 10, 12]


@pytest.mark.parametrize("layout", [[EMULATE], ["pipeline.stages=2"]])
def test_without_checkpoints_it_is_handed_over_in_memory(runs, whole, layout):
    runs.train("run", *layout, *FINE, "checkpoint.keep=0", "checkpoint.every=0")
    assert losses(runs, "run") == losses(whole, "run")
    assert not list((runs.folder / "run").glob("checkpoints/step-*"))
    assert not memory_of(runs.folder / "run").exists()
    assert not runs.events("run", "warning")
    runs.train("run", *layout, *FINE, "checkpoint.keep=0", "checkpoint.every=0")
    assert losses(runs, "run") == losses(whole, "run")  # it had ended, and stays so
    assert len(runs.events("run", "start")) == 2


def test_memory_that_a_killed_run_left_is_given_back_where_it_has_ended(runs):
    settings = [EMULATE, *FINE, "checkpoint.keep=0", "checkpoint.every=0"]
    runs.train("run", *settings)
    (memory_of(runs.folder / "run") / "step-00000005").mkdir(parents=True)
    assert runs.train("run", *settings)["reason"] == "finished"
    assert not memory_of(runs.folder / "run").exists()


@pytest.mark.parametrize("layout", [[EMULATE], ["pipeline.stages=2"]])
def test_a_stop_at_the_end_of_the_start_is_one(runs, whole, layout):
    """A callback says it once, when it hears of the fifth update: of stages, the sixth is under way by then."""
    callback = "train.callback=tests.train.own:stop_at_five"
    early = "pipeline.stages=2" in layout
    settings = [*layout, *FINE, *(["pipeline.fine_start=6"] if early else [])]
    stopped = runs.train("run", *settings, callback)
    assert (stopped["reason"], stopped["step"]) == ("signal", 6 if early else 5)
    assert [event["microbatches"] for event in runs.events("run", "start")] == [8]
    runs.train("run", *settings)
    if not early:
        assert losses(runs, "run") == losses(whole, "run")


def test_a_run_that_is_made_longer_keeps_the_start_that_it_had(runs):
    share = [EMULATE, *FINE, "pipeline.fine_start=0.5"]
    runs.train("run", *share)
    runs.train("run", *share, "train.steps=20")
    starts = [(event["step"], event["microbatches"]) for event in runs.events("run", "start")]
    assert starts == [(0, 8), (6, 4), (12, 4)]
    assert load(runs.folder / "run/config.toml").pipeline.fine_start == 0.5
    runs.train("run", *share, "train.steps=24")
    assert [event["step"] for event in runs.events("run", "start")] == [0, 6, 12, 20]


def test_a_fork_without_a_fine_start_has_a_cutover_of_its_own(runs, whole):
    shutil.copytree(whole.folder / "run", runs.folder / "run")
    start = f"run.fork_from={runs.folder / 'run/checkpoints/step-00000004'}"
    runs.train("fork", "pipeline.stages=2", "pipeline.cutover=", start)
    assert load(runs.folder / "fork/config.toml").pipeline.cutover == 3


def test_what_watched_the_start_goes_on_watching(runs, monkeypatch):
    """Four updates in a row are not finite, two of them in the start: with three in a row a run gives up."""
    from train import jobs

    jobs.poison(monkeypatch.setattr, dict.fromkeys((3, 4, 5), "nan"))
    with pytest.raises(HealthError, match="3 updates in a row"):
        runs.train("run", EMULATE, *FINE, "health.max_skipped=3")


def test_trackers_hear_of_the_run_and_not_of_its_stretches(runs, monkeypatch):
    told = []
    monkeypatch.setattr(assemble, "open_trackers", lambda config, *_: told.append(config) or [])
    runs.train("run", EMULATE, *FINE)
    assert [config.pipeline.microbatches for config in told] == [4, 4]


def test_the_start_says_what_it_waits_for():
    made = resolved("pipeline.stages=4", "pipeline.fine_start=0.25", "pipeline.cutover=4")
    (finer,) = [text for text in cutovers.waits(made, None) if "of 32 microbatches" in text]
    assert "4 stages need 5" in finer


def test_data_ranks_share_finer_microbatches(runs):
    settings = ["pipeline.microbatch_size=4", *FINE, "train.steps=8"]
    runs.train("one", "pipeline.stages=2", *settings)
    runs.train("two", "pipeline.stages=2", "pipeline.data_ranks=2", *settings)
    for (_, one), (_, two) in zip(losses(runs, "one"), losses(runs, "two"), strict=True):
        assert one == pytest.approx(two, rel=1e-5)


def test_a_rollback_goes_back_into_the_start(runs, monkeypatch):
    """Group 6 is not finite: checkpoint 4 is of before it, and one of the start."""
    from train import jobs

    jobs.poison(monkeypatch.setattr, {6: "nan", 7: "nan"})
    settings = ["health.rollback=true", "health.max_skipped=2", "checkpoint.every=4", *FINE]
    assert runs.train("run", EMULATE, *settings)["reason"] == "finished"
    assert sorted(set(runs.steps("run"))) == list(range(1, 13))
    microbatches = {event["step"]: event["microbatches"] for event in runs.events("run", "start")}
    assert microbatches[0] == 8
    assert microbatches[5] == 4


def resolved(*overrides):
    sizes = ["pipeline.microbatches=8", "pipeline.microbatch_size=4", "model.layers=8"]
    return resolve(load(None, [*sizes, *overrides]))


def test_what_is_derived():
    made = expected(
        resolved("pipeline.stages=8", "pipeline.fine_start=0.25", "train.steps=100", "train.device=cuda")
    )
    assert (made.pipeline.fine_microbatches, made.pipeline.cutover) == (32, 9)
    first, then = fine.stretch(made, 24).pipeline, fine.stretch(made, 25).pipeline
    assert (first.microbatches, first.microbatch_size, first.cutover) == (32, 1, 9)
    assert (then.microbatches, then.microbatch_size, then.cutover) == (8, 4, 8)
    assert (fine.end_of_stretch(made, 0), fine.end_of_stretch(made, 25)) == (25, 100)
    three = resolved("pipeline.microbatch_size=9", "pipeline.fine_start=0.25")
    assert three.pipeline.fine_microbatches == 24


def test_it_is_shown():
    made = expected(
        resolved("pipeline.stages=8", "pipeline.fine_start=0.25", "train.steps=100", "train.device=cuda")
    )
    (line,) = (line for line in banner(made).splitlines() if line.startswith("  schedule"))
    assert "m=8, c=8, " in line
    assert "the first 25 updates m=32, c=9" in line
    assert facts(made)["old part"] == "8 of 8 microbatches, 9 of 32 in the first 25 updates"


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["pipeline.fine_microbatches=16"], "takes effect with pipeline.fine_start only"),
        (["pipeline.fine_start=9", "pipeline.microbatch_size=1"], "cannot be cut into 4, 3 or 2 equal ones"),
        (
            ["pipeline.fine_start=9", "pipeline.fine_microbatches=12"],
            "cut the 32 sequences of an update evenly",
        ),
        (
            ["pipeline.fine_start=9", "pipeline.fine_microbatches=8"],
            "must be more than pipeline.microbatches = 8",
        ),
        (["pipeline.fine_start=9", "pipeline.data_ranks=2"], "leaves 1 sequences? to a microbatch, which"),
        (["pipeline.fine_start=9", "pipeline.schedule=1f1b"], "pipeline.fine_start = 9 makes a smaller part"),
        (
            ["pipeline.fine_start=9", "pipeline.schedule=emulate"],
            "changes nothing where all of an update is old",
        ),
        (
            ["pipeline.fine_start=9", "pipeline.cutover=32"],
            "changes nothing with pipeline.cutover = 32 of 32",
        ),
        (["pipeline.fine_start=9", "pipeline.cutover=0"], "changes nothing with pipeline.cutover = 0 of 32"),
        (["pipeline.fine_start=9", "pipeline.cutover=33"], "from 0 .synchronous. to 32"),
        (["pipeline.fine_start=400"], "is the whole run of train.steps = 400"),
        (["pipeline.fine_start=1"], "is 1 of train.steps = 400 updates, and changes nothing"),
        (["pipeline.fine_start=0.001"], "is 0 of train.steps = 400 updates"),
        (["pipeline.fine_start=9", "optim.sync_start=8"], "optim.sync_start = 8 flushes its updates"),
        (["pipeline.fine_start=9", "pipeline.microbatch_size=1"], "multiple of one of those.$"),
        (
            ["pipeline.fine_start=9", "optim.correction=delay_compensation"],
            "does not go with optim.correction",
        ),
        (["pipeline.cutover=9"], "from 0 .synchronous. to 8"),
    ],
)
def test_what_cannot_work_is_refused(overrides, words):
    with pytest.raises(ConfigError, match=words) as caught:
        resolved(*overrides)
    assert len(caught.value.problems) == 1, caught.value.problems
