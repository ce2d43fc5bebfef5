"""Several stages on one GPU: tensors through its memory, or staged through the host, match the emulator."""

import pytest
import torch

from distributed.group_jobs import PLACEMENTS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() != 1, reason="needs one CUDA device"),
]


@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("cutover", [4, 2])
def test_stages_that_share_a_gpu_match_the_emulator(pool, stages, cutover):
    results = pool.run("pipeline.jobs:on_gpu", cutover=cutover, ranks=stages)
    assert results[-1][0] == pytest.approx(results[0][1], rel=1e-6)
    if stages > 1:
        assert results[0][2] == "slipstream", "the ranks could not share the GPU's memory"


@pytest.mark.parametrize("stages", [1, 4])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_master_in_halves_gives_the_bits_of_a_plain_one(pool, stages, optimizer):
    results = pool.run("pipeline.jobs:halves", optimizer, ranks=stages)
    losses = results[-1]
    assert losses["halves"] == losses["plain"]
    if optimizer == "adamw" or stages == 1:
        assert losses["plain"] == results[0]["emulated"]
    else:  # stages stack fewer matrices, for which the vendor's library picks other products
        assert losses["plain"] == pytest.approx(results[0]["emulated"], rel=1e-3)


def test_where_torch_is_deterministic_four_stages_have_the_bits_of_one(pool):
    results = pool.run("pipeline.jobs:deterministic", "halves", "muon", ranks=4)
    assert results[-1]["plain"] == results[-1]["halves"] == results[0]["emulated"]


@pytest.mark.parametrize("backend", ["gloo", "slipstream_staged"])
def test_stages_staged_through_the_host_match_the_emulator(pool, backend):
    results = pool.run("pipeline.jobs:on_gpu", backend=backend, ranks=2)
    assert results[-1][0] == pytest.approx(results[0][1], rel=1e-6)


@pytest.mark.parametrize("name", PLACEMENTS)
def test_torchs_schedules_train_on_a_shared_gpu(pool, name):
    shared = pool.run("distributed.group_jobs:torch_schedule", name, device="cuda", backend="own", ranks=2)
    plain = pool.run("distributed.group_jobs:torch_schedule", name, ranks=2)
    found = next(result["rings"] for result in shared if result["rings"])
    assert found == pytest.approx(next(result["gloo"] for result in plain if result["gloo"]), rel=1e-4)


def test_a_stage_that_dies_on_a_shared_gpu_is_named(pool):
    with pytest.raises(Exception, match=r"stage 1 \(rank 1\)"):
        pool.run("pipeline.jobs:lose_on_gpu", ranks=3, timeout=60)
