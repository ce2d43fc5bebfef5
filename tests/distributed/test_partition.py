"""The service that cuts a GPU: started and ended with the ranks, and a clear word where it cannot be had."""

import os

import pytest

from slipstream.distributed import RankPool, partitioned
from slipstream.errors import UserError


def stand_in(folder, body):
    """A `nvidia-cuda-mps-control` that notes how it was called."""
    path = folder / "nvidia-cuda-mps-control"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)


def test_the_service_runs_around_the_ranks_and_each_has_its_share(tmp_path, monkeypatch):
    notes = tmp_path / "notes"
    stand_in(tmp_path, f'echo "$@" in $CUDA_MPS_PIPE_DIRECTORY $(cat) >> {notes}')
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with partitioned(4) as service:
        pipe = service.environment["CUDA_MPS_PIPE_DIRECTORY"]
        with RankPool(1, service.environment) as pool:
            seen = pool.run("distributed.jobs:variable", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE")
        assert seen == ["25"]
        assert notes.read_text() == f"-d in {pipe}\n"
    assert notes.read_text().splitlines()[1].split() == ["in", pipe, "quit"]
    assert not os.path.exists(pipe)


def test_a_service_that_cannot_be_had_is_told(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="not on PATH"), partitioned(4):
        pass
    stand_in(tmp_path, "echo no GPU here; exit 3")
    with pytest.raises(UserError, match="failed with code 3: no GPU here"), partitioned(4):
        pass
