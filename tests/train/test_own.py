"""A user's own model and data in the trainer: the same laws as for ours, across stages and after a resume."""

from __future__ import annotations

import sys

import pytest
import torch
from tests.train import own
from tests.train.conftest import TINY, Runs, assert_equal_weights

from slipstream.config import load, resolve
from slipstream.errors import DataError, UserError
from slipstream.train import session

OWN = [key for key in TINY if not key.startswith("model.") or key.startswith("model.vocab")]


@pytest.fixture
def mine(tmp_path, data, pool) -> Runs:
    class Own(Runs):
        def config(self, name, *overrides):
            paths = [f"run.dir={self.folder / name}"]
            if not any(text.startswith("data.module") for text in overrides):
                paths.append(f"data.path={self.data}")
            return resolve(load(None, [*OWN, *paths, *overrides]))

    return Own(tmp_path, data, pool)


@pytest.mark.parametrize("name", ["layers", "tied"])
def test_the_weights_do_not_depend_on_the_stages(mine, name):
    model = f"model.module=tests.train.own:{name}"
    mine.train("one", model, "pipeline.schedule=emulate", "pipeline.cutover=2")
    mine.train("three", model, "pipeline.stages=3", "pipeline.cutover=2")
    assert_equal_weights(mine.weights("one"), mine.weights("three"))
    first, last = (mine.events("one", "step")[place]["loss"] for place in (0, -1))
    assert last < first


def test_it_resumes_at_another_depth(mine):
    common = [
        "model.module=tests.train.own:tied",
        "pipeline.cutover=2",
        "optim.schedule=constant",
        "optim.warmup=1",
    ]
    mine.train("cut", *common, "pipeline.stages=2", "train.steps=4")
    mine.train("cut", *common, "pipeline.stages=3", "train.steps=8")
    mine.train("same", *common, "pipeline.schedule=emulate", "train.steps=8")
    assert_equal_weights(mine.weights("cut"), mine.weights("same"))


def test_a_resume_brings_back_saved_buffers(mine, monkeypatch):
    common = [
        "model.module=tests.train.own:scaled",
        "pipeline.schedule=emulate",
        "optim.schedule=constant",
        "optim.warmup=1",
    ]
    monkeypatch.setenv("SCALE", "0.5")
    mine.train("same", *common, "train.steps=8")
    mine.train("cut", *common, "train.steps=4")
    monkeypatch.setenv("SCALE", "2.0")
    mine.train("cut", *common, "train.steps=8")
    assert_equal_weights(mine.weights("cut"), mine.weights("same"))


def test_a_model_with_a_mask_of_infinities_resumes(mine):
    common = ["model.module=tests.train.own:masked", "optim.schedule=constant", "optim.warmup=1"]
    mine.train("cut", *common, "pipeline.stages=2", "pipeline.cutover=2", "train.steps=4")
    emulated = ["pipeline.schedule=emulate", "pipeline.cutover=2", "train.steps=6"]
    mine.train("cut", *common, *emulated)
    mine.train("same", *common, *emulated)
    assert_equal_weights(mine.weights("cut"), mine.weights("same"))


def test_flushed_schedules_take_it_too(mine):
    model = "model.module=tests.train.own:layers"
    mine.train("flushed", model, "pipeline.stages=2", "pipeline.schedule=1f1b")
    mine.train("emulated", model, "pipeline.schedule=emulate", "pipeline.delay=0")
    assert_equal_weights(mine.weights("flushed"), mine.weights("emulated"))


def test_a_module_that_is_no_sequence_is_one_stage(mine):
    mine.train("run", "model.module=tests.train.own:whole", "pipeline.schedule=emulate", "train.steps=2")
    with pytest.raises(UserError, match=r"has 1 layer, too few for\s+2 stages\. Return its layers as a list"):
        mine.train("cut", "model.module=tests.train.own:whole", "pipeline.stages=2")


def test_a_model_that_makes_no_logits_is_refused(mine):
    with pytest.raises(UserError, match=r"returns \[16, 3\] for each sequence; a language model returns"):
        mine.train("run", "model.module=tests.train.own:too_narrow", "pipeline.schedule=emulate")


def test_our_keys_of_the_shape_are_refused_beside_it():
    with pytest.raises(UserError, match=r"model\.dim cannot take effect: model\.module"):
        resolve(load(None, ["model.module=tests.train.own:layers", "model.dim=32"]))


def test_own_data_trains_any_model(mine):
    outcome = mine.train("run", "model.module=tests.train.own:layers", "data.module=tests.train.own:counting",
                         "pipeline.stages=2", "train.steps=30")  # fmt: skip
    assert outcome["reason"] == "finished"
    entropy = mine.events("run", "finish")[0]["unigram_entropy"]
    assert entropy == pytest.approx(torch.tensor(64.0).log().item(), rel=0.01)


def test_own_data_of_a_wrong_shape_is_named(mine):
    with pytest.raises(DataError, match=r"inputs are \(8, 3\), expected \[rows, sequence\] = \(8, 16\)"):
        mine.train("run", "model.module=tests.train.own:layers", "data.module=tests.train.own:wrong_shape",
                   "pipeline.schedule=emulate")  # fmt: skip


def test_a_callback_sees_every_update_and_may_stop_the_run(mine):
    model = ["model.module=tests.train.own:layers", "pipeline.schedule=emulate"]
    own.SEEN.clear()
    mine.train("seen", *model, "train.callback=tests.train.own:remember")
    assert [event["step"] for event in own.SEEN] == list(range(1, 13))
    assert own.SEEN[-1]["loss"] == mine.events("seen", "step")[-1]["loss"]
    outcome = mine.train("stopped", *model, "train.callback=tests.train.own:stop_at_five")
    assert outcome["reason"] == "signal"
    assert outcome["step"] < 12


def test_a_file_is_a_place_too(mine, tmp_path, monkeypatch):
    (tmp_path / "somewhere.py").write_text("from tests.train.own import layers as mine\n")
    monkeypatch.chdir(tmp_path)
    config = mine.config(
        "run", "model.module=somewhere.py:mine", "pipeline.schedule=emulate", "train.steps=1"
    )
    assert session.run_rank(None, config.model_dump())["reason"] == "finished"
    assert "somewhere" in sys.modules


def test_it_is_exported_under_its_own_names(mine, tmp_path):
    from safetensors.torch import load_file

    from slipstream.cli import main

    mine.train("run", "model.module=tests.train.own:layers", "pipeline.schedule=emulate", "train.steps=1")
    with pytest.raises(SystemExit) as ended:
        main(["export", str(tmp_path / "run"), str(tmp_path / "out")])
    assert ended.value.code == 0
    own.layers(64).load_state_dict(load_file(tmp_path / "out" / "model.safetensors"))
