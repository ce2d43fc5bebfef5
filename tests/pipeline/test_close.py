"""What a schedule leaves in its process: nothing, whether it was used, or refused while it was made."""

import pytest
import torch


@pytest.mark.parametrize("fails", [False, True])
def test_schedules_made_one_after_another_leave_no_files_and_no_threads(pool, fails):
    for left in pool.run("pipeline.jobs:closed", 12, fails, ranks=2, timeout=240):
        assert max(left[1:]) <= left[0], left  # the first may load what the others find


def test_a_group_that_one_rank_alone_has_made_changes_nothing(pool):
    expected = pool.run("pipeline.jobs:train", range(3), ranks=2)
    found = pool.run("pipeline.jobs:beside_groups_of_ones_own", ranks=2, timeout=200)
    for one, other in zip(found, expected, strict=True):
        for name, weight in one.items():
            assert torch.equal(weight, other["weights"][name]), name
