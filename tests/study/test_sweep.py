"""Study files: which runs they ask for, in which order, and under which identity."""

from __future__ import annotations

from pathlib import Path

import pytest

from slipstream.config import from_tree, resolve
from slipstream.errors import UserError
from slipstream.study.parse import load_study
from slipstream.study.sweep import TUNING, Point, Study, digest

AXES = """
[axes.seed]
key = "train.seed"
values = [0, 1]
[axes.lr]
key = "optim.lr"
values = [0.001, 0.002, 0.004]
[axes.optimizer.values]
muon = { optim.name = "muon" }
adamw = { "optim.name" = "adamw", optim.options.decay = "all" }
[axes.mode.values]
sync = { pipeline.delay = 0 }
delay = { optim.correction = "none" }
ef = { optim.correction = "error_feedback" }
"""


@pytest.fixture
def study(tmp_path):
    def make(runs: str, axes: str = AXES, *overrides: str) -> Study:
        path = tmp_path / "study.toml"
        path.write_text(f"{axes}\n[runs]\n{runs}\n")
        return load_study(path, overrides)

    return make


def labels(points) -> list[str]:
    return [" ".join(point.labels.values()) for point in points]


def test_product_varies_the_first_axis_slowest(study):
    found = study('product = ["seed", "mode:sync,ef"]').expand({})
    assert labels(found.points) == ["0 sync", "0 ef", "1 sync", "1 ef"]
    assert [point.config.pipeline.delay for point in found.points] == [0, 1, 0, 1]


def test_zip_and_chain(study):
    assert labels(study('zip = ["seed", "optimizer"]').expand({}).points) == ["0 muon", "1 adamw"]
    chained = study('chain = [{ product = ["seed:1", "lr"] }, { product = ["seed:0", "mode:sync"] }]')
    assert labels(chained.expand({}).points) == ["1 0.001", "1 0.002", "1 0.004", "0 sync"]


def test_settings_nested_and_dotted_reach_the_config(study):
    points = study('product = ["optimizer:adamw", "lr:0.002"]').expand({}).points
    assert points[0].config.optim.name == "adamw"
    assert points[0].config.optim.options == {"decay": "all"}
    assert points[0].config.optim.lr == 0.002


def test_equal_runs_are_one_run(study):
    found = study('chain = [{ product = ["seed:0", "mode"] }, { product = ["mode:sync"] }]').expand({})
    assert labels(found.points) == ["0 sync", "0 delay", "0 ef"]  # seed 0 is the default


TUNE = """
tune = "lr"
by = ["optimizer", "mode"]
like.mode = { delay = "ef" }
over = { product = ["seed:0", "optimizer:muon", "mode:sync,ef", "lr"] }
then = { product = ["seed", "optimizer:muon", "mode"] }
"""


def losses_of(points: tuple[Point, ...], best: dict[str, str]) -> dict[str, float | None]:
    return {
        point.digest: 1.0 if point.labels["lr"] == best[point.labels["mode"]] else 2.0 for point in points
    }


def test_tune_takes_the_best_of_the_grid_for_each_combination(study):
    made = study(TUNE)
    grid = made.expand({})
    assert (len(grid.points), grid.waiting) == (6, 6)
    found = made.expand(losses_of(grid.points, {"sync": "0.002", "ef": "0.001"}))
    assert found.waiting == 0
    chosen = {(p.labels["seed"], p.labels["mode"]): p.config.optim.lr for p in found.points[6:]}
    assert chosen == {  # seed 0 of sync and ef was part of the grid
        ("0", "delay"): 0.001,
        ("1", "sync"): 0.002,
        ("1", "delay"): 0.001,
        ("1", "ef"): 0.001,
    }
    assert found.notes == ("The best lr of optimizer=muon mode=ef, 0.001, lies at the edge of its grid.",)


def test_the_edge_of_a_grid_is_that_of_its_values_and_not_of_their_order(study):
    made = study(TUNE, AXES.replace("[0.001, 0.002, 0.004]", "[0.002, 0.001, 0.004]"))
    grid = made.expand({}).points
    assert made.expand(losses_of(grid, {"sync": "0.002", "ef": "0.002"})).notes == ()
    (note,) = made.expand(losses_of(grid, {"sync": "0.002", "ef": "0.001"})).notes
    assert "0.001, lies at the edge" in note


def test_tune_waits_only_for_its_own_grid_and_leaves_out_what_never_trains(study):
    made = study(TUNE)
    grid = made.expand({}).points
    only_sync = {p.digest: None for p in grid if p.labels["mode"] == "sync"}
    found = made.expand(only_sync)
    assert (len(found.points), found.waiting) == (6, 4)
    assert found.notes == ("No lr of the grid trains optimizer=muon mode=sync: left out.",)


