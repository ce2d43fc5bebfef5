"""A rank that is lost over NCCL: within the timeout every other rank ends with a message that names stage and microbatch."""

import os
import random
import time

import pytest

from slipstream.distributed import RankPool
from slipstream.errors import StageError

pytestmark = [pytest.mark.gpu]
FAULTS = int(os.environ.get("SLIPSTREAM_TEST_FAULTS", "4"))
TIMEOUT_SECONDS = 8
KINDS = ("SIGKILL", "SIGSTOP", "forward", "backward")


@pytest.mark.parametrize("seed", range(FAULTS))
def test_a_lost_rank_stops_the_others(surroundings, seed):
    random.seed(seed)
    how, stage, group = KINDS[seed % 4], random.randrange(3), random.randrange(1, 6)
    with RankPool(3, surroundings) as pool:
        pool.run("nccl.jobs:warm", ranks=3, timeout=60)
        started = time.monotonic()
        with pytest.raises(StageError) as caught:
            pool.run("nccl.jobs:lose", how, stage, group, seed, ranks=3, timeout=60)
        seconds = time.monotonic() - started
        words = str(caught.value)
        assert seconds < 3 * TIMEOUT_SECONDS + 15, words
        if how in ("SIGKILL", "SIGSTOP"):
            assert "gave no answer" not in words
            assert f"(rank {stage})" in words or f"Rank {stage}" in words, words
        else:
            assert ("this forward raises" if how == "forward" else "out of memory") in words, words
        again = pool.run("nccl.jobs:warm", ranks=3, timeout=60)
        assert len(again) == 3, "the device is free again"
