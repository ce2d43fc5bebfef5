"""Every contender trains: torch's schedules agree with plain training, and a failure is a result."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from slipstream.bench.contenders import RIVALS
from slipstream.bench.measure import measure
from slipstream.bench.work import Work, build_optimizer, loss_fn
from slipstream.distributed import RankPool

SMALL = Work(stages=2, microbatches=4, max_grad_norm=0.1, dim=16, tokens=4)


def plain_losses(work: Work, updates: int) -> list[float]:
    """The losses of the last of `updates` updates of the unsplit model."""
    model = nn.Sequential(*(work.module(part, work.stages) for part in range(work.stages)))
    optimizer = build_optimizer(model)
    losses: list[torch.Tensor] = []
    for _ in range(updates):
        values, targets = (batch.chunk(work.microbatches) for batch in (work.inputs(), work.targets()))
        losses = [loss_fn(model(value), target) for value, target in zip(values, targets, strict=True)]
        torch.stack(losses).mean().backward()
        assert work.max_grad_norm is not None
        assert nn.utils.clip_grad_norm_(model.parameters(), work.max_grad_norm) > work.max_grad_norm
        optimizer.step()
        optimizer.zero_grad()
    return [float(loss.detach()) for loss in losses]


@pytest.mark.parametrize("name", RIVALS)
def test_a_rival_trains_like_the_unsplit_model(pool: RankPool, name: str) -> None:
    ranks = pool.run("slipstream.bench.sample:take_sample", name, SMALL, 3, 2, ranks=2, timeout=200)
    losses = next(list(rank.losses) for rank in ranks if rank.losses)
    assert losses == pytest.approx(plain_losses(SMALL, updates=3), rel=1e-6)
    assert all(len(rank.ends) == 2 for rank in ranks)


@pytest.mark.parametrize("name", ["bound", "slipstream", "torch_gpipe"])
def test_the_memory_of_a_sample_is_seen(pool: RankPool, name: str) -> None:
    """Weights and optimizer of one stage alone: 12 D^2 numbers a block, three times, in float32."""
    wide = replace(SMALL, dim=256)
    ranks = pool.run("slipstream.bench.sample:take_sample", name, wide, 1, 2, ranks=2, timeout=200)
    least = 3 * 4 * wide.blocks_per_stage * 12 * wide.dim**2
    assert all(rank.peak_memory_bytes > least for rank in ranks)


def test_a_rival_that_needs_more_microbatches_is_left_out(pool: RankPool) -> None:
    too_few = replace(SMALL, microbatches=2)  # DualPipeV asks for 2P
    names = ["bound", "torch_dualpipev", "torch_1f1b"]
    result = measure(pool, too_few, names, rounds=2, updates=4, timeout_seconds=200)
    reason = "it needs 4 microbatches or more at 2 stages"
    assert result.errors["torch_dualpipev"] == f"not applicable: {reason}"
    assert {name: len(samples) for name, samples in result.samples.items()} == {"bound": 2, "torch_1f1b": 2}
