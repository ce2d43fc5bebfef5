"""Compiled code is made once in a worker, whatever the optimizer, the mode and the seed of the runs that follow."""

from __future__ import annotations

from pathlib import Path

import pytest

from slipstream.study.parse import load_study
from slipstream.study.warm import rehearsal
from slipstream.study.worker import shape_of
from slipstream.train.start import start

TOY = Path(__file__).parents[2] / "studies" / "toy.toml"


@pytest.mark.slow
@pytest.mark.parametrize("how", ["stage", "layers"])
def test_later_runs_compile_nothing(tmp_path, how):
    """More runs than torch's limit on recompilations, so that a graph per run would show."""
    from torch._dynamo.utils import counters

    points = load_study(TOY, [f'train.compile="{how}"']).expand({}).points
    graphs = []
    for number, point in enumerate(points[:12]):
        config = rehearsal(point.config, tmp_path / f"data-{number}")
        run = config.run.model_copy(update={"dir": str(tmp_path / f"run-{number}")})
        start(config.model_copy(update={"run": run}))
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[0] > 0
    assert len(set(graphs)) == 1, graphs


def test_what_is_compiled_depends_on_the_shape_and_the_kernels_alone():
    points = load_study(TOY).expand({}).points
    assert all(
        shape_of(point.config.model_dump()) == shape_of(points[0].config.model_dump()) for point in points
    )
    changes = ("pipeline.microbatch_size=4", 'train.fp8="rowwise"', "train.deterministic=true")
    others = [load_study(TOY, [change]).expand({}).points[0] for change in changes]
    assert len({str(shape_of(point.config.model_dump())) for point in (points[0], *others)}) == 4
