"""Predicted memory against the allocator's peak, on a real GPU."""

from __future__ import annotations

import pytest
import torch

from slipstream.models.cut import Layers
from slipstream.models.sizes import preset
from slipstream.plan.candidates import Fitter
from slipstream.plan.devices import Cluster, find_device
from slipstream.plan.layout import Job
from slipstream.plan.throughput import Shape

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SEQUENCE, MICROBATCHES = 1024, 3


def predicted_bytes(name: str, size: int, optimizer: str) -> float:
    config = preset(name)
    job = Job(
        config, Cluster(find_device("h200"), 1), MICROBATCHES * size * SEQUENCE, SEQUENCE, optimizer=optimizer
    )
    shape = Shape("pipedream_2bw", 1, 1, MICROBATCHES, size)
    return Fitter(job).memory(shape, (Layers(0, config.layers),))[0].total


def peak_bytes(name: str, size: int, optimizer: str) -> int:
    from slipstream import Emulator
    from slipstream.models.loss import TokenLoss, with_group_count
    from slipstream.models.stages import build_model
    from slipstream.optim import build

    config = preset(name)
    torch.cuda.empty_cache()
    floor = torch.cuda.memory_allocated()
    engine = Emulator(
        build_model(config, seed=0, device="cuda"),
        MICROBATCHES,
        TokenLoss(shares=MICROBATCHES),
        lambda module: build(optimizer, module, lr=1e-3),
        correction="error_feedback",
        max_grad_norm=1.0,
        bank_dtype=torch.bfloat16,
    )
    tokens = torch.randint(config.vocab, (MICROBATCHES * size, SEQUENCE + 1), device="cuda")
    inputs, targets = tokens[:, :-1].contiguous(), with_group_count(tokens[:, 1:].contiguous())
    for step in range(4):
        if step == 2:
            torch.cuda.reset_peak_memory_stats()
        engine.step(inputs, targets)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - floor


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
@pytest.mark.parametrize("size", [2, 8])
@pytest.mark.parametrize("name", ["smollm2-135m", "smollm2-360m"])
def test_prediction_is_within_ten_percent_of_the_allocators_peak(name, size, optimizer):
    measured, predicted = peak_bytes(name, size, optimizer), predicted_bytes(name, size, optimizer)
    print(
        f"{name} size {size} {optimizer}: measured {measured / 2**20:.0f} MiB, predicted {predicted / 2**20:.0f}"
    )
    assert predicted == pytest.approx(measured, rel=0.10)
