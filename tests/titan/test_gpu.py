"""torchtitan on 2BW over real NCCL: stock torchtitan without delay, the emulator with it.

Ranks have a GPU each, or share one (`tests/nccl/conftest.py` says which library allows that). Needs torch 2.14.
"""

import pytest

from nccl.conftest import library, surroundings
from titan.conftest import Runs, require

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(3600)]
__all__ = ["library", "surroundings"]  # fixtures
TOLERANCE = 1e-4  # float32 on a GPU, sums in another order
UNCLIPPED = {"training.max_norm": 100.0}


@pytest.fixture(scope="module")
def start(surroundings, tmp_path_factory):
    require((2, 14))
    runs = Runs(tmp_path_factory.mktemp("titan"))
    environment = {**surroundings, "TITAN_DEVICE": "cuda"}

    def started(ranks):
        launcher = ["-m", "torch.distributed.run", f"--nproc-per-node={ranks}", "--rdzv-backend=c10d"]
        runs.start([*launcher, "--rdzv-endpoint=localhost:0"], environment)
        return runs

    started(1)  # the seed
    return runs, started


def same(runs, name, other, steps=range(1, 21)):
    found, expected = runs.losses(name), runs.losses(other)
    assert {s: found[s] for s in steps} == pytest.approx({s: expected[s] for s in steps}, abs=TOLERANCE)


@pytest.mark.parametrize(("ranks", "layout"), [(2, {}), (4, {}), (4, {"fsdp": 2}), (4, {"tp": 2})])
def test_without_delay_it_is_stock_torchtitan(start, ranks, layout):
    runs, started = start
    stages = ranks // (2 if layout else 1)
    name = f"{stages} {layout}"
    runs.add(f"stock {name}", "stock", stages=stages, **layout)
    runs.add(f"flushed {name}", stages=stages, settings={"cutover": 0}, **layout)
    started(ranks)
    same(runs, f"flushed {name}", f"stock {name}")


@pytest.mark.parametrize("optimizer", [{}, {"optimizer": "muon", "lr": 0.002}])
def test_with_delay_it_is_the_emulator(start, optimizer):
    runs, started = start
    name, settings = str(optimizer), {"cutover": 3, **optimizer}
    runs.add(f"emulated {name}", "emulated", settings=settings, config=UNCLIPPED, data_ranks=2)
    started(1)
    runs.add(f"delayed {name}", stages=2, fsdp=2, settings=settings, config=UNCLIPPED)
    started(4)
    same(runs, f"delayed {name}", f"emulated {name}")


def test_no_step_waits_for_the_gpu(start):
    """A host that waits at a step has nothing queued behind it, which is a bubble; every step writes its line here."""
    runs, started = start
    runs.add("unwaiting", stages=4, settings={"cutover": 5}, config=UNCLIPPED, unwaiting=True)
    started(4)
    assert list(runs.losses("unwaiting")) == list(range(1, 21))


def test_a_resume_in_bfloat16_goes_on(start):
    runs, started = start
    narrow = {"training.mixed_precision_param": "bfloat16"}
    saved = {
        "checkpoint.load_only": False,
        "checkpoint.interval": 10,
        "checkpoint.last_save_model_only": False,
    }
    runs.add("narrow", stages=2, fsdp=2, config=narrow | saved)
    load = runs.checkpoint("narrow", 10)
    runs.add("narrow again", stages=2, fsdp=2, config=narrow, load=load)
    started(4)
    same(runs, "narrow again", "narrow", range(11, 21))
