"""Ranks over real NCCL: a GPU for each, or one GPU for all of them with a library that allows it.

NCCL refuses two ranks on one GPU up to 2.29. From 2.30 on `NCCL_MULTI_RANK_GPU_ENABLE=1` allows it: set
SLIPSTREAM_TEST_NCCL to such a library (`libnccl.so.2` of the nvidia-nccl-cu13 wheel), and these tests run on one GPU.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from slipstream.distributed import RankPool
from slipstream.distributed.partition import partitioned

MOST_RANKS = 8
LIBRARY = os.environ.get("SLIPSTREAM_TEST_NCCL")


def lacking() -> str | None:
    """Why these tests cannot run here."""
    if not torch.cuda.is_available():
        return "needs a CUDA device"
    if torch.cuda.device_count() < MOST_RANKS and LIBRARY is None:
        return (
            f"needs {MOST_RANKS} GPUs, or an NCCL that lets ranks share one: pip download nvidia-nccl-cu13 (2.30 or "
            "later), unpack it, and set SLIPSTREAM_TEST_NCCL to its libnccl.so.2"
        )
    return None


@pytest.fixture(scope="session")
def library() -> dict[str, str]:
    """What ranks are started with."""
    if reason := lacking():
        pytest.skip(reason)
    if torch.cuda.device_count() >= MOST_RANKS:
        return {}
    assert LIBRARY is not None
    return {"LD_PRELOAD": LIBRARY, "NCCL_MULTI_RANK_GPU_ENABLE": "1"}


@pytest.fixture(scope="session")
def surroundings(library: dict[str, str]) -> Iterator[dict[str, str]]:
    """The same, at work at the same time where they share a GPU. A client that is killed takes the service with it."""
    if not library:
        yield library
        return
    with partitioned(1) as service:
        yield {**service.environment, **library}


@pytest.fixture(scope="session")
def nccl(surroundings: dict[str, str]) -> Iterator[RankPool]:
    with RankPool(MOST_RANKS, surroundings) as pool:
        yield pool
