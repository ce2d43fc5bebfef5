"""On a GPU: bf16 Newton-Schulz within its tolerance, states that come from the CPU, the promised cost."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from optim import references
from slipstream.bench import optim as bench
from slipstream.models.sizes import PRESETS
from slipstream.optim import build
from slipstream.optim.newton_schulz import orthogonalise

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("shape", [(256, 256), (320, 960), (1024, 256)])
def test_bf16_is_within_three_percent(shape):
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    ours = orthogonalise(matrix[None].cuda().bfloat16())[0].cpu().double()
    exact = references.orthogonal(matrix.double())
    assert (ours - exact).norm() < 0.03 * exact.norm()


@pytest.mark.parametrize("name", ["muon", "adamw", "soap"])
def test_states_saved_on_a_cpu_load_on_a_gpu(name):
    if name == "soap":
        pytest.importorskip("pytorch_optimizer")
    module = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    optimizer = build(name, module)
    for _ in range(2):
        module(torch.ones(2, 8)).sum().backward()
        optimizer.step()
    twin = copy.deepcopy(module).cuda()
    moved = build(name, twin)
    moved.load_state_dict(optimizer.state_dict())
    before = [p.detach().clone() for p in twin.parameters()]
    twin(torch.ones(2, 8, device="cuda")).sum().backward()
    moved.step()
    assert not any(torch.equal(p, q) for p, q in zip(before, twin.parameters(), strict=True))


@pytest.mark.bench
def test_a_step_is_eight_times_faster_than_torchs():
    rows = bench.measure_steps(PRESETS["smollm2-360m"], "cuda", rounds=5)["contenders"]
    assert rows[bench.TORCH]["times_ours"] >= 8, rows


def test_error_feedback_costs_no_memory():
    result = bench.measure_corrections(PRESETS["smollm2-360m"], "cuda", rounds=1)
    assert result["error_feedback_lasting_bytes"] == 0


@pytest.mark.bench
def test_error_feedback_costs_three_percent():
    result = bench.measure_corrections(PRESETS["smollm2-360m"], "cuda", rounds=5)
    assert result["publish_overhead"] <= 0.03, result
