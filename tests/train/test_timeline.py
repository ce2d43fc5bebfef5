"""The recorded timeline of a run: every schedule has one, and its prediction holds the same actions."""

from __future__ import annotations

import pytest

from slipstream.metrics.report_page import Lanes
from slipstream.metrics.report_timeline import lanes
from slipstream.pipeline.depth_trial import GROUPS_OF_A_TRIAL
from slipstream.train.timeline import GROUPS, recorded_from


@pytest.mark.parametrize("schedule", ["2bw", "1f1b", "gpipe", "interleaved_1f1b", "zbv"])
def test_a_run_draws_what_it_did_over_what_it_should_have_done(runs, schedule):
    runs.train("run", f"pipeline.schedule={schedule}", "pipeline.stages=2", "train.timeline_at=4")
    (event,), (start,) = runs.events("run", "timeline"), runs.events("run", "start")
    drawn = lanes(event, start, "timeline")
    assert isinstance(drawn, Lanes)
    computed = [bar[:5] for bar in drawn.measured if bar[1] != "U"]
    begun = {bar[4] for bar in drawn.measured if bar[1] == "F"}
    assert begun == set(range(4, 4 + GROUPS))
    assert {bar[0] for bar in computed} == {0, 1}
    assert {bar[:5] for bar in drawn.predicted if bar[1] != "U"} == set(computed)
    assert all(0 <= bar[6] <= bar[7] for bar in drawn.measured)
    assert all(bar[6] < 1e3 for bar in drawn.predicted)
    assert any(bar[1] == "U" for bar in drawn.measured)


def test_typical_groups_are_recorded(runs):
    """Not those of a flushed start, nor those around a validation, nor those whose stages are being recorded, nor those
    of a depth that is tried."""

    def found(*overrides: str, on_gpu: bool = False) -> int:
        return recorded_from(runs.config("run", "train.steps=400", *overrides), on_gpu)

    assert found("train.eval_every=0", "train.timeline_at=20") == 20
    assert found("train.eval_every=10", "train.timeline_at=20") == 23
    assert found("train.eval_every=100", "train.timeline_at=20", "optim.sync_start=100") == 103
    assert found("train.eval_every=2", "train.timeline_at=20") == 20
    assert found("train.timeline_at=0") == 0
    graphs = ["train.eval_every=0", "train.timeline_at=20", "train.cuda_graphs=true", "train.device=cuda"]
    synchronous = [*graphs, "pipeline.schedule=1f1b", "pipeline.stages=2"]
    assert found(*synchronous, on_gpu=True) == 43
    assert found(*synchronous, "train.steps=40", on_gpu=True) == 20
    assert found(*graphs, "pipeline.stages=2", on_gpu=True) == 43 + GROUPS_OF_A_TRIAL
    assert found(*graphs, "pipeline.stages=2", "optim.sync_start=100", on_gpu=True) == 143 + GROUPS_OF_A_TRIAL
    assert found(*graphs, "pipeline.stages=2", "pipeline.in_flight=3", on_gpu=True) == 43
    short = [*graphs, "pipeline.stages=2", "train.steps=50"]
    assert found(*short, on_gpu=True) == 43, "a depth may be on trial, but nothing is being recorded"
