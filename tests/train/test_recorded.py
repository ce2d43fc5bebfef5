"""Runs whose stages are recorded, by a recorder that runs Python again: the same weights, bit for bit."""

import pytest

from train.conftest import assert_equal_weights


@pytest.mark.parametrize(
    ("schedule", "stages", "more"),
    [
        ("2bw", 4, ["optim.sync_finish=3"]),  # old groups, then flushed ones
        ("1f1b", 2, []),
        ("gpipe", 2, []),
        ("interleaved_1f1b", 2, []),
    ],
)
def test_recorded_stages_train_as_plain_ones(runs, pool, schedule, stages, more):
    given = [f"pipeline.schedule={schedule}", f"pipeline.stages={stages}", "train.eval_every=5", *more]
    runs.train("plain", *given)
    config = runs.config("recorded", *given)
    made = pool.run("train.recorded:run_recorded", config.model_dump(), ranks=stages, timeout=250)
    assert_equal_weights(runs.weights("recorded"), runs.weights("plain"))
    for kind in ("step", "validation"):
        plain, recorded = (
            [event["loss"] for event in runs.events(name, kind)] for name in ("plain", "recorded")
        )
        assert recorded == plain
    for rank, (forwards, backwards, losses) in enumerate(made):
        assert forwards == backwards > 0
        last = forwards if rank == stages - 1 else 0  # of two stages of a rank, those of one
        assert losses == (last // 2 if schedule == "interleaved_1f1b" else last)
