"""Published figures, on paper: settings stated here, departures in docs/plan.md."""

from __future__ import annotations

import pytest

from slipstream.models.sizes import ModelConfig, parameters
from slipstream.plan.devices import Cluster, find_device
from slipstream.plan.layout import Job
from slipstream.plan.planner import plan
from slipstream.schedule.costs import Costs
from slipstream.schedule.generate import build
from slipstream.schedule.simulate import simulate

# Zero-bubble paper, 28.3B, p=32, m=96: profiled milliseconds of F, B (input), W and one message.
F, B, W, COMMUNICATION = 10.419, 10.207, 7.715, 0.408
PROFILED = Costs(forward=F, backward=B + W, backward_input=B, backward_weight=W, latency=COMMUNICATION)


def bubble(schedule: str, costs: Costs, work: float) -> float:
    return 1 - 96 * work / simulate(build(schedule, 32, 96, 1), costs).makespan


def test_zero_bubble_paper_1f1b():
    assert bubble("1f1b", PROFILED, F + B + W) == pytest.approx(0.2646, abs=5e-5)


def test_zero_bubble_paper_zbv_with_equal_costs_and_with_profiled_ones():
    """0.0593 is published for an order searched for these costs. The fixed order, which we and torch run, has
    the closed form (P-1)/(6m+P-1) = 0.0511 when F = B = W and links are free, and 0.076 with the profile."""
    equal = Costs(forward=1, backward=2, backward_input=1, backward_weight=1)
    assert bubble("zbv", equal, 3) == pytest.approx(31 / (6 * 96 + 31))
    profiled = bubble("zbv", PROFILED, F + B + W)
    assert 0.0593 < profiled < 0.08
    assert bubble("zb_h1", PROFILED, F + B + W) < bubble("1f1b", PROFILED, F + B + W) / 1.8


@pytest.mark.parametrize(("batch", "published"), [(512, 1.6), (2048, 1.15)])
def test_pipedream_2bw_against_its_flushed_1f1b(batch, published):
    """A GPT of 2.5B parameters on 64 V100s of 16 GB in nodes of 8 with 100 Gb/s each, P=16, D=4, four
    sequences of 512 tokens per microbatch, AdamW."""
    config = ModelConfig(vocab=51200, dim=1920, layers=54, heads=20, kv_heads=20, ffn=5120)
    assert 2.2e9 < parameters(config) < 2.6e9
    speeds = [
        plan(
            Job(config, Cluster(find_device("v100-16g"), 64), batch * 512, 512, optimizer="adamw",
                schedule=name, stages=16, microbatch_size=4 * 4)
        ).best.tokens_per_second
        for name in ("2bw", "1f1b")
    ]  # fmt: skip
    assert speeds[0] / speeds[1] == pytest.approx(published, rel=0.05)