def test_a_grid_may_be_cheaper_than_what_it_chooses_for(study):
    made = study(TUNE + "tune_with = { train = { steps = 5, eval_every = 0 } }\n")
    grid = made.expand({}).points
    assert {point.config.train.steps for point in grid} == {5}
    assert {point.labels["tuning"] for point in grid} == {"train.steps=5, train.eval_every=0"}
    found = made.expand(losses_of(grid, {"sync": "0.002", "ef": "0.002"}))
    chosen = found.points[6:]
    assert len(chosen) == 6  # seed 0 is run again at full length
    assert {(p.config.train.steps, p.config.optim.lr) for p in chosen} == {(400, 0.002)}
    assert all("tuning" not in point.labels for point in chosen)


def test_overrides_change_the_base_and_not_the_axes(study):
    points = study('product = ["lr"]', AXES, "train.steps=7", "optim.lr=9").expand({}).points
    assert {point.config.train.steps for point in points} == {7}
    assert [point.config.optim.lr for point in points] == [0.001, 0.002, 0.004]


@pytest.mark.parametrize(
    ("runs", "words"),
    [
        ('product = ["sed"]', "Did you mean 'seed'"),
        ('product = ["seed:7"]', "has no value '7'"),
        ('product = ["seed", "seed:0"]', "'seed' occurs twice"),
        ('zip = ["seed", "lr"]', r"one length, not \[2, 3\]"),
        ('sum = ["seed"]', "one of product, zip, chain or tune"),
        ('tune = "lr"\nover = "lr"', "needs tune, by, over and then"),
        (TUNE + "tune_with = 5", "tune_with is a table"),
        (
            TUNE.replace('"lr"\n', '"rate"\n'),
            "'rate' is not an axis of its `over`",
        ),  # before its runs, not after
        ("product = 3", "product = 3: it is a list"),
        ('product = "seed"', "product = 'seed': it is a list"),
        (TUNE.replace('["optimizer", "mode"]', '"mode"'), "by = 'mode': it is a list of names"),
        (TUNE.replace("like.mode", "like.moed"), "like names 'moed', and tune is by 'optimizer', 'mode'"),
        (TUNE.replace('{ delay = "ef" }', '"ef"'), r"like\.mode = 'ef': it is a table"),
        ('chain = ["mode:ef", "other"]', "Two different runs are both called mode=ef"),
    ],
)
def test_mistakes_are_named(study, runs, words):
    other = '[axes.other]\nname = "mode"\nvalues.ef = { optim.correction = "none" }\n'
    with pytest.raises(UserError, match=words):
        study(runs, AXES + other).expand({})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("base = 3", "base = 3: it is a table"),
        ("axes = 3", "axes = 3: it is a table"),
        ("axes.seed = 3", "axes.seed = 3: it is a table"),
        ("table = [1]", r"table = \[1\]: it is a table"),
        ("base.train = 3", "'train' is 3 in one place"),
        (
            "base.optim = 3\naxes.lr = { key = 'optim.lr', values = [1] }\nruns = 'lr'",
            "'optim' is 3 in one place",
        ),
        ("base.pipeline = '2bw'", "'pipeline' is '2bw' in one place"),
        ("axes.seed = { key = 3, values = [0] }", "needs a key and a list of values"),
        ("axes.mode.values = {}", "needs a key and a list of values, or a table of named values"),
        ("axes.m.values.a = { pipeline.schedule = '1f1b' }\nruns = 'm'", "The run m=a .* in one process"),
        ("name = 'a/b'", "cannot name files"),
        ("name = ''", "cannot name files"),
    ],
)
def test_what_is_no_study_is_named(tmp_path, text, words):
    path = tmp_path / "study.toml"
    path.write_text(text + ("" if "runs" in text else "\nruns.product = []"))
    with pytest.raises(UserError, match=words):
        load_study(path).expand({})


def test_a_run_that_cannot_work_is_named(study):
    axes = AXES + '[axes.bad.values]\nx = { pipeline.delay = 0, optim.correction = "error_feedback" }\n'
    with pytest.raises(UserError, match=r"(?s)The run bad=x of this study.*cannot take effect"):
        study('product = ["bad"]', axes).expand({})


def test_an_unknown_key_is_named(study):
    with pytest.raises(UserError, match=r"Did you mean optim\.lr"):
        study('product = ["x"]', '[axes.x]\nkey = "optim.lrr"\nvalues = [1]').expand({})


