"""The engine's state through torch's distributed checkpoint: exact, into another layout and number of stages."""

from functools import cache

import pytest
import torch

from pipeline import tiny
from pipeline.citizen_jobs import M
from pipeline.test_placement import ROWS, alone
from slipstream import Emulator

LAYERS = 2  # the only stage of some layouts has both, each of the two stages of others one
LAYOUTS = {"fsdp": (2, 4), "fsdp 4": (1, 4), "tp": (2, 4), "fsdp x tp": (1, 4), "dp": (2, 4), "zero1": (2, 4)}


@pytest.fixture(scope="module")
def saved(pool, tmp_path_factory):
    """Folder and state of an engine after three groups, which several layouts go on from; once each."""

    @cache
    def save(layout, name):
        folder = tmp_path_factory.mktemp("saved")
        state = {}
        for rank in run(pool, "save", layout, folder, name):
            state |= rank
        return folder, state

    return save


def run(pool, job, layout, folder, name, **options):
    stages, ranks = LAYOUTS[layout]
    options["layers"] = LAYERS
    if layout == "zero1":
        layout, options = "dp", options | {"shard_optimizer": True}
    return pool.run(f"pipeline.citizen_jobs:{job}", layout, stages, str(folder), name, ranks=ranks, **options)


@pytest.mark.parametrize(
    ("before", "after", "name"),
    [
        ("fsdp", "fsdp 4", "adamw"),
        ("fsdp", "fsdp 4", "muon"),
        ("fsdp 4", "fsdp", "adamw"),
        ("fsdp x tp", "tp", "adamw"),
        ("zero1", "fsdp", "adamw"),
        ("fsdp", "zero1", "adamw"),
    ],
)
def test_a_saved_engine_goes_on_in_another_layout(pool, saved, before, after, name):
    """Every tensor comes back with its bits: 17 of 26 did not, when a shard was taken for a replica."""
    folder, state = saved(before, name)
    results = run(pool, "resume", after, folder, name)
    found = {key: value for rank in results for key, value in rank["loaded"].items()}
    assert found.keys() == state.keys()
    for key, value in state.items():
        same = torch.equal(found[key], value) if isinstance(value, torch.Tensor) else found[key] == value
        assert same, key
    assert sum(isinstance(value, torch.Tensor) for value in state.values()) > 30
    assert_goes_on(results, alone(name, 6, layers=LAYERS))


def assert_goes_on(results, expected):
    """As one process that was never stopped."""
    for result in results:
        for key, weight in result["weights"].items():
            error = (weight - expected["weights"][key]).norm() / expected["weights"][key].norm()
            assert error < 1e-6, (key, error)
        assert result["norms"] == pytest.approx({g: expected["norms"][g] for g in range(3, 6)}, rel=1e-6)


def test_a_state_saved_after_a_flush_loads_into_a_fresh_engine_that_does_not_flush(pool, tmp_path):
    """A bank that was not published yet is saved with a mark, and read as the master."""
    run(pool, "save", "fsdp", tmp_path, "adamw", synchronous=100)
    results = run(pool, "resume", "fsdp", tmp_path, "adamw", synchronous=3)
    one, other = (
        Emulator(tiny.Model(layers=LAYERS), M, tiny.loss_fn, tiny.adamw, max_grad_norm=0.3, synchronous=n)
        for n in (100, 3)
    )
    for group in range(3):
        one.step(*tiny.batch(group, rows=ROWS))
    other.load_state_dict(one.state_dict())
    for group in range(3, 6):
        other.step(*tiny.batch(group, rows=ROWS))
    weights = {name: p.detach() for name, p in other.master.named_parameters()}
    assert_goes_on(results, {"weights": weights, "norms": other.grad_norms})
    for result in results:
        assert result["loaded"]["published.current"] is True
