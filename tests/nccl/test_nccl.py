"""The engine over real NCCL gives the emulator's numbers, however its groups were made and its ranks laid out."""

import pytest
import torch

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
    check(nccl.run("nccl.jobs:train", ranks=4, in_flight=8, timeout=SECONDS))


def test_muon(nccl):
    check(nccl.run("nccl.jobs:train", ranks=4, optimizer="muon", timeout=SECONDS), rel=2e-3)


def test_narrow_banks(nccl):
    check(nccl.run("nccl.jobs:train", ranks=4, bank_dtype=torch.bfloat16, timeout=SECONDS), rel=2e-2)


def test_traced_stages(nccl):
    check(nccl.run("nccl.jobs:train", ranks=2, traced=True, tied=False, timeout=SECONDS))


@pytest.mark.parametrize("mode", ["replicated", "zero1", "fsdp"])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_two_stages_on_two_data_ranks_each(nccl, mode, optimizer):
    tied = mode != "fsdp"
    results = nccl.run(
        "nccl.jobs:train", ranks=4, stages=2, mode=mode, optimizer=optimizer, tied=tied, timeout=SECONDS
    )
    check(results, rel=1e-6 if optimizer == "adamw" else 2e-3, whole=False)
