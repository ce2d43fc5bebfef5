"""What all tests share: one intra-op thread, since another count changes the bits, and one warm pool of ranks."""

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, here and in worker processes
os.environ["MIMALLOC_PURGE_DELAY"] = (
    "0"  # torch's allocator on Arm gives back what is freed, so that memory can be seen
)

import contextlib
import gc
import shutil
import subprocess
import sys
import tempfile
from importlib import import_module
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")
gc.disable()  # until all is imported, which is never garbage


# Begun first where several processes share the tests: one that is begun last is waited for by one core alone.
LONGEST = (
    "pipeline/test_cutover_engine.py", "train/test_trainer.py", "train/test_health.py",
    "train/test_torch_schedules.py", "pipeline/test_runtime.py", "pipeline/test_placement.py",
    "train/test_fine_start.py", "train/test_stalled.py", "pipeline/test_compact.py", "study/test_run.py",
    "plan/test_planner.py", "train/test_signals.py", "distributed/test_launch.py", "pipeline/test_waits.py",
    "train/test_data_ranks.py", "pipeline/test_emulator.py", "train/test_hugging_face.py",
    "pipeline/test_cutover.py", "train/test_elastic.py", "train/test_compile.py",
    "bench/test_bench_command.py", "pipeline/test_mesh.py", "pipeline/test_depth_trial.py", "test_readme.py",
    "pipeline/test_graphs.py", "plan/test_plan_cli.py", "bench/test_race.py", "bench/test_stage_speed.py",
    "train/test_numbers_only.py", "pipeline/test_dcp.py", "test_tutorial.py", "train/test_remote.py",
    "distributed/test_device_group.py", "pipeline/test_models.py", "train/test_own.py",
    "bench/test_rivals.py", "schedule/test_closed_forms.py", "test_cli.py", "bench/test_language.py",
    "pipeline/test_stage_graphs.py", "fuzz/test_fuzz.py", "train/test_preflight.py",
    "pipeline/test_memory.py", "train/test_recorded.py", "bench/test_train.py", "optim/test_noisy_matrix.py",
)  # fmt: skip


def pytest_collection_modifyitems(config, items):
    if hasattr(config, "workerinput"):  # `--no-loadscope-reorder` keeps this order
        root = Path(__file__).parent
        places = {root / name: place for place, name in enumerate(LONGEST)}
        items.sort(key=lambda item: places.get(item.path, len(places)))


def pytest_collection_finish():
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True, scope="module")
def nothing_old_is_garbage():
    """What the files before have imported and computed, some hundred thousand objects, is looked through no more."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def same_products():
    """Where a CPU has no bfloat16, torch gives oneDNN up at the first such product, and float32 ones round differently
    from then on: not in the next test."""
    yield
    if torch := sys.modules.get("torch"):
        torch.backends.mkldnn.set_flags(True)


GPU = Path("/dev/nvidia0").exists()


def pytest_configure(config):
    """Several processes of pytest share one server of warm processes, which the first of them starts."""
    if config.getoption("numprocesses", None) and not hasattr(config, "workerinput") and not GPU:
        import warm

        folder = tempfile.mkdtemp(prefix="warm-")
        config.add_cleanup(lambda: shutil.rmtree(folder))
        config.add_cleanup(warm.close)
        warm.use(folder)
        os.environ["WARM_PLACE"] = warm.path()
        rewrite_once(config)
        config.option.tx = [f"popen//python={sys.executable} {warm.__file__}" for _ in config.option.tx]


def rewrite_once(config):
    """Test files with their assertions rewritten, as bytecode, which each process of pytest would make again. It has
    no public name for that: where its own are others, each does."""
    if sys.dont_write_bytecode:
        return
    with contextlib.suppress(ImportError, AttributeError, TypeError):
        from _pytest.assertion import rewrite

        state = config.stash[rewrite.assertstate_key]
        for path in Path(__file__).parent.rglob("test_*.py"):
            kept = rewrite.get_cache_dir(path) / (path.stem + rewrite.PYC_TAIL)
            if rewrite._read_pyc(path, kept) is None and rewrite.try_makedirs(kept.parent):
                seen, code = rewrite._rewrite_test(path, config)
                rewrite._write_pyc(state, code, seen, kept)


@pytest.fixture(scope="session", autouse=True)
def warm_starts(tmp_path_factory):
    """Processes of ours are forked from one that has imported everything, which CUDA would not survive."""
    import warm

    if GPU:
        yield
        return
    warm.use(os.environ.get("WARM_PLACE") or tmp_path_factory.mktemp("s"))
    yield
    warm.close()


@pytest.fixture
def cold(monkeypatch):
    """Processes start as a user's do, in a fresh interpreter."""
    import warm

    for name in warm.STARTERS:
        if name in sys.modules:
            monkeypatch.setattr(sys.modules[name], "subprocess", subprocess)


@pytest.fixture
def quick(monkeypatch):
    """The ranks that wait for the one that failed are not given ten seconds to say so."""
    monkeypatch.setattr(import_module("slipstream.distributed.answers"), "GRACE_SECONDS", 1.0)


@pytest.fixture(scope="session")
def made(tmp_path_factory) -> Path:
    """A finished run with its data, to be copied and damaged."""
    from fuzz.valid import make_run

    folder = tmp_path_factory.mktemp("made")
    make_run(folder)
    return folder


@pytest.fixture(scope="session")
def four_ranks(warm_starts):
    """The four ranks of this process. One that is lost is replaced."""
    from slipstream.distributed import RankPool

    with RankPool(4) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def pool(four_ranks):
    """Four ranks for every test of this process; new ones where a file has left theirs with many threads. DTensor keeps
    the groups of its meshes, and each has a thread that wakes a hundred times a second until the process ends."""
    yield four_ranks
    if any(_threads(worker.pid) > 30 for worker in four_ranks._workers.values()):
        four_ranks.close()  # others are started for the next job


def _threads(pid):
    try:
        return len(os.listdir(f"/proc/{pid}/task"))
    except OSError:  # it is gone, or there is no /proc
        return 0
