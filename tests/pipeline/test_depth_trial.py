"""Depths that are tried in mid-run, by ranks that train."""

import pytest
import torch

from pipeline import tiny
from slipstream import Emulator
from slipstream.pipeline.depth_trial import depths_to_try
from slipstream.schedule.asynchronous import warm_up_2bw


@pytest.mark.parametrize(
    ("stages", "cutover", "best", "recorded", "groups"),
    [(2, 8, 2, True, 64), (2, 3, 9, False, 36), (3, 8, 8, False, 52), (4, 5, 5, True, 64)],
)
def test_depths_are_tried_in_mid_run_and_no_bit_changes(pool, stages, cutover, best, recorded, groups):
    """Deeper ones fill the pipeline, the one that is taken in the end lands what it has no room for."""
    m = 8
    taken = {best: 0.5}
    ranks = pool.run(
        "pipeline.depth_jobs:tried", taken, groups, (20, 21, 40), recorded, m=m, cutover=cutover, ranks=stages
    )
    plain = Emulator(tiny.Model(tied=False), m, tiny.loss_fn, tiny.adamw, cutover=cutover)
    expected = [loss.item() for group in range(groups) for loss in plain.step(*tiny.batch(group))]
    assert ranks[-1][0] == expected
    master = dict(plain.master.named_parameters())
    assert {name for _, weights, *_ in ranks for name in weights} == set(master)
    for rank, (_, weights, had, most, slots) in enumerate(ranks):
        assert all(torch.equal(weight, master[name]) for name, weight in weights.items())
        tried = [warm_up_2bw(stages, m, k)[rank] + 1 for k in depths_to_try(stages, cutover, m + 1)]
        assert sorted(set(had)) == sorted(set(tried))
        assert had[-1] == warm_up_2bw(stages, m, best)[rank] + 1
        pairs = list(zip(most, had, strict=True))
        assert all(held <= depth for held, depth in pairs)
        assert all(held == depth for held, depth in pairs if depth <= cutover), "as many as it may"
        assert slots <= had[-1], "no memory is kept for deeper trials"
        assert not recorded or slots


def test_a_stage_that_drains_alone_tries_the_same_depths(pool):
    """`gathered_master` drains those that are compact. A trial that went by a stage's own drains came to another depth
    there, and all stages waited for each other."""
    ranks = pool.run(
        "pipeline.depth_jobs:tried", {5: 0.5}, 56, (30, 41), drained=(1,), m=8, cutover=4, ranks=3
    )
    for rank, (_, _, had, _, _) in enumerate(ranks):
        assert had == [warm_up_2bw(3, 8, depth)[rank] + 1 for depth in ranks[0][2]]
