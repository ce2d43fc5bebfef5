"""The config tree: round trip, overrides, nearest keys, all problems at once, derived values."""

from __future__ import annotations

import tomllib

import pytest

from slipstream.config import changes, describe, from_tree, load, resolve, to_toml
from slipstream.config.load import keys, nearest
from slipstream.config.settings import Config
from slipstream.errors import ConfigError, UserError

EMULATED = ["pipeline.schedule=emulate"]


def problems_of(overrides: list[str]) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        resolve(load(None, overrides))
    return caught.value.problems


def test_a_value_of_no_kind_is_told_all_of_them():
    assert problems_of(["pipeline.cutover=x"]) == (
        "pipeline.cutover = 'x': input should be a valid integer, a valid number or a valid list.",
    )
    assert problems_of(["optim.betas=0.9"]) == (
        "optim.betas = 0.9: input should be a valid list. Write optim.betas=[0.9, ...].",
    )


@pytest.mark.parametrize(
    ("meant", "key"),
    [
        ("stpes", "train.steps"),
        ("trian.stpes", "train.steps"),
        ("optim.steps", "train.steps"),
        ("lr", "optim.lr"),
        ("model.layer", "model.layers"),
        ("optim.grad_clip", None),  # nothing is better than optim.adamw_lr
    ],
)
def test_the_nearest_key(meant, key):
    assert nearest(meant) == key


def test_a_folder_is_no_file_of_settings(tmp_path):
    with pytest.raises(UserError, match=r"is a folder\. Name a TOML file"):
        load(str(tmp_path), [])
    (tmp_path / "config.toml").touch()
    with pytest.raises(UserError, match=r"Its settings are in .*/config\.toml"):
        load(str(tmp_path), [])


def test_resolved_run_starts_itself_again():
    config = resolve(
        load(None, ["optim.lr=3e-4", "optim.options.nesterov=false", 'train.sample_prompt="a\\"b\\n"'])
    )
    again = from_tree(tomllib.loads(to_toml(config)))
    assert again == config
    assert resolve(again) == config


