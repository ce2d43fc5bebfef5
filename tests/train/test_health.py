"""Health: spikes, repeated non-finite updates, silent divergence by name, rollback that skips the data."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from tests.train.conftest import assert_equal_weights
from tests.train.jobs import damage, poison

from slipstream.errors import StageError
from slipstream.metrics.events import read_run
from slipstream.pipeline.compact import Halves
from slipstream.train import assemble, batches, checkpoint, health
from slipstream.train.board import Board
from slipstream.train.health import Monitor, checksum, damaged, divergence, fingerprint, state_of_weights
from slipstream.train.remote import Remote


def test_a_spike_is_told_from_noise():
    monitor = Monitor(spike=6.0, max_skipped=3)
    noise = torch.Generator().manual_seed(0)
    for step in range(100):
        assert monitor.observe(step, 3.0 + 0.05 * torch.randn((), generator=noise).item(), False) is None
    warning = monitor.observe(100, 4.5, False)
    assert warning is not None
    assert "4.5000 at step 100" in warning
    assert monitor.failed_at is None, "a warning, unless there is a checkpoint to go back to"
    monitor.spike_fails_after = 50
    monitor.observe(101, 9.0, False)
    assert monitor.failed_at == 101
    assert "9.0000 at step 101" in monitor.failure


def test_skipped_updates_in_a_row_are_a_failure():
    monitor = Monitor(spike=0, max_skipped=3)
    for step, skipped in enumerate([True, True, False, True, True]):
        monitor.observe(step, 1.0, skipped)
    assert monitor.failed_at is None
    assert "3 in a row" in str(monitor.observe(5, 1.0, True))
    assert monitor.failed_at == 3, "the first of the three"
    monitor.observe(6, 1.0, False)
    assert monitor.failed_at == 3, "stages stop some groups later: what came in between does not undo it"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_checksum_sees_one_bit_and_a_swap(dtype):
    weights = torch.randn(5, 7, generator=torch.Generator().manual_seed(1)).to(dtype)
    changed, swapped = weights.clone(), weights.clone()
    changed[3, 3] *= -1
    swapped[0], swapped[1] = weights[1], weights[0]
    sums = {checksum([tensor]) for tensor in (weights, changed, swapped)}
    assert len(sums) == 3
    assert checksum([weights.clone()]) in sums
    assert checksum([weights, changed]) != checksum([changed, weights])


def test_a_checksum_does_not_depend_on_how_a_tensor_is_cut(monkeypatch):
    weights = [torch.randn(5, 7, generator=torch.Generator().manual_seed(1)), torch.ones(()), torch.empty(0)]
    whole = checksum(weights)
    for words in (1, 4, 35):
        monkeypatch.setattr(health, "PIECE", words)
        assert checksum(weights) == whole


def state(value: float) -> dict:
    weights = {"embedding.weight": torch.full((2, 2), value), "layers.0.w": torch.ones(3)}
    return {"master": weights, "banks": {"5": {name: w + 1 for name, w in weights.items()}}}


def test_divergence_is_named():
    tied = ("embedding.weight", "head.weight")
    good = fingerprint(state(1.0), tied)
    head = fingerprint({"master": {"head.weight": torch.full((2, 2), 1.0)}, "banks": {}}, tied)
    assert divergence({0: good, 1: head, 2: good, 3: head}, stages=2, step=9) is None
    other = fingerprint(state(1.5), tied)
    assert "stage 0 differs between data rank 0 and data rank 1" in str(
        divergence({0: good, 1: head, 2: other, 3: head}, 2, 9)
    )
    found = str(divergence({0: other, 1: head}, 2, 9))
    assert "master differs between stage 0 (embedding.weight) and stage 1 (head.weight)" in found


def test_a_corrupted_tied_weight_stops_the_run(runs, monkeypatch):
    original = health.fingerprint

    def corrupted(state, tied, **ages):
        state["master"]["head.weight"][0, 0] += 1e-6
        return original(state, tied, **ages)

    monkeypatch.setattr(health, "fingerprint", corrupted)
    with pytest.raises(StageError, match="Silent divergence at step 3: the tied embedding"):
        runs.train("run", "pipeline.schedule=emulate", "health.hash_every=3")


@pytest.mark.parametrize("ages", ["pipeline.delay=[2,1]", "pipeline.cutover=[4,0]"])
def test_a_tied_weight_of_two_ages_has_not_diverged(runs, ages):
    runs.train("run", "pipeline.schedule=emulate", ages, "model.tied=true", "health.hash_every=1")
    assert runs.steps("run") == list(range(1, 13))


@pytest.fixture
def poisoned(monkeypatch):
    poison(monkeypatch.setattr, {5: "nan", 6: "nan"})


def test_updates_that_are_not_finite_are_skipped_and_reported(runs, poisoned):
    runs.train("run", "pipeline.schedule=emulate")
    skipped = [event["step"] for event in runs.events("run", "step") if event["skipped"]]
    assert skipped == [6, 7]
    assert [event["step"] for event in runs.events("run", "warning")] == [6, 7]


def test_repeated_failures_stop_the_run(runs, poisoned):
    with pytest.raises(StageError, match="2 updates in a row were not finite"):
        runs.train("run", "pipeline.schedule=emulate", "health.max_skipped=2")
    # Its log has the last word on it: a run that failed does not look like one that goes on.
    (failure,) = runs.events("run", "error")
    assert failure["step"] == 7
    assert "2 updates in a row were not finite" in failure["message"]
    assert f"Stopped at step 7. {FINITE} Lower optim.lr" in failure["message"]
    assert read_run(runs.folder / "run").status == "failed"


FINITE = "All weights are finite, so the loss, its gradients or their norm are not, at these weights or on this data."


def test_a_run_that_stops_with_damaged_weights_names_them(runs, monkeypatch):
    damage(monkeypatch.setattr, "layers.1.mlp.up.weight", 4)
    words = r"Weights hold numbers that are not finite: layers\.1\.mlp\.up\.weight\. Lower optim\.lr"
    with pytest.raises(StageError, match=words):
        runs.train("run", "pipeline.schedule=emulate", "health.max_skipped=2")
    (failure,) = runs.events("run", "error")
    assert "not finite: layers.1.mlp.up.weight." in failure["message"]


def test_weights_that_cannot_be_looked_at_hide_no_failure(runs, poisoned, monkeypatch):
    def no_room(state):
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(health, "damaged", no_room)
    words = r"2 updates in a row were not finite\. .* not known: rank 0 could not look at its own"
    with pytest.raises(StageError, match=words):
        runs.train("run", "pipeline.schedule=emulate", "health.max_skipped=2")


@pytest.mark.parametrize("error", [StageError("rank 0 is lost"), KeyError("store"), MemoryError()])
def test_an_error_in_the_look_hides_no_failure(runs, poisoned, monkeypatch, error):
    def fails(board, keys, seconds):
        raise error

    monkeypatch.setattr(Board, "heard", fails)
    with pytest.raises(StageError, match=f"2 updates in a row were not finite.*{FINITE}"):
        runs.train("run", "pipeline.schedule=emulate", "health.max_skipped=2")


def test_what_some_ranks_tell_is_heard_though_others_are_silent():
    store = torch.distributed.HashStore()
    one, other = Board(store, timeout_seconds=30.0), Board(store, timeout_seconds=30.0)
    one.post("damaged/1", ["a"])
    assert other.heard(["damaged/1", "damaged/2"], seconds=0.2) == {"damaged/1": ["a"]}
    one.post("damaged/2", None)
    assert other.heard(["damaged/1", "damaged/2"], seconds=30.0) == {"damaged/1": ["a"], "damaged/2": None}
    assert other.heard([], seconds=30.0) == {}


LAYOUTS = {
    "2bw": (2, []),
    "1f1b": (2, ["pipeline.schedule=1f1b"]),
    "sharded": (4, ["pipeline.data_ranks=2", "pipeline.shard_optimizer=true"]),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_rank_names_the_weights_that_are_damaged_on_one(runs, layout):
    ranks, settings = LAYOUTS[layout]
    config = runs.config("run", "pipeline.stages=2", "health.max_skipped=2", *settings)
    name = "layers.3.mlp.up.weight"
    told = runs.pool.run("train.jobs:damaged_told", config.model_dump(), name, ranks=ranks, timeout=250)
    assert len(told) == ranks
    assert all(f"Weights hold numbers that are not finite: {name}. Lower" in words for words in told), told
    (failure,) = runs.events("run", "error")
    assert name in failure["message"], "the leader holds other weights, and its log names them all the same"


def test_damaged_weights_are_found_in_banks_and_halves_too():
    good, bad = torch.ones(4), torch.tensor([1.0, 2.0, float("inf"), 0.0])
    high, low = bad.bfloat16(), torch.zeros(4, dtype=torch.int16)
    master = {"a": good, "b": bad, "c": Halves(high, low), "d": Halves(good.bfloat16(), low)}
    nothing = {"banks": {}, "buffers": {}}
    assert damaged({**nothing, "master": master}) == ["b", "c"]
    banks = {"next": {"a": bad.bfloat16(), "b": bad}, "current": {"a": good, "b": good}}
    assert damaged({**nothing, "master": master, "banks": banks}) == ["b", "c", "a (next bank)"]
    assert damaged({**nothing, "master": {"none": torch.empty(0)}}) == []
    assert damaged({**nothing, "master": {"a": good}, "buffers": {"mask": bad}}) == []


def test_a_buffer_is_no_damaged_weight(runs, poisoned):
    """No forward may change it, so it is as the model was built, and a causal mask holds -inf."""
    own = ["model.module=tests.train.own:masked", "pipeline.schedule=emulate", "health.max_skipped=2"]
    own += [f"{key}=" for key in ("model.dim", "model.layers", "model.heads", "model.kv_heads", "model.ffn")]
    with pytest.raises(StageError, match=FINITE):
        runs.train("run", *own)


def test_the_state_of_the_weights_is_one_sentence():
    assert state_of_weights({0: [], 1: []}, 2, skipped=True) == FINITE
    assert state_of_weights({0: [], 1: []}, 2, skipped=False) == "All weights are finite."
    many = state_of_weights({0: [], 1: ["a", "b"], 3: ["b", "c", "d", "e"]}, 4, skipped=True)
    assert many == "Weights hold numbers that are not finite: a, b, c and 2 more."
    assert state_of_weights({0: [], 1: None}, 4, skipped=True) == (
        "Whether all weights are finite is not known: rank 1 could not look at its own and ranks 2, 3 said nothing in "
        "time."
    )
    assert "finite: a." in state_of_weights({0: None, 1: ["a"]}, 3, skipped=True)


def test_why_a_run_failed_is_not_forgotten_by_what_comes_after():
    monitor = Monitor(spike=0.0, max_skipped=2)
    for step in (5, 6):
        monitor.observe(step, float("nan"), skipped=True)
    monitor.observe(7, 1.0, skipped=False)
    for step in (8, 9):
        monitor.observe(step, float("nan"), skipped=True)
    assert (monitor.failed_at, monitor.skipped) == (5, True)


def test_a_rollback_skips_the_data(runs, poisoned, monkeypatch):
    settings = ["pipeline.schedule=emulate", "health.max_skipped=2", "health.rollback=true"]
    assert runs.train("run", *settings)["reason"] == "finished"
    assert runs.steps("run") == list(range(1, 13))
    assert not any(event["skipped"] for event in runs.events("run", "step"))
    assert "Rolled back to step 4" in runs.events("run", "warning")[0]["message"]
    # The trajectory is that of a run whose data simply lacks groups 4 ... 6.
    monkeypatch.undo()
    original = batches.load
    monkeypatch.setattr(
        batches, "load", lambda data, g, place: original(data, g + 3 * (g >= 4 and data.shuffle), place)
    )
    runs.train("clean", "pipeline.schedule=emulate")
    assert_equal_weights(runs.weights("run"), runs.weights("clean"))


def test_a_rollback_leaves_no_engine_behind(runs, poisoned, monkeypatch):
    made, build = [], assemble.engine_of

    def engine(*arguments):
        assert not any(earlier() for earlier in made), "two engines at once"
        new = build(*arguments)
        made.append(weakref.ref(new))
        return new

    monkeypatch.setattr(assemble, "engine_of", engine)
    gc.disable()  # else a collection might happen to come in time
    try:
        runs.train("run", "pipeline.schedule=emulate", "health.max_skipped=2", "health.rollback=true")
    finally:
        gc.enable()
    assert len(made) == 2


ROLLBACK = ["health.max_skipped=2", "health.rollback=true", "checkpoint.keep=9"]


@pytest.mark.parametrize("kind", ["nan", "spike"])
def test_a_rollback_over_ranks(runs, kind):
    """Two stages hear of the failure when they are some groups further, and past another checkpoint: they go back
    together to the last one before it, and no group used since is used again."""
    every = 4 if kind == "nan" else 20
    steps = 14 if kind == "nan" else 26
    url = f"file://{runs.folder}/copies"
    settings = [f"train.steps={steps}", f"checkpoint.every={every}"]
    groups = {5: "nan", 6: "nan"} if kind == "nan" else {22: "spike"}
    first = min(groups)
    config = runs.config("run", *settings, *ROLLBACK, "pipeline.stages=2", f"checkpoint.remote={url}")
    outcome = runs.pool.run("train.jobs:poisoned_rank", config.model_dump(), groups, ranks=2, timeout=250)
    assert [rank["reason"] for rank in outcome] == ["finished", "finished"]
    assert runs.steps("run") == list(range(1, steps + 1))
    assert not any(event["skipped"] for event in runs.events("run", "step"))
    on_disk = [
        checkpoint.manifest(path).step for path in checkpoint.committed(runs.folder / "run/checkpoints")
    ]
    assert [
        copy.step for copy in Remote(url).copies()
    ] == on_disk  # of what it went back from there is no copy
    back = first // every * every
    (note,) = [event["message"] for event in runs.events("run", "warning") if "Rolled" in event["message"]]
    assert f"Rolled back to step {back} because of step {first + 1}; the data groups up to " in note
    skipped = int(note.split("up to ")[1].split()[0]) + 1 - back  # how far they were depends on the moment
    assert skipped > len(groups)
    # The trajectory is that of a run whose data simply lacks those groups.
    original = batches.load
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            batches,
            "load",
            lambda data, g, place: original(data, g + skipped * (g >= back and data.shuffle), place),
        )
        runs.train("clean", *settings, "pipeline.schedule=emulate")
    assert_equal_weights(runs.weights("run"), runs.weights("clean"))
    # It is kept in the checkpoints: a restart knows which data to leave out.
    newest = checkpoint.committed(runs.folder / "run" / "checkpoints")[0]
    assert checkpoint.manifest(newest).meta["data_offset"] == skipped


@pytest.mark.parametrize("schedule", ["2bw", "1f1b"])
def test_an_engine_is_closed_before_another_is_made_and_at_the_end(runs, schedule):
    settings = ["train.steps=12", "checkpoint.every=4", "pipeline.stages=2", f"pipeline.schedule={schedule}"]
    config = runs.config("run", *settings, *ROLLBACK)
    ranks = runs.pool.run(
        "train.jobs:tidy_rank", config.model_dump(), {5: "nan", 6: "nan"}, ranks=2, timeout=250
    )
    assert ranks == [[0, 0, 0]] * 2


def test_a_run_that_fails_on_any_data_gives_up(runs):
    groups = dict.fromkeys(range(5, 400), "nan")
    config = runs.config("run", "train.steps=40", "pipeline.stages=2", *ROLLBACK)
    with pytest.raises(
        StageError, match="4 attempts from step 4, each on new data, failed; the last at step 5"
    ):
        runs.pool.run("train.jobs:poisoned_rank", config.model_dump(), groups, ranks=2, timeout=250)
    kept = checkpoint.committed(runs.folder / "run" / "checkpoints")
    assert kept[-1].name == "step-00000004"
    assert checkpoint.verify(kept[-1]).step == 4


def test_without_a_checkpoint_a_failure_stops_all_ranks(runs):
    settings = ["pipeline.stages=2", "health.rollback=true", "optim.lr=1e30", "optim.max_grad_norm=0"]
    with pytest.raises(StageError, match="2 updates in a row were not finite"):
        runs.train("run", *settings, "health.max_skipped=2", "checkpoint.every=50", "train.steps=50")


DIVERGENCES = {
    "replica": (
        2,
        "master",
        "layers.0.mlp.up.weight",
        "the master of stage 0 differs between data rank 0 and data",
    ),
    "bank": (
        3,
        "bank",
        "layers.3.mlp.up.weight",
        "the (current|next) bank of stage 1 differs between data rank 0 and",
    ),
}


@pytest.mark.parametrize("kind", DIVERGENCES)
def test_one_wrong_bit_on_one_data_rank_stops_the_run_by_name(runs, quick, kind):
    rank, what, name, words = DIVERGENCES[kind]
    config = runs.config("run", "pipeline.stages=2", "pipeline.data_ranks=2", "health.hash_every=3")
    with pytest.raises(StageError, match=f"Silent divergence at step 3: {words}"):
        runs.pool.run("train.jobs:diverged_rank", config.model_dump(), rank, what, name, ranks=4, timeout=250)


@pytest.mark.parametrize("what", ["master", "bank"])
def test_one_wrong_bit_of_a_tied_weight_stops_the_run_by_name(runs, quick, what):
    config = runs.config("run", "pipeline.stages=2", "health.hash_every=3")
    words = r"the tied embedding in the .* differs between stage 0 \(embedding.weight\) and stage 1 \(head.weight\)"
    with pytest.raises(StageError, match=f"Silent divergence at step 3: {words}"):
        runs.pool.run(
            "train.jobs:diverged_rank", config.model_dump(), 1, what, "head.weight", ranks=2, timeout=250
        )
