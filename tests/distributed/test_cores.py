"""Ranks on processors: each keeps to cores of its own, also where the machine has a GPU."""

import os

import pytest

from slipstream.bench.probe import ranks_on
from slipstream.distributed import cores
from slipstream.distributed.cores import share, together


def where(world):
    import torch

    return torch.cuda.is_available(), os.environ["CUDA_VISIBLE_DEVICES"], os.sched_getaffinity(0)


def a_machine(folder, places):
    """What Linux tells of processors 0, 1, ...: the (socket, core) of each."""
    for number, (socket, core) in enumerate(places):
        topology = folder / f"cpu{number}" / "topology"
        topology.mkdir(parents=True)
        (topology / "physical_package_id").write_text(f"{socket}\n")
        (topology / "core_id").write_text(f"{core}\n")
    return folder


def test_ranks_for_processors_see_no_gpu_and_take_their_cores(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with ranks_on(2, device="cpu") as pool:
        found = pool.run("distributed.test_cores:where")
    assert [(gpu, hidden) for gpu, hidden, _ in found] == [(False, "")] * 2
    wanted = together(cores.allowed())
    assert [kept for _, _, kept in found] == [share(wanted, rank, 2) for rank in range(2)]


def test_a_training_on_the_cpu_starts_ranks_that_see_no_gpu(monkeypatch):
    from slipstream.config import load
    from slipstream.train import start

    class Started(Exception):
        pass

    def started(size, environment):
        raise Started(environment)

    monkeypatch.setattr(start, "RankPool", started)
    for device, expected in (("cpu", {"CUDA_VISIBLE_DEVICES": ""}), ("auto", {})):
        with pytest.raises(Started) as caught:
            start.start(load(None, [f"train.device={device}", "train.quiet=true", "run.dir=never"]))
        assert caught.value.args == (expected,)


def test_threads_of_a_core_stay_together_whatever_their_numbers(tmp_path):
    far = a_machine(tmp_path / "far", [(0, 0), (0, 1), (0, 2), (0, 3)] * 2)
    assert together(set(range(8)), far) == [[0, 4], [1, 5], [2, 6], [3, 7]]
    near = a_machine(tmp_path / "near", [(0, 0), (0, 0), (0, 1), (0, 1)])
    assert together(set(range(4)), near) == [[0, 1], [2, 3]]
    assert together({1, 2, 3}, near) == [[1], [2, 3]]


def test_sockets_do_not_mix(tmp_path):
    machine = a_machine(tmp_path, [(0, 0), (1, 0), (0, 1), (1, 1)])
    assert together(set(range(4)), machine) == [[0], [2], [1], [3]]
    assert [share(together(set(range(4)), machine), rank, 2) for rank in range(2)] == [{0, 2}, {1, 3}]


def test_where_the_system_tells_nothing_each_processor_is_a_core(tmp_path):
    assert together({5, 1, 3}, tmp_path) == [[1], [3], [5]]


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8])
def test_shares_of_the_cores_are_disjoint_and_cover_all(ranks):
    numbers = [0, 1, 2, 3, 4, 5, 6, 9]
    shares = [share([[number] for number in numbers], rank, ranks) for rank in range(ranks)]
    assert sorted(core for part in shares for core in part) == numbers
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_ranks_take_whole_cores_while_there_are_enough():
    pairs = [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert [share(pairs, rank, 3) for rank in range(3)] == [{0, 4}, {1, 5}, {2, 6, 3, 7}]
    assert [share(pairs, rank, 4) for rank in range(4)] == [{0, 4}, {1, 5}, {2, 6}, {3, 7}]
    assert [share(pairs, rank, 8) for rank in range(8)] == [{0}, {4}, {1}, {5}, {2}, {6}, {3}, {7}]


def test_more_ranks_than_processors_share_all_of_them():
    assert [share([[4], [7]], rank, 3) for rank in range(3)] == [{4, 7}] * 3
