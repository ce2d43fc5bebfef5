"""The loop beside the engine: both contenders do the same updates, and the loop costs next to nothing."""

from __future__ import annotations

import json

import pytest

from slipstream.bench.overhead import _quiet, compare, steps_of, take_turns
from slipstream.config import load, resolve
from slipstream.errors import UserError


def test_contenders_take_turns_of_as_many_updates_and_the_trainer_trains_as_always(runs):
    config = runs.config("unused", "pipeline.stages=2")
    steps = steps_of(rounds=2, updates=3)
    quiet = _quiet(config, runs.folder / "turns", steps)
    ranks = runs.pool.run(take_turns, quiet.model_dump(), 3, ranks=2, timeout=250)
    assert all(len(rank["trainer"]) == 2 and len(rank["bare"]) == 3 for rank in ranks)
    assert all(
        c.seconds > 0 and c.cpu_seconds > 0 for rank in ranks for turns in rank.values() for c in turns
    )
    folder = runs.folder / "turns" / "trainer"
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    assert [event["step"] for event in events if event["event"] == "step"] == list(range(1, steps + 1))
    assert f"step {steps}/{steps}" in (folder / "lines-0.txt").read_text()
    with pytest.raises(UserError, match=r"set pipeline\.schedule to 2bw"):
        compare(runs.config("unused", "pipeline.schedule=emulate"), rounds=1, updates=1)
    with pytest.raises(UserError, match="take 1 of each or more"):
        compare(config, rounds=0, updates=1)


@pytest.mark.bench
def test_the_trainer_adds_no_more_than_three_percent():
    """The CPU default, two stages. It measures: run it on a machine that does nothing else."""
    result = compare(resolve(load(None, [])), rounds=25, updates=6)
    assert result["ratio"] >= 0.97, result
