"""The engine over models no one here wrote, traced stages, tuples between stages, and wrapped modules."""

import pytest
import torch


@pytest.mark.parametrize("kind", ["llama", "llama-tied", "gpt2", "mixtral"])
def test_transformers_models_are_bit_identical_at_every_depth(pool, kind):
    alone = pool.run("pipeline.model_jobs:foreign", kind, ranks=1)[0]
    assert alone["losses"] == alone["emulated"]
    for stages in (2, 4):
        parts = pool.run("pipeline.model_jobs:foreign", kind, ranks=stages)
        assert parts[-1]["losses"] == alone["losses"]
        for part in parts:
            for name, weight in part["weights"].items():
                assert torch.equal(weight, alone["weights"][name]), name


@pytest.mark.parametrize("job", ["traced", "tuples"])
def test_traced_stages_and_tuples_match_the_emulator(pool, job):
    found = pool.run(f"pipeline.model_jobs:{job}", ranks=4)[-1]
    assert found["losses"] == found["emulated"]


@pytest.mark.parametrize("how", ["checkpoint", "compile"])
def test_wrapping_a_stage_does_not_change_the_numbers(pool, how):
    plain = pool.run("pipeline.model_jobs:wrapped", "plain", ranks=2)[-1]["losses"]
    found = pool.run("pipeline.model_jobs:wrapped", how, ranks=2)[-1]["losses"]
    if how == "checkpoint":
        assert found == plain
    else:
        assert found == pytest.approx(plain, rel=1e-5)


def test_autocast_runs_and_stays_near(pool):
    plain = pool.run("pipeline.model_jobs:wrapped", "plain", ranks=2)[-1]["losses"]
    found = pool.run("pipeline.model_jobs:wrapped", "autocast", ranks=2)[-1]["losses"]
    assert found == pytest.approx(plain, rel=0.05)
    assert found != plain


def test_a_weight_shared_inside_each_stage_is_not_tied_to_the_next_stages(pool):
    """The stages call it by the same name: it was overwritten with that of the first stage, and summed with it."""
    losses, emulated = pool.run("pipeline.model_jobs:shared_inside", ranks=2)[-1]
    assert losses == emulated


def test_a_stage_without_parameters(pool):
    losses, emulated = pool.run("pipeline.model_jobs:bare", ranks=3)[-1]
    assert losses == emulated
