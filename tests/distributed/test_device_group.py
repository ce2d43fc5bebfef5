"""The group for ranks that share a GPU, run here on CPU tensors: the same rings, in host memory."""

import pytest

from distributed.group_jobs import PLACEMENTS
from slipstream.errors import StageError


def test_sends_never_wait_and_receives_match_by_order(pool):
    for rank, (values, flags, early, late) in enumerate(
        pool.run("distributed.group_jobs:point_to_point", ranks=2)
    ):
        other = 1 - rank
        assert values == [10 * other + index for index in (0, 1, 3, 4, 5)]
        assert flags
        assert not early
        assert late


def test_collectives_give_every_rank_the_same_bits(pool):
    results = pool.run("distributed.group_jobs:collectives", ranks=3)
    total = results[0][0]
    assert total == pytest.approx([0.6, 3.0])
    for rank, (sums, largest, told, parts, summed, objects) in enumerate(results):
        assert sums == total
        assert (largest, told, parts) == (2, 7.0, [0.0, 1.0, 2.0])
        assert objects == ["rank 0", "rank 1", "rank 2"]
        assert summed == (3.0 if rank == 0 else 1.0)


def test_a_sum_adds_in_the_order_of_ranks_and_keeps_no_part(pool):
    first, root, *rest = pool.run("distributed.group_jobs:sums", ranks=4)
    assert root == (True, True, 6, 0)
    assert [first, *rest] == [(True, True, 3, 0)] * 3


def test_host_tensors_never_wait_for_the_interpreter(pool):
    """Torch calls the collectives of a group written in Python with the interpreter's lock held, and gloo's thread
    needs that lock to let go of an earlier tensor: whoever goes that way hangs after some dozens of calls."""
    assert pool.run("distributed.group_jobs:host_traffic", 150, ranks=3, timeout=200) == [150] * 3


def test_a_dead_peer_and_a_silent_one_end_a_receive(pool):
    with pytest.raises(StageError, match="SIGKILL"):
        pool.run("distributed.group_jobs:dead_peer", ranks=2, timeout=200)
    with pytest.raises(StageError, match=r"Rank 0 lost rank 1: nobody came within 0\.3 s"):
        pool.run("distributed.group_jobs:silent_peer", ranks=2, timeout=200)


@pytest.mark.parametrize("name", PLACEMENTS)
def test_torchs_schedules_train_as_they_do_on_gloo(pool, name):
    results = pool.run("distributed.group_jobs:torch_schedule", name, ranks=2, timeout=200)
    found = next(result for result in results if result["gloo"])
    assert len(found["rings"]) == 24
    assert found["rings"] == found["gloo"]


def test_no_stage_of_a_v_greets_its_own_rank(pool):
    """Which torch 2.11 does, and gloo has no connection for. Torch 2.15 greets nobody."""
    neighbours = [{1}, {0, 2}, {1}]
    assert pool.run("distributed.group_jobs:greeted", ranks=3) in (neighbours, [set(), set(), set()])


@pytest.mark.parametrize("stages", [2, 3])
def test_the_engine_gives_the_same_bits_on_the_rings(pool, stages):
    rings = pool.run("distributed.group_jobs:engine", ranks=stages, timeout=200)[-1]
    own = pool.run(
        "pipeline.jobs:train",
        range(12),
        correction="error_feedback",
        max_grad_norm=0.5,
        ranks=stages,
        timeout=200,
    )[-1]["losses"]
    assert rings == own


def test_the_engine_names_the_stage_that_died(pool):
    with pytest.raises(StageError, match=r"stage 1 \(rank 1\)"):
        pool.run("distributed.group_jobs:engine_loses_a_stage", ranks=3, timeout=200)