def test_file_then_overrides(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text('[optim]\nlr = 0.5\nname = "adamw"\n[train]\nsteps = 7\n')
    config = load(file, ["optim.lr=3e-4", "pipeline.schedule=1f1b", "run.dir=2024-01-01", "train.steps="])
    assert (config.optim.lr, config.optim.name) == (3e-4, "adamw")
    assert config.pipeline.schedule == "1f1b"
    assert config.run.dir == "2024-01-01"
    assert config.train.steps == Config().train.steps  # an empty value restores the default


def test_what_may_be_of_several_kinds_is_one_problem():
    (problem,) = problems_of(["pipeline.cutover=x"])
    assert problem.startswith("pipeline.cutover = 'x': ")


def test_every_problem_is_reported_with_its_nearest_key():
    problems = problems_of(
        ["optm.lr=1", "train.stpes=3", "train.dtype=flot32", "lr=3", "steps", "train.seed=x"]
    )
    text = "\n".join(problems)
    assert len(problems) == 6
    assert "Did you mean optim.lr?" in text
    assert "Did you mean train.steps?" in text
    assert "Did you mean 'float32'?" in text
    assert "'steps' is not an override" in text
    assert "train.seed = 'x'" in text


@pytest.mark.parametrize("nothing", ["none", "null", "None"])
def test_who_wants_the_default_again_is_told_how(nothing):
    for key in ("pipeline.boundaries", "pipeline.in_flight", "optim.lr", "train.steps"):
        assert f"{key}= with nothing behind it" in "".join(problems_of([f"{key}={nothing}"]))
    assert load(None, [f"run.name={nothing}"]).run.name == nothing


def test_options_are_given_one_by_one():
    assert "optim.options.NAME=VALUE" in "".join(problems_of(['optim.options={"lookahead": 2}']))
    assert load(None, ["optim.options={lookahead = 2}"]).optim.options == {"lookahead": 2}


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["pipeline.stages=3", "pipeline.boundaries=[1]"], "or write pipeline.boundaries= for an even cut"),
        (["pipeline.stages=4", "pipeline.microbatches=2"], "pipeline.microbatches = 2 is less"),
        (["pipeline.stages=8"], "4 layers cannot fill 8"),
        (["pipeline.schedule=1f1b", "optim.correction=error_feedback"], "none, or pipeline.schedule=2bw"),
        ([*EMULATED, "pipeline.delay=0", "optim.correction=error_feedback"], "none, or pipeline.delay=1"),
        (["pipeline.schedule=1f1b", "pipeline.in_flight=3"], "pipeline.in_flight takes effect"),
        (["pipeline.delay=2"], "pipeline.schedule=emulate for other delays"),
        (["pipeline.schedule=emulate", "pipeline.stages=2"], "runs in one process"),
        (["pipeline.boundaries=[3, 1]"], "names 2 boundaries"),
        (["pipeline.boundaries=[4]"], "must rise strictly"),
        (["model.init_from=x"], "optim.name=adamw"),
        (["model.preset=cpu-defualt"], "Did you mean 'cpu-default'?"),
        (["model.heads=3"], "does not give 3 heads"),
        (["pipeline.data_ranks=3"], "cannot be shared"),
        (["optim.correction=none", "optim.correction_lambda=1"], "cannot take effect without"),
        (["optim.schedule=constant", "optim.floor=0.5"], "cannot take effect"),
        (["train.dtype=bfloat16", "train.device=cpu"], "unusably slow"),
        (["train.gradient_dtype=bfloat16"], "goes with train.dtype=bfloat16"),
        (["train.fp8=rowwise"], "goes with train.dtype=bfloat16 or bfloat16_autocast"),
        (["train.fp8=rowwise", "model.module=a:b"], "is for models of ours"),
        (["train.fp8=rowwise", "train.device=cpu", "model.dim=40"], "no layer of 40 by"),
        (["pipeline.schedule=zbv", "pipeline.microbatches=7"], "divisible"),
        (["optim.sync_start=0.9", "optim.sync_finish=0.9"], "exceed train.steps"),
        (["optim.name=adamwx"], "Did you mean 'adamw'"),
        (["optim.correction=error_fedback"], "Did you mean 'error_feedback'"),
        (["optim.options.lr=0.1"], "set optim.lr instead"),
        (["health.rollback=true", "checkpoint.every=0"], "checkpoints to return to"),
        (["health.rollback=true", "checkpoint.keep=0"], "checkpoints to return to"),
        (["health.rollback=true", "checkpoint.keep=1"], "from before the failure"),
        (["checkpoint.every=5", "checkpoint.keep=0"], "checkpoint.every = 5 cannot take effect"),
        (["train.sample_tokens=5", "checkpoint.keep=0"], "train.sample_tokens = 5 cannot take effect"),
        (["pipeline.schedule=zbv", "model.experts=4", "model.experts_per_token=2"], "routed layer"),
        (["optim.warmup=500"], "Set it to at most 400 updates"),
        (["pipeline.schedule=emulate", "pipeline.cutover=0.3"], "0.3 of pipeline.microbatches = 8 is 2.4"),
        (["pipeline.schedule=emulate", "pipeline.cutover=9"], "from 0 (synchronous) to 8"),
        (["pipeline.cutover=1.0"], "could be one microbatch or all of them: write 1, or 8 for all"),
        (["pipeline.cutover=true"], "pipeline.cutover = True: a number is wanted here"),
        (["pipeline.stages=true"], "pipeline.stages = True: a number is wanted here"),
        (["optim.lr=false"], "optim.lr = False: a number is wanted here"),
        ([*EMULATED, "pipeline.delay=[true, 1]"], "pipeline.delay = [True, 1]: a number is wanted here"),
        (
            [*EMULATED, "pipeline.cutover=[4, false]"],
            "pipeline.cutover = [4, False]: a number is wanted here",
        ),
        (["pipeline.boundaries=[true]"], "pipeline.boundaries = [True]: a number is wanted here"),
        (["optim.betas=[0.9, true]"], "optim.betas = [0.9, True]: a number is wanted here"),
        (["pipeline.schedule=emulate", "pipeline.cutover=4", "pipeline.delay=2"], "one update late"),
        (
            ["pipeline.schedule=emulate", "pipeline.cutover=4", "optim.correction=delay_compensation"],
            "does not go with optim.correction=delay_compensation",
        ),
        (["pipeline.schedule=1f1b", "pipeline.cutover=4"], "reads the newest weights only"),
        (["train.fuse=true"], "train.fuse computes microbatches of one process"),
        (["optim.correction=lr_scaling", "optim.correction_lambda=1"], "with optim.correction=lr_scaling"),
        ([*EMULATED, "pipeline.delay=[1, 1, 1, 1, 1, 1, 1, 1, 1]"], "names 9 stages"),
        (["pipeline.mismatch=1"], "keeps a forward's weights for its backward"),
        ([*EMULATED, "pipeline.mismatch=2"], "above that stage's delay"),
        ([*EMULATED, "pipeline.delay=[1, 0]", "pipeline.mismatch=[1]"], "one number for each stage"),
        ([*EMULATED, "pipeline.mismatch=1", "train.compile=true"], "may read a copy of the weights"),
        ([*EMULATED, "pipeline.mismatch=1", "optim.sync_start=0.1"], "a flushed update has no mismatch"),
        (["train.cuda_graphs=true", "train.device=cpu"], "train.cuda_graphs records what a GPU runs"),
        (["train.cuda_graphs=true", "pipeline.schedule=zbv", "train.device=cuda"], "cuts it in two"),
        (["train.compile=true", "pipeline.schedule=zbv"], "compiled code"),
        (["train.compile=layers", "pipeline.schedule=zbv"], "compiled code"),
        ([*EMULATED, "train.cuda_graphs=true", "pipeline.mismatch=1"], "one set of weights"),
    ],
)
def test_what_cannot_work_is_refused(overrides, words):
    assert any(words in problem for problem in problems_of(overrides)), problems_of(overrides)


