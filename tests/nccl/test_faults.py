"""A rank that is lost over NCCL: within the timeout every other rank ends with a message that names it."""

import os
import random
import time

import pytest

from slipstream.distributed import RankPool
from slipstream.errors import StageError

pytestmark = [pytest.mark.gpu]
SEEDS = range(*map(int, os.environ.get("SLIPSTREAM_TEST_FAULTS", "0:4").split(":")))
TIMEOUT_SECONDS = 15
KINDS = ("SIGKILL", "SIGSTOP", "forward", "backward")


@pytest.fixture(scope="module")
def ranks(library):
    with RankPool(3, library) as pool:
        yield pool


@pytest.mark.parametrize("seed", SEEDS)
def test_a_lost_rank_stops_the_others(ranks, seed):
    random.seed(seed)
    how, stage, group = KINDS[seed % 4], random.randrange(3), random.randrange(1, 6)
    started = time.monotonic()
    with pytest.raises(StageError) as caught:
        ranks.run("nccl.jobs:lose", how, stage, group, seed, TIMEOUT_SECONDS, timeout=75)
    seconds = time.monotonic() - started
    words = str(caught.value)
    print(f"{how} of stage {stage} at group {group}, after {seconds:.1f} s: {words}")
    assert seconds < 2 * TIMEOUT_SECONDS + 30, words  # starting the ranks included
    assert "No answer within" not in words, words
    if how in ("SIGKILL", "SIGSTOP"):
        assert f"(rank {stage})" in words or f"Rank {stage}" in words, words
    else:
        assert ("this forward raises" if how == "forward" else "out of memory") in words, words


def test_the_device_is_free_afterwards(ranks):
    before, *_ = ranks.run("nccl.jobs:warm", timeout=60)
    with pytest.raises(StageError):
        ranks.run("nccl.jobs:lose", "SIGKILL", 1, 2, timeout=75)
    after, *_ = ranks.run("nccl.jobs:warm", timeout=60)
    assert after >= before - (256 << 20)
