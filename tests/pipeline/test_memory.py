"""The bytes that a stage holds for each parameter at its worst moment are those the planner counts."""

from dataclasses import asdict

import pytest

from pipeline.memory_jobs import LAYERS
from slipstream.pipeline import compact, gradients
from slipstream.plan import memory

EF = {"asynchronous": True, "optimizer": "sgd", "correction": "error_feedback"}
BUCKET = 12 / LAYERS  # a layer is whole before and after its step, and once more as integers
SLACK = 0.15  # activations, and the numbers of an update


def planned(**settings):
    found = asdict(memory.weights_memory(1, 0, **EF, **settings))
    return sum(value for part, value in found.items() if part != "transient")


def within(found, least, most):
    """How long gradients wait is up to the clock: at best no group's do when the next one's come."""
    assert all(least - SLACK < each < most + SLACK for each in found), found


def trained(results):
    return [while_training for while_training, _ in results]


@pytest.fixture(scope="module")
def compact_run(pool):
    return pool.run("pipeline.memory_jobs:peak", 4, 8, ranks=4, compact_master=True)


def test_of_each_stage(compact_run):
    found = trained(compact_run)
    assert (planned(fresh=True, waiting=False), planned(fresh=True)) == (16, 18)
    within(found, planned(fresh=True, waiting=False) + BUCKET, planned(fresh=True) + BUCKET)


def test_of_an_evaluation(compact_run):
    """A compact master is made whole in the memory of its halves: two banks 4, the master 4, momentum 4."""
    found = [evaluated for _, evaluated in compact_run]
    assert all(each < 12 + BUCKET + SLACK for each in found), found


def test_of_a_sharded_optimizer(pool):
    found = trained(pool.run("pipeline.memory_jobs:peak", 2, 8, ranks=4, sharded=True, compact_master=True))
    least, most = (planned(fresh=True, shards=2, waiting=waiting) + BUCKET for waiting in (False, True))
    assert (least, most) == (14, 15)
    within(found, least, most)


def test_a_plain_master_takes_two_bytes_more_and_a_copy_of_itself_in_the_step(pool):
    found = trained(pool.run("pipeline.memory_jobs:peak", 4, 8, ranks=4))
    within(found, planned(fresh=True, waiting=False) + 4, planned() + 4)
    old = trained(pool.run("pipeline.memory_jobs:peak", 4, 8, ranks=4, cutover=8))
    within(old, planned(waiting=False) + 4, planned() + 4)


def test_the_planner_knows_the_sizes_of_the_engine():
    assert (memory.BUCKET_ELEMENTS, memory.MOST_BUCKETS) == (compact.BUCKET_ELEMENTS, compact.MOST_BUCKETS)
    assert gradients.AT_ONCE_BYTES == memory.AT_ONCE_BYTES


def test_the_gradient_of_a_tied_weight_travels_itself(pool):
    """A copy would be there for as long as the last stage waits for the first one's."""
    first, last = pool.run("pipeline.jobs:tied_gradients", ranks=2)
    assert len(first) == len(last) == 3
    assert all(first)
    assert all(last)
