"""Another number of data ranks: the same tokens, the same rule, sums in another order.

The gradient of a microbatch is a sum over its tokens. D ranks sum D parts and add them up, so it differs in its last
bits (1e-7 of its size), and no more: that is the law held here for every update, from one state. Over a run the
differences go their own way. Adam and SGD keep them at that size. Muon lifts a direction in which the gradient is
nearly zero by up to 3.4445^5 = 485, and rounding with it, so single matrices part by 1e-5 while the model as a whole
stays within 1e-6.
"""

from __future__ import annotations

import shutil

import pytest
import torch

from slipstream.errors import UserError
from slipstream.optim.newton_schulz import COEFFICIENTS, STEPS, orthogonalise
from slipstream.train import checkpoint
from slipstream.train.master import load_master

STEPS_TRAINED = 10
SETTINGS = [f"train.steps={STEPS_TRAINED}", "checkpoint.every=1", f"checkpoint.keep={STEPS_TRAINED}"]


def at(runs, name: str, step: int) -> dict[str, torch.Tensor]:
    return load_master(checkpoint.folder_of(runs.folder / name / "checkpoints", step)).weights


def apart(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """|one - other| / |one| over all weights together, in float64."""
    assert one.keys() == other.keys()
    difference = torch.cat([(one[name].double() - other[name].double()).flatten() for name in one])
    return float(difference.norm() / torch.cat([w.double().flatten() for w in one.values()]).norm())


@pytest.mark.parametrize("optimizer", ["muon", "adamw", "sgd"])
def test_every_update_and_the_whole_run_agree(runs, optimizer):
    """Updates 1 and 6 from one state, and all ten: within 1e-6 of the weights, one to two data ranks."""
    settings = [*SETTINGS, f"optim.name={optimizer}"]
    runs.train("one", *settings, "pipeline.stages=1")
    for step in (0, 5):
        name = f"from-{step}"
        if step:  # the run as it was after `step` updates, to be resumed with two data ranks
            shutil.copytree(runs.folder / "one", runs.folder / name)
            for path in checkpoint.committed(runs.folder / name / "checkpoints"):
                if int(path.name.split("-")[1]) > step:
                    shutil.rmtree(path)
        runs.train(name, *settings, "pipeline.stages=1", "pipeline.data_ranks=2", "health.hash_every=3")
        assert runs.events(name, "start")[-1]["resumed"] == bool(step)
        before, after = at(runs, "one", max(step, 1)), at(runs, "one", step + 1)
        found = at(runs, name, step + 1)
        assert apart(after, found) < 3e-7
        assert step == 0 or apart(before, after) > 1e-3 or optimizer == "sgd", (
            "an update moves far more than that"
        )
        assert apart(at(runs, "one", STEPS_TRAINED), at(runs, name, STEPS_TRAINED)) < 1e-6
    losses = [[event["loss"] for event in runs.events(name, "step")] for name in ("one", "from-0")]
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)


@pytest.mark.parametrize("sharded", [False, True])
def test_two_stages_by_two_data_ranks(runs, reference, sharded):
    owned = f"pipeline.shard_optimizer={str(sharded).lower()}"
    runs.train("run", "pipeline.stages=2", "pipeline.data_ranks=2", owned, "health.hash_every=3")
    assert apart(reference.weights("2bw"), runs.weights("run")) < 1e-6
    first = runs.events("run", "step")[0]["loss"]
    assert first == pytest.approx(reference.events("2bw", "step")[0]["loss"], rel=1e-6)


def test_a_run_with_a_sharded_optimizer_resumes_bit_for_bit(runs):
    settings = [
        "pipeline.stages=2",
        "pipeline.data_ranks=2",
        "pipeline.shard_optimizer=true",
        "train.steps=8",
    ]
    runs.train("whole", *settings, "checkpoint.every=4")
    shutil.copytree(runs.folder / "whole", runs.folder / "half")
    for path in checkpoint.committed(runs.folder / "half" / "checkpoints"):
        if path != checkpoint.folder_of(runs.folder / "half" / "checkpoints", 4):
            shutil.rmtree(path)
    runs.train("half", *settings, "checkpoint.every=4")
    assert runs.events("half", "start")[-1]["resumed"]
    assert apart(runs.weights("whole"), runs.weights("half")) == 0


def test_experts_balanced_over_other_rows_are_another_training(runs):
    """Without the balance loss the data ranks agree; with it a resume into another number of them is refused."""
    experts = ["model.experts=4", "model.experts_per_token=2", "train.steps=4", "checkpoint.every=2"]
    two = ["pipeline.stages=1", "pipeline.data_ranks=2"]
    runs.train("one", "pipeline.schedule=emulate", "model.balance_loss=0", *experts)
    runs.train("two", "model.balance_loss=0", *two, *experts)
    assert apart(runs.weights("two"), runs.weights("one")) < 1e-6
    runs.train("run", "pipeline.schedule=emulate", *experts)
    with pytest.raises(UserError, match="data_ranks: the run has 1, asked for 2"):
        runs.train("run", *two, *experts)


def test_why_single_matrices_of_muon_part_further():
    """A gradient of rank 4 in a matrix of 16 x 16, and 1e-7 of noise: what comes out differs by far more."""
    generator = torch.Generator().manual_seed(0)
    low = torch.randn(1, 16, 4, generator=generator) @ torch.randn(1, 4, 16, generator=generator)
    noise = torch.randn(1, 16, 16, generator=generator)
    noise *= 1e-7 * low.norm() / noise.norm()
    clean, noisy = orthogonalise(low.double()), orthogonalise((low + noise).double())
    factor = float((noisy - clean).norm() / (noise.norm() / low.norm()))
    limit = COEFFICIENTS[0] ** STEPS
    assert 0.5 * limit < factor < 1.1 * limit