def test_true_is_a_value_where_no_number_is_wanted():
    config = load(None, ["train.compile=true", "optim.options.flags=[true, 1]", 'run.tags=["a", "b"]'])
    assert config.train.compile is True
    assert config.optim.options == {"flags": [True, 1]}
    assert config.run.tags == ["a", "b"]
    assert len(problems_of(["run.tags=[true]"])) == 1
    assert "number" not in problems_of(["run.tags=[true]"])[0]


def test_a_problem_is_told_once_and_by_its_key():
    assert problems_of(["model.heads=3"])[0].startswith("model.dim 128 does not")
    assert [text for text in problems_of(["train.compile=fast"]) if "literal" in text.lower()] == []


def test_derived_values():
    assert resolve(load()).pipeline.stages == 2
    assert resolve(load(), world=4).pipeline.stages == 4
    assert resolve(load(None, ["pipeline.schedule=emulate"])).pipeline.stages == 1
    assert resolve(load()).optim.correction == "error_feedback"
    assert resolve(load(None, ["pipeline.schedule=1f1b"])).optim.correction == "none"
    assert (
        resolve(load(None, ["optim.name=lion"])).optim.correction == "none"
    )  # error feedback makes it worse
    assert resolve(load(None, ["pipeline.schedule=emulate", "pipeline.delay=0"])).optim.correction == "none"
    with pytest.raises(ConfigError, match="torchrun started 3"):
        resolve(load(None, ["pipeline.stages=2"]), world=3)


def test_without_checkpoints_nothing_that_needs_one_is_left():
    config = resolve(load(None, ["checkpoint.keep=0"]))
    assert (config.checkpoint.every, config.train.sample_tokens) == (0, 0)
    assert resolve(from_tree(tomllib.loads(to_toml(config)))) == config


def test_microbatches_never_follow_the_stages():
    assert {resolve(load(None, [f"pipeline.stages={p}"])).pipeline.microbatches for p in (1, 2, 4)} == {8}


def test_only_trajectory_keys_count_as_changes():
    stored = resolve(load())
    asked = resolve(load(None, ["pipeline.stages=4", "checkpoint.keep=5", "optim.lr=1", "train.seed=3"]))
    assert {change.name for change in changes(stored, asked)} == {"optim.lr", "train.seed"}
    assert "asked for 1.0" in str(changes(stored, asked)[0])


def test_every_key_is_described_once():
    names = [key.name for key in describe()]
    assert names == list(keys())
    assert all(key.meaning for key in describe())


def test_files_that_are_not_runs(tmp_path):
    with pytest.raises(UserError, match="There is no file"):
        load(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("[train\n")
    with pytest.raises(UserError, match="not valid TOML"):
        load(tmp_path / "bad.toml")


def test_a_cutover_is_a_number_of_microbatches_or_a_share_of_them():
    def resolved(*overrides):
        return resolve(load(overrides=["pipeline.schedule=emulate", *overrides])).pipeline.cutover

    assert resolved() is None
    assert resolved("pipeline.cutover=8") is None, "all of them: as without"
    assert resolved("pipeline.cutover=0.5") == resolved("pipeline.cutover=4") == 4
    assert resolved("pipeline.cutover=0") == 0
    assert resolved("pipeline.cutover=[4, 2]") == [4, 2]
    one = ["pipeline.schedule=2bw", "pipeline.stages=1", "pipeline.microbatches=1"]
    assert resolved(*one, "pipeline.cutover=1.0") == 1, "of one microbatch one and all are the same"
