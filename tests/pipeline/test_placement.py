"""Parameters laid out by torch in any way: the numbers of one process, or a refusal by name."""

from functools import cache

import pytest
import torch

from pipeline import tiny
from pipeline.citizen_jobs import M, optimizer
from slipstream import Emulator
from slipstream.distributed import RankPool

ROWS = 16


@cache
def alone(name="adamw", groups=4, dtype=torch.float32, evaluations=(), cutover=None, layers=tiny.LAYERS):
    """What one process makes of the same groups."""
    emulator = Emulator(
        tiny.Model(dtype=dtype, layers=layers),
        M,
        tiny.loss_fn,
        lambda m: optimizer(name, m),
        max_grad_norm=0.3,
        cutover=cutover,
    )
    losses, evaluated = [], []
    for group in range(groups):
        losses += [loss.item() for loss in emulator.step(*tiny.batch(group, rows=ROWS))]
        if group in evaluations:
            evaluated.append([loss.item() for loss in emulator.eval(*tiny.batch(999))])
    weights = {n: p.detach().clone() for n, p in emulator.master.named_parameters()}
    return {"losses": losses, "weights": weights, "norms": dict(emulator.grad_norms), "evaluated": evaluated}


def assert_close(results, expected, bound=1e-6):
    """Every rank's weights, the norms on every rank, and the mean of the losses over the ranks that have them."""
    for result in results:
        assert result["norms"] == pytest.approx(expected["norms"], rel=bound)
        for name, weight in result["weights"].items():
            error = (weight - expected["weights"][name]).norm() / expected["weights"][name].norm()
            assert error < bound, (name, error)
    with_losses = [result["losses"] for result in results if result["losses"]]
    means = [sum(several) / len(several) for several in zip(*with_losses, strict=True)]
    assert means == pytest.approx(expected["losses"], rel=bound)


# Muon's exchanges see every layout. AdamW, which takes each element by itself, sees the plain ones; the composed ones
# it sees in `test_thirty_updates_on_two_stages`, and within Muon, whose embedding and norms it updates.
PLAIN = [("fsdp", 2), ("tp", 2), ("sequence", 2), ("layers", 2), ("dp", 2)]
COMPOSED = [("hsdp", 1), ("replicated fsdp", 1), ("tp x dp", 1), ("fsdp x tp", 1), ("fsdp x sequence", 1)]


@pytest.mark.parametrize(
    ("name", "layout", "stages"),
    [*(("adamw", *case) for case in PLAIN), *(("muon", *case) for case in PLAIN + COMPOSED)],
)
def test_a_layout_of_torch_gives_the_numbers_of_one_process(pool, name, layout, stages):
    layers = stages * (2 if "fsdp" in layout else 1)  # two in a stage, between which FSDP2 fetches ahead
    results = pool.run("pipeline.citizen_jobs:train", layout, stages, name, ranks=4, layers=layers)
    assert_close(results, alone(name, layers=layers))


@pytest.mark.parametrize(
    ("layout", "cutover"), [("fsdp", 1), ("fsdp", 3), ("kept", 3), ("tp", 3), ("layers", 1)]
)
def test_groups_with_an_old_and_a_fresh_part(pool, layout, cutover):
    """Two replicas of one group: each gathers its weights once, and their gradients are one sum."""
    results = pool.run("pipeline.citizen_jobs:train", layout, 2, "adamw", cutover=cutover, ranks=4)
    assert_close(results, alone("adamw", cutover=cutover))


@pytest.mark.parametrize("layout", ["fsdp", "root", "kept", "layers"])
def test_evaluations_see_the_newest_weights(pool, layout):
    """A master that FSDP2 left whole after its first evaluation was evaluated again and again."""
    results = pool.run("pipeline.citizen_jobs:train", layout, 2, evaluations=(0, 1, 3), ranks=4)
    expected = alone(evaluations=(0, 1, 3))
    assert len({tuple(found) for found in expected["evaluated"]}) == 3
    for result in results:
        for found, right in zip(result["evaluated"], expected["evaluated"], strict=True):
            assert not found or found == pytest.approx(right, rel=1e-6)
    assert_close(results, expected)


def test_weights_are_gathered_once_per_update(pool):
    """Four layers and eight microbatches made 32 all-gathers per update; torch's 1F1B makes 4."""
    for counts, _ in pool.run("pipeline.citizen_jobs:gathers", ranks=2):
        assert counts[2:] == [4] * (len(counts) - 2)


def test_weights_are_gathered_once_for_each_part_of_a_group(pool):
    """The old part reads a bank and the fresh one the newest weights: four layers of each."""
    for counts, _ in pool.run("pipeline.citizen_jobs:gathers", cutover=2, ranks=2):
        assert counts[2:] == [8] * (len(counts) - 2)


@pytest.fixture(scope="module")
def eight():
    with RankPool(8) as ranks:
        yield ranks


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "ranks"),
    [
        ("tp", 4),
        ("hsdp", 8),
        ("fsdp x tp", 8),
        ("tp x dp", 8),
        ("replicated fsdp", 8),
        ("fsdp x sequence", 8),
    ],
)
@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_thirty_updates_on_two_stages(eight, layout, ranks, name):
    """In double precision, where thirty updates do not add up what is lost in rounding."""
    results = eight.run(
        "pipeline.citizen_jobs:train", layout, 2, name, 30, dtype=torch.float64, ranks=ranks, timeout=600
    )
    assert_close(results, alone(name, 30, torch.float64))


@pytest.mark.parametrize("ready", [False, True])
def test_stages_that_have_no_values_before_they_are_sharded(pool, ready):
    """No rank ever holds the whole stage, let alone three of them."""
    emulator = Emulator(tiny.Model(tied=False), M, tiny.loss_fn, tiny.adamw, max_grad_norm=0.3)
    for group in range(5):
        emulator.step(*tiny.batch(group, rows=ROWS))
    for found in pool.run("pipeline.citizen_jobs:from_meta", ready, ranks=2):
        for name, weight in emulator.master.named_parameters():
            assert (found[name] - weight).norm() / weight.norm() < 1e-6, name


def test_a_loss_over_global_tokens_is_summed_over_microbatches_and_data_ranks(pool):
    """Some weights are FSDP2's, the others are the engine's to reduce."""
    share = 1 / (M * 2)
    results = pool.run(
        "pipeline.citizen_jobs:train",
        "layers",
        2,
        ranks=4,
        weight=share,
        scale_grads=False,
        data_reduction="sum",
    )
    for result in results:
        result["losses"] = [loss / share for loss in result["losses"]]
    assert_close(results, alone())
