"""The bytes that a stage holds for each parameter at its worst moment are those the planner counts."""

import pytest

from pipeline.memory_jobs import LAYERS
from slipstream.pipeline import compact, gradients
from slipstream.plan import memory

EF = {"asynchronous": True, "optimizer": "sgd", "correction": "error_feedback"}
BUCKET = 12 / LAYERS  # a layer is whole before and after its step, and once more as integers
SLACK = 0.15  # activations, and the numbers of an update


def planned(**settings):
    found = memory.bytes_per_parameter(**EF, **settings)
    return sum(value for part, value in found.items() if part != "transient")


def test_of_each_stage(pool):
    """The first one is the last to end a group: its gradients need not wait, if the others answer in time."""
    found = pool.run("pipeline.memory_jobs:peak", 4, 8, ranks=4, compact_master=True)
    assert found[1:] == pytest.approx([planned(fresh=True) + BUCKET] * 3, abs=SLACK)
    at_best = planned(fresh=True, waiting=False) + BUCKET
    assert at_best - SLACK < found[0] < planned(fresh=True) + BUCKET + SLACK


def test_of_a_sharded_optimizer(pool):
    found = pool.run("pipeline.memory_jobs:peak", 2, 8, ranks=4, sharded=True, compact_master=True)
    assert found == pytest.approx([planned(fresh=True, shards=2) + BUCKET] * 4, abs=SLACK)


def test_a_plain_master_takes_two_bytes_more_and_a_copy(pool):
    found = pool.run("pipeline.memory_jobs:peak", 4, 8, ranks=4)
    assert max(found) == pytest.approx(24, abs=SLACK)
    old = pool.run("pipeline.memory_jobs:peak", 4, 8, ranks=4, cutover=8)
    assert max(old) == pytest.approx(planned() + 4, abs=SLACK), "z_g during the step"


def test_the_planner_knows_the_sizes_of_the_engine():
    assert (memory.BUCKET_ELEMENTS, memory.MOST_BUCKETS) == (compact.BUCKET_ELEMENTS, compact.MOST_BUCKETS)
    assert gradients.AT_ONCE_BYTES == memory.AT_ONCE_BYTES
