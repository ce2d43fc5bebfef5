"""torch's synchronous schedules under the trainer: what they train is what the emulator trains without delay."""

from __future__ import annotations

import pytest
import torch
from tests.train.conftest import assert_equal_weights

from slipstream.train import checkpoint

SCHEDULES = ["1f1b", "gpipe", "interleaved_1f1b", "zbv"]
CHUNKS = ["1f1b", "zbv"]  # one on each rank, and two
RECOMPUTED = "train.activation_checkpointing=true"


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_torch_schedules_equal_training_without_delay(runs, reference, schedule):
    runs.train("run", f"pipeline.schedule={schedule}", "pipeline.stages=2", "train.eval_every=5")
    assert_equal_weights(runs.weights("run"), reference.weights("synchronous"))
    found = runs.events("run", "finish")[0]["validation_loss"]
    assert found == pytest.approx(reference.events("synchronous", "finish")[0]["validation_loss"], rel=1e-6)


@pytest.mark.parametrize("schedule", CHUNKS)
def test_a_single_stage_trains_the_same_and_goes_on_with_two(runs, reference, schedule):
    """Its embedding and its head are one weight, which other stages hold apart. Nor does it change a bit that
    activations are recomputed."""
    settings = [f"pipeline.schedule={schedule}", "checkpoint.keep=3", RECOMPUTED]
    runs.train("run", "pipeline.stages=1", *settings)
    assert_equal_weights(runs.weights("run"), reference.weights("synchronous"))
    newest = checkpoint.committed(runs.folder / "run" / "checkpoints")[0]
    (newest / "manifest.json").unlink()
    runs.train("run", "pipeline.stages=2", *settings)
    assert runs.events("run", "start")[-1]["step"] == 8
    assert_equal_weights(runs.weights("run"), reference.weights("synchronous"))


def test_recomputed_activations_change_no_bit_of_the_emulator(runs, reference):
    runs.train("run", "pipeline.schedule=emulate", RECOMPUTED)
    assert_equal_weights(runs.weights("run"), reference.weights("2bw"))


@pytest.mark.parametrize("schedule", SCHEDULES[:3])
def test_experts(runs, schedule):
    settings = ["model.experts=4", "model.experts_per_token=2", "train.steps=4"]
    runs.train("whole", "pipeline.schedule=emulate", "pipeline.delay=0", *settings)
    runs.train("run", f"pipeline.schedule={schedule}", "pipeline.stages=2", *settings)
    assert_equal_weights(runs.weights("run"), runs.weights("whole"))


@pytest.mark.parametrize("schedule", CHUNKS)
def test_data_ranks_agree_with_one(runs, reference, schedule):
    """But for the order in which the gradients of rows are added."""
    runs.train("run", f"pipeline.schedule={schedule}", "pipeline.stages=2", "pipeline.data_ranks=2")
    found = runs.weights("run")
    for name, expected in reference.weights("synchronous").items():
        torch.testing.assert_close(found[name], expected, rtol=1e-4, atol=1e-5)
