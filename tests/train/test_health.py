"""Health: spikes, repeated non-finite updates, silent divergence by name, rollback that skips the data."""

from __future__ import annotations

import pytest
import torch
from tests.train.conftest import assert_equal_weights

from slipstream.errors import StageError
from slipstream.train import batches, build, health
from slipstream.train.health import Monitor, checksum, divergence, fingerprint


def test_a_spike_is_told_from_noise():
    monitor = Monitor(spike=6.0, max_skipped=3)
    noise = torch.Generator().manual_seed(0)
    for step in range(100):
        assert monitor.observe(step, 3.0 + 0.05 * torch.randn((), generator=noise).item(), False) is None
    warning = monitor.observe(100, 4.5, False)
    assert warning is not None
    assert "4.5000 at step 100" in warning
    assert not monitor.failed


def test_skipped_updates_in_a_row_are_a_failure():
    monitor = Monitor(spike=0, max_skipped=3)
    for step, skipped in enumerate([True, True, False, True, True]):
        monitor.observe(step, 1.0, skipped)
    assert not monitor.failed
    assert "3 in a row" in str(monitor.observe(5, 1.0, True))
    assert monitor.failed


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

    def corrupted(state, tied):
        state["master"]["head.weight"][0, 0] += 1e-6
        return original(state, tied)

    monkeypatch.setattr(health, "fingerprint", corrupted)
    with pytest.raises(StageError, match="Silent divergence at step 3: the tied embedding"):
        runs.train("run", "pipeline.schedule=emulate", "health.hash_every=3")


@pytest.fixture
def poisoned(monkeypatch):
    """Data groups 5 and 6 give a loss that is not finite: a marker rides in their token counts."""
    original = batches.load

    def load(dataset, group, place):
        batch = original(dataset, group, place)
        if group in (5, 6) and dataset.shuffle:
            batch.targets[:, -1] = -1
        return batch

    monkeypatch.setattr(batches, "load", load)
    loss_function = build.loss_function

    def loss(config):
        inner = loss_function(config)
        return lambda logits, targets: (
            inner(logits, targets.abs()) * (float("nan") if targets[0, -1] < 0 else 1.0)
        )

    monkeypatch.setattr(build, "loss_function", loss)


def test_updates_that_are_not_finite_are_skipped_and_reported(runs, poisoned):
    runs.train("run", "pipeline.schedule=emulate")
    skipped = [event["step"] for event in runs.events("run", "step") if event["skipped"]]
    assert skipped == [6, 7]
    assert [event["step"] for event in runs.events("run", "warning")] == [6, 7]


def test_repeated_failures_stop_the_run(runs, poisoned):
    with pytest.raises(StageError, match="2 updates in a row were not finite"):
        runs.train("run", "pipeline.schedule=emulate", "health.max_skipped=2")


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


def test_a_rollback_over_ranks(runs, monkeypatch):
    """Every rank returns to the checkpoint together: here the data itself cannot be made bad, so the limit is."""
    settings = ["pipeline.stages=2", "health.rollback=true", "optim.lr=1e30", "optim.max_grad_norm=0"]
    with pytest.raises(StageError, match="updates in a row were not finite"):
        runs.train("run", *settings, "health.max_skipped=2", "checkpoint.every=50", "train.steps=50")
