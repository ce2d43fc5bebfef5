"""The engine over real NCCL gives the emulator's numbers, however its groups were made and its ranks laid out."""

import pytest
import torch

from slipstream.distributed import RankPool

pytestmark = [pytest.mark.gpu]
SECONDS = 60  # after which every rank prints where it is


def check(results, rel=1e-6, whole=True):
    expected = results[0]["emulated"]
    found = next(r for r in reversed(results) if r["losses"])
    if whole:  # a data rank sees its own rows only
        assert found["losses"] == pytest.approx(expected["losses"], rel=rel, abs=rel)
    assert found["evaluated"] == pytest.approx(expected["evaluated"], rel=rel, abs=rel)
    assert len(found["evaluated"]) == 16
    for result in results:
        for group, norm in expected["norms"].items():
            assert result["norms"][group] == pytest.approx(norm, rel=max(rel, 1e-5))
        for name, weight in result["weights"].items():
            reference = expected["weights"][name.replace("_orig_mod.", "")]
            assert torch.linalg.vector_norm(weight - reference) <= rel * torch.linalg.vector_norm(
                reference
            ), name


@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize(
    ("backend", "device_id"), [(None, False), ("nccl", False), ("nccl", True), ("both", True)]
)
def test_any_group_and_depth(nccl, stages, backend, device_id):
    backend = "cpu:gloo,cuda:nccl" if backend == "both" else backend
    check(nccl.run("nccl.jobs:train", ranks=stages, backend=backend, device_id=device_id, timeout=SECONDS))


@pytest.mark.parametrize("stages", [6, 8])
def test_many_stages(nccl, stages):
    check(nccl.run("nccl.jobs:train", ranks=stages, layers=8, timeout=SECONDS))


def test_more_in_flight(nccl):
    check(nccl.run("nccl.jobs:train", ranks=4, in_flight=8, cutover=8, timeout=SECONDS))


@pytest.mark.parametrize("cutover", [1, 2, 5, 8])
def test_any_cutover(nccl, cutover):
    check(nccl.run("nccl.jobs:train", ranks=4, cutover=cutover, timeout=SECONDS))


def test_muon(nccl):
    check(nccl.run("nccl.jobs:train", ranks=4, optimizer="muon", timeout=SECONDS), rel=1e-5)


def test_narrow_banks(nccl):
    check(nccl.run("nccl.jobs:train", ranks=4, bank_dtype=torch.bfloat16, timeout=SECONDS), rel=2e-2)


@pytest.mark.parametrize("mode", ["replicated", "zero1"])
def test_a_compact_master(nccl, mode):
    options = {"bank_dtype": torch.bfloat16, "cutover": 4, "compact_master": True, "mode": mode}
    results = nccl.run("nccl.jobs:train", ranks=4, stages=2, timeout=SECONDS, **options)
    check(results, rel=2e-2, whole=False)


def test_traced_stages(nccl):
    check(nccl.run("nccl.jobs:train", ranks=2, traced=True, tied=False, timeout=SECONDS))


@pytest.mark.parametrize("mode", ["replicated", "zero1", "fsdp"])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_two_stages_on_two_data_ranks_each(nccl, mode, optimizer):
    tied = mode != "fsdp"
    results = nccl.run(
        "nccl.jobs:train", ranks=4, stages=2, mode=mode, optimizer=optimizer, tied=tied, timeout=SECONDS
    )
    check(results, rel=1e-6 if optimizer == "adamw" else 1e-5, whole=False)


def test_schedules_made_and_closed_leave_nothing(nccl):
    for left in nccl.run("nccl.jobs:many", 100, ranks=2, timeout=4 * SECONDS):
        files, threads, native, reserved, *_ = left[2]
        assert left[-1][0] <= files
        assert left[-1][1] <= threads
        assert left[-1][2] <= native
        assert left[-1][3] <= reserved
        free = [row[4] for row in left if len(row) > 4]
        assert free[-1] >= free[1] - (64 << 20), free


def test_two_machines(surroundings):
    """Ranks 0 and 1 on one, 2 and 3 on the other: sockets between them, for NCCL and for our own wires."""
    with RankPool(4, {**surroundings, "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}) as pool:
        check(pool.run("nccl.jobs:train", ranks=4, machines=2, timeout=120))
