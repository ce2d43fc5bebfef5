"""The bound does the work it stands for: on one stage it is 2BW itself."""

from __future__ import annotations

import pytest
import torch

from slipstream import Emulator
from slipstream.bench.contenders import BoundRun
from slipstream.bench.work import Work, build_optimizer, loss_fn


@pytest.mark.parametrize("clip", [None, 0.1])
def test_the_last_stage_trains_like_the_emulator(clip: float | None) -> None:
    work = Work(stages=2, microbatches=2, dim=16, tokens=4, max_grad_norm=clip)
    run = BoundRun(work, rank=1)
    emulator = Emulator(
        work.module(1, 2), work.microbatches, loss_fn, build_optimizer, "none", max_grad_norm=clip
    )
    for _ in range(5):
        run.step()
        losses = emulator.step(work.inputs(), work.targets())
        assert [float(loss) for loss in run.losses] == pytest.approx([float(loss) for loss in losses])
    for ours, theirs in zip(run.master.parameters(), emulator.master.parameters(), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-7)


def test_an_earlier_stage_keeps_what_the_pipeline_keeps_in_flight() -> None:
    work = Work(stages=3, microbatches=4, dim=16, tokens=4)
    run = BoundRun(work, rank=0)
    run.step()
    assert (len(run.flight), len(run.ends)) == (2, 0)
    run.step()
    assert (len(run.flight), len(run.ends)) == (2, 1)
    run.drain()
    assert (len(run.flight), len(run.ends)) == (0, 2)
