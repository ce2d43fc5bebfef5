"""The engine on real processes: bit-identical at P = 1, 2, 3, 4 and in the emulator."""

import re

import pytest
import torch

from pipeline import tiny
from pipeline.jobs import M
from slipstream import Emulator, StageError, UserError, merge_states
from slipstream.optim.corrections import build_correction
from slipstream.schedule.actions import Kind
from slipstream.schedule.generate import build

GROUPS = range(8)


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
    for stages in (1, 2, 3, 4) if clip and optimizer == "adamw" else (2, 4):
        found = join(pool.run("pipeline.jobs:train", GROUPS, **options, ranks=stages))
        assert_same(found, expected)


@pytest.mark.parametrize("correction", ["momentum_prediction", "delay_compensation", "lr_scaling"])
def test_every_correction_is_bit_identical_at_every_depth(pool, correction):
    """Tied weights and a decaying rate: what a correction reads or changes must not depend on who runs it when."""
    options = {"lam": 1.0} if correction != "lr_scaling" else {"steps": 20}
    options = {"correction": build_correction(correction, **options), "max_grad_norm": 0.1, "decay": True}
    expected = emulate(**options)
    for stages in (1, 2, 4):
        assert_same(join(pool.run("pipeline.jobs:train", GROUPS, ranks=stages, **options)), expected)


def test_drains_and_evaluations_anywhere_change_nothing(pool):
    options = {"correction": "error_feedback", "max_grad_norm": 0.1}
    expected = emulate(**options)
    evaluated = []
    for stages in (1, 2, 3, 4):
        found = join(
            pool.run(
                "pipeline.jobs:train",
                GROUPS,
                drains=(0, 3, 4, 6),
                evaluations=(0, 5, 7),
                ranks=stages,
                **options,
            )
        )
        assert_same(found, expected)
        evaluated.append(found[2])
    assert len(evaluated[0]) == 3 * M
    assert evaluated.count(evaluated[0]) == 4, "the evaluation is at the master, which does not depend on P"


@pytest.mark.parametrize("flushed", [5, "finish", "every third"])
def test_synchronous_groups(pool, flushed):
    options = {"correction": "error_feedback", "synchronous": tiny.PREDICATES.get(flushed, flushed)}
    expected = emulate(**options)
    for stages in (1, 2, 4):
        assert_same(join(pool.run("pipeline.jobs:train", GROUPS, ranks=stages, **options)), expected)


@pytest.mark.parametrize(("before", "after"), [(1, 4), (4, 1), (3, 2), (2, 2)])
def test_state_loads_into_new_processes_and_another_depth(pool, before, after):
    options = {"correction": "error_feedback", "max_grad_norm": 0.1}
    losses, weights = emulate(**options)
    for stop in (1, 7):
        head = join(pool.run("pipeline.jobs:train", range(stop), ranks=before, **options))
        tail = join(
            pool.run("pipeline.jobs:train", range(stop, len(GROUPS)), state=head[3], ranks=after, **options)
        )
        assert_same((head[0] + tail[0], tail[1]), (losses, weights))


def test_snapshots_without_a_drain_belong_to_one_moment(pool):
    results = pool.run("pipeline.jobs:snapshots", 4, ranks=3)
    state = merge_states([result["state"] for result in results])
    assert state["group"] == 5
    options = {"correction": "error_feedback", "max_grad_norm": 0.5}
    tail = join(pool.run("pipeline.jobs:train", range(5, 8), state=state, ranks=2, **options))
    for result in results:
        for name, weight in result["weights"].items():
            assert torch.equal(tail[1][name], weight), name


@pytest.mark.parametrize(("stages", "in_flight"), [(1, None), (2, 2), (3, 4), (4, 5)])
def test_the_executed_order_is_the_schedules(pool, stages, in_flight):
    groups = 5
    expected = build("pipedream_2bw", stages, M, groups, in_flight=in_flight)
    for rank, (actions, _) in enumerate(
        pool.run("pipeline.jobs:order", groups, in_flight=in_flight, ranks=stages)
    ):
        computed = [action for action in actions if action[0] != Kind.UPDATE]
        assert computed == [action[:4] for action in expected.ranks[rank] if action.kind != Kind.UPDATE]
        for group in range(
            groups
        ):  # an update runs in the slack: after its last backward, before its bank is read
            places = [
                i for i, action in enumerate(actions) if action[0] == Kind.UPDATE and action[3] == group
            ]
            assert places[0] > actions.index((Kind.BACKWARD, rank, M - 1, group))
            if group + 2 < groups:
                assert places[-1] < actions.index((Kind.FORWARD, rank, 0, group + 2))


def test_a_group_that_is_not_finite_is_skipped_on_all_stages(pool):
    runs = [pool.run("pipeline.jobs:skip", 3, ranks=stages) for stages in (1, 3)]
    for run in runs:
        assert [result["skipped"] for result in run] == [1] * len(run)
    one, three = ({n: w for result in run for n, w in result["weights"].items()} for run in runs)
    assert all(torch.equal(one[name], three[name]) for name in one)
    finite = [loss for loss in runs[0][-1]["losses"] if loss == loss]
    assert len(finite) == 7 * M


def test_a_frozen_weight_shared_within_a_stage_needs_no_tie(pool):
    losses = pool.run("pipeline.jobs:frozen", ranks=1)[0]
    assert sum(losses[-M:]) < sum(losses[:M])


def test_a_stop_asked_by_any_rank_reaches_all_at_one_group(pool):
    for asker in (0, 2):
        answers = pool.run("pipeline.jobs:stop", asker, ranks=3)
        assert len(set(answers)) == 1, answers
        group, completed = answers[0]
        assert completed == group
        assert 4 <= group <= 7, "soon after it was asked, when four were handed in"


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("few microbatches", "n_microbatches=1 < 2 stages"),
        ("missed parameters", "misses 1 trainable"),
        ("shapes", "Every microbatch must have the same shapes"),
        ("loss", "must return a scalar"),
        ("frozen tie", "this parameter is frozen"),
        ("lonely tie", "on stage 1, and none to tie it to"),
        ("unlike ties", r"different shapes: \(24, 12\) on stage 0, \(12, 24\) on stage 1"),
        ("target", "only the last stage does"),
        ("input", "only the first stage does"),
        ("short batch", "cannot be cut into 4 equal microbatches"),
        ("no input", "first stage needs the input"),
        ("again", "failed before"),
    ],
)
def test_wrong_use_says_what_to_change(pool, quick, case, message):
    with pytest.raises(UserError, match=message):
        pool.run("pipeline.jobs:broken", case, ranks=2, timeout=200)


def test_a_temporary_folder_of_any_name_will_do(pool, tmp_path):
    folder = tmp_path / ("job" * 30)
    folder.mkdir()
    expected = pool.run("pipeline.jobs:train", range(3), ranks=2)[-1]["losses"]
    assert pool.run("pipeline.jobs:far_down", str(folder), ranks=2)[-1] == expected


@pytest.mark.parametrize("flushed", [0, 10])
@pytest.mark.parametrize("how", ["die", "stall"])
def test_a_lost_rank_stops_the_others_with_its_name(pool, quick, how, flushed):
    with pytest.raises(StageError, match=r"stage 1 \(rank 1\)") as caught:
        pool.run("pipeline.jobs:lose", how, flushed, ranks=3, timeout=100)
    assert "group" in str(caught.value)
    assert "microbatch" in str(caught.value)
    assert not re.search(r"Stage \d Stage", str(caught.value)), "each stage says its name once"
