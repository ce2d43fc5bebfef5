"""The loop beside the engine: both contenders do the same updates, and the loop costs next to nothing."""

from __future__ import annotations

import json

import pytest

from slipstream.config import load, resolve
from slipstream.errors import UserError
from slipstream.train.overhead import CONTENDERS, _quiet, compare, take_sample


def test_contenders_train_the_same_model_and_are_timed_over_the_same_updates(runs):
    config = runs.config("unused", "pipeline.stages=2")
    quiet = _quiet(config, runs.folder / "sample", steps=9)
    for name in CONTENDERS:
        costs = runs.pool.run(take_sample, quiet.model_dump(), name, 2, 6, ranks=2, timeout=120)
        assert len(costs) == 2
        assert all(cost.seconds > 0 and cost.cpu_seconds > 0 for cost in costs)
    events = [json.loads(line) for line in (runs.folder / "sample" / "events.jsonl").read_text().splitlines()]
    assert [event["step"] for event in events if event["event"] == "step"] == list(range(1, 10))
    assert "step 9/9" in (runs.folder / "sample" / "lines-0.txt").read_text()
    with pytest.raises(UserError, match=r"set pipeline\.schedule to 2bw"):
        compare(runs.config("unused", "pipeline.schedule=emulate"), rounds=1, updates=1)


@pytest.mark.slow
def test_the_trainer_adds_no_more_than_three_percent():
    """The CPU default, two stages. It measures: run it on a machine that does nothing else."""
    result = compare(resolve(load(None, [])), rounds=7, updates=40)
    assert result["ratio"] >= 0.97, result