def test_a_study_runs_in_one_process(study):
    with pytest.raises(UserError, match="in one process"):
        study('product = ["seed"]', AXES, "pipeline.schedule=2bw").expand({})


def test_digest_is_of_what_decides_the_numbers():
    def of(**tree) -> str:
        return digest(resolve(from_tree(tree)))

    plain = of(train={"steps": 5})
    assert of(train={"steps": 6}) != plain
    assert of(train={"steps": 5, "eval_every": 1}) != plain  # another curve
    assert of(train={"steps": 5}, data={"path": "elsewhere"}) != plain
    assert of(train={"steps": 5, "device": "cpu", "log_every": 9}, run={"dir": "x"}) == plain
    assert of(train={"steps": 5, "compile": True}, checkpoint={"every": 3}) == plain


SHIPPED = sorted(Path(__file__).parents[2].glob("studies/*.toml"))


def test_studies_are_shipped():
    names = {path.stem for path in SHIPPED}
    assert names >= {"toy", "a-optimizers", "a-corrections", "a-moe", "a-depth", "a-length", "b-muon-adamw"}


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_every_shipped_study_resolves_with_its_tables(path):
    from slipstream.study.cells import roles_of

    study = load_study(path)
    assert study.name == path.stem
    roles = roles_of(study)
    grid = study.expand({})
    whole = study.expand({point.digest: float(i) for i, point in enumerate(grid.points)})
    assert whole.waiting == 0
    assert len(whole.points) >= len(grid.points)
    modes = {point.labels[roles.mode] for point in whole.points}
    # Those of the cutover take the delay without a correction from another study's runs.
    elsewhere = {roles.baseline} if "cutover" in study.name else set()
    assert {roles.reference, roles.baseline} - elsewhere <= modes
    # Paired: every mode of a seed has the synchronous run of that seed beside it.
    special = {roles.mode, *roles.best}
    points = [point for point in whole.points if TUNING not in point.labels]
    place = [tuple((a, x) for a, x in p.labels.items() if a not in special) for p in points]
    with_reference = {
        at for at, p in zip(place, points, strict=True) if p.labels[roles.mode] == roles.reference
    }
    assert set(place) == with_reference


def test_the_delays_of_the_depth_study_are_those_of_the_schedules():
    from slipstream.schedule.generate import build
    from slipstream.schedule.staleness import staleness

    study = load_study(Path(__file__).parents[2] / "studies" / "a-depth.toml")
    modes = {p.labels["mode"]: p.config.pipeline for p in study.expand({}).points}
    for stages in (4, 8, 16):
        expected = staleness(build("pipedream", stages, 16, 4))
        assert modes[f"pipedream {stages}"].delay == list(expected.delay)
        assert modes[f"pipedream {stages}"].mismatch == 0
    for every in (1, 4, 8):
        expected = staleness(build("paci", 8, 8, 6, every=every))
        assert modes[f"paci 8, a={every}"].delay == list(expected.delay)
        assert modes[f"paci 8, a={every}"].mismatch == list(expected.mismatch)


def test_studies_of_one_setting_share_their_runs():
    """The digest is of the settings, so what a-core has run no other study of the setting runs again."""
    folder = Path(__file__).parents[2] / "studies"

    def found(name: str) -> dict[str, Point]:
        return {point.digest: point for point in load_study(folder / f"{name}.toml").expand({}).points}

    core = found("a-core")
    for name in ("a-corrections", "a-search"):
        shared = [core[digest].labels for digest in found(name) if digest in core]
        assert len(shared) == len(core), name
    sync = {
        digest for digest, point in core.items() if point.name.startswith("seed=0") and "sync" in point.name
    }
    assert sync <= set(found("a-optimizers"))  # both lie in its grids of learning rates


def test_the_long_study_is_paired_seed_by_seed_at_twenty_tokens_per_parameter():
    from slipstream.config.resolve import model_config
    from slipstream.models.sizes import parameters

    study = load_study(Path(__file__).parents[2] / "studies" / "b-muon-adamw.toml")
    grid = study.expand({}).points
    points = study.expand({point.digest: 1.0 for point in grid}).points
    whole = points[len(grid) :]
    assert (len(grid), len(whole)) == (16, 40)
    first = [(p.labels["seed"], p.labels["optimizer"]) for p in whole[::4]]
    assert first == [(str(seed), name) for seed in range(5) for name in ("muon", "adamw")]
    config = whole[0].config
    tokens = config.train.steps * config.tokens_per_step
    assert tokens / parameters(model_config(config.model)) == pytest.approx(20, rel=1e-3)
    assert grid[0].config.train.steps == config.train.steps / 4
