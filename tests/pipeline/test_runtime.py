"""The engine on real processes: bit-identical at P = 1, 2, 3, 4 and in the emulator."""

import pytest
import torch
from pipeline import tiny
from pipeline.jobs import M

from slipstream import Emulator, merge_states

GROUPS = range(30)


def join(results):
    """What a job's ranks saw, as one run."""
    merged = {}
    for result in results:
        merged.update(result["weights"])
    return (
        results[-1]["losses"],
        merged,
        results[-1]["evaluated"],
        merge_states([r["state"] for r in results]),
    )


def emulate(optimizer="adamw", tied=True, decay=False, **options):
    emulator = Emulator(tiny.Model(tied=tied), M, tiny.loss_fn, tiny.OPTIMIZERS[optimizer], **options)
    scheduler = (
        torch.optim.lr_scheduler.LambdaLR(emulator.optimizer, lambda g: 1 / (1 + 0.1 * g)) if decay else None
    )
    losses = []
    for g in GROUPS:
        losses += [loss.item() for loss in emulator.step(*tiny.batch(g))]
        if scheduler is not None:
            scheduler.step()
    return losses, {n: p.detach() for n, p in emulator.master.named_parameters()}


def assert_same(found, expected):
    assert found[0] == expected[0]
    assert found[1].keys() == expected[1].keys()
    for name, weight in expected[1].items():
        assert torch.equal(found[1][name], weight), name


@pytest.mark.parametrize("optimizer", ["adamw", "momentum"])
@pytest.mark.parametrize("correction", ["none", "error_feedback"])
@pytest.mark.parametrize("clip", [None, 0.1])
def test_every_depth_is_bit_identical(pool, optimizer, correction, clip):
    options = {"optimizer": optimizer, "correction": correction, "max_grad_norm": clip, "decay": True}
    expected = emulate(**options)
    for stages in (1, 2, 3, 4):
        found = join(pool.run("pipeline.jobs:train", GROUPS, **options, ranks=stages))
        assert_same(found, expected)
