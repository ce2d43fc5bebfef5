"""One warm pool of ranks for all engine tests: importing torch in fresh processes takes seconds."""

import pytest

from slipstream.distributed import RankPool


@pytest.fixture(scope="session")
def pool():
    with RankPool(4) as ranks:
        yield ranks
