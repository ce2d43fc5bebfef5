"""`study run --only`: which runs a pattern means."""

from __future__ import annotations

import pytest

from slipstream.study.only import matching
from slipstream.study.parse import load_study

STUDY = """
[axes.seed]
key = "train.seed"
values = [1, 10]
[axes.m]
key = "pipeline.microbatches"
values = [1, 12]
[axes.mm.values]
1 = { train.eval_batches = 1 }
2 = { train.eval_batches = 2 }
[axes.mode.values]
sync = { pipeline.delay = 0 }
ef = { optim.correction = "error_feedback" }
"ef 1/3" = { optim.correction = "error_feedback", pipeline = { microbatches = 6, cutover = 2 } }
"ef [3]" = { optim.correction = "error_feedback", pipeline = { microbatches = 6, cutover = 3 } }
[axes.lr]
key = "optim.lr"
values = [0.001, 0.002]
[runs]
"""


@pytest.fixture
def chosen(tmp_path):
    def make(runs: str):
        path = tmp_path / "study.toml"
        path.write_text(STUDY + runs)
        study = load_study(path, ())
        points = study.expand({}).points

        def names(pattern: str | None) -> list[str]:
            return [" ".join(point.labels.values()) for point in matching(points, pattern, study.labels())]

        return names

    return make


def test_a_pattern_is_anywhere_in_a_name(chosen):
    names = chosen('product = ["seed", "mode"]')
    assert len(names(None)) == 8
    assert names("nothing") == []
    assert names("mode=e") == names("mode=ef*") == names("ef")
    assert len(names("mode=e")) == 6


def test_a_whole_value_at_its_end_means_that_one_alone(chosen):
    names = chosen('product = ["seed", "mode"]')
    assert names("mode=ef") == ["1 ef", "10 ef"]
    assert names("seed=1 mode=ef") == ["1 ef"]
    assert names("seed=1*mode=ef 1/3") == ["1 ef 1/3", "10 ef 1/3"]  # what stands before * may go on
    assert names("seed=1") == ["1 sync", "1 ef", "1 ef 1/3", "1 ef [3]"]
    assert names("seed=?*mode=sync") == ["1 sync", "10 sync"]


def test_it_is_that_axis_and_no_other_whose_name_ends_so(chosen):
    names = chosen('product = ["m", "mm"]')
    assert names("m=1") == ["1 1", "1 2"]
    assert names("mm=1") == ["1 1", "12 1"]


def test_a_name_as_it_is_listed_means_that_run(chosen):
    names = chosen('product = ["seed", "mode"]')
    assert names("seed=1 mode=ef [3]") == ["1 ef [3]"]
    assert names("ef [3]") == ["1 ef [3]", "10 ef [3]"]
    assert names("mode=ef [13]") == ["1 ef 1/3", "10 ef 1/3"]  # else brackets are what * is: a pattern


def test_a_value_that_only_later_runs_have_is_a_whole_value_too(chosen):
    """Of a study whose grid has not ended the runs that it chooses for have no names yet."""
    names = chosen(
        'tune = "lr"\nover = { product = ["lr", "mode:ef 1/3", "seed:1"] }\nby = ["mode"]\n'
        'like = { mode = { ef = "ef 1/3" } }\nthen = { product = ["mode:ef", "seed"] }\n'
    )
    assert names("mode=ef") == []
    assert len(names("mode=ef 1/3")) == 2
