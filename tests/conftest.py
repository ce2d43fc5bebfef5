"""What all tests share: one intra-op thread, since another count changes the bits, and one warm pool of ranks."""

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, here and in worker processes

import pytest


@pytest.fixture(scope="session")
def pool():
    """Four ranks for every test of this process: importing torch in fresh ones takes seconds. A lost one is replaced."""
    from slipstream.distributed import RankPool

    with RankPool(4) as ranks:
        yield ranks
