"""Stages are as many programs: what they were told differently is an error, at once, and never a rule of its own."""

import pytest
import torch
from torch import nn

from pipeline import agreement_jobs, tiny
from slipstream import CheckpointError, Emulator, UserError, cloned_state, merge_states
from slipstream.pipeline.agreement import check_group, names_repeat


@pytest.mark.parametrize("order", [(1, 0), (1, 2, 0)])
def test_stages_stand_in_the_order_of_their_ranks(pool, order):
    """Rank 0 used to wait for itself, and a third one in a store without end."""
    with pytest.raises(UserError, match="give its first rank stage 0"):
        pool.run("pipeline.agreement_jobs:in_order", order, ranks=len(order), timeout=30)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("n_microbatches", (4, 8)),
        ("correction", ("error_feedback", "none")),
        ("max_grad_norm", (None, 1.0)),
        ("synchronous", (0, 2)),
        ("scale_grads", (True, False)),
        ("in_flight", (3, 4)),
    ],
)
def test_stages_that_were_told_different_things(pool, name, values):
    with pytest.raises(UserError, match=rf"{name} is {values[0]!r} on stage 0 and {values[1]!r} on stage 1"):
        pool.run("pipeline.agreement_jobs:told", name, values, ranks=2, timeout=30)


def test_a_mesh_of_the_pipeline_alone_beside_other_ranks(pool):
    """Replicas went apart without a word."""
    with pytest.raises(UserError, match=r"no dimension but the pipeline's, and there are 4 ranks"):
        pool.run("pipeline.agreement_jobs:in_a_part_of_a_mesh", ranks=4, timeout=30)


@pytest.mark.parametrize(("ranks", "size"), [((0,), 2), ((0, 1), 3)])
@pytest.mark.parametrize("after", [0, 2])
def test_an_evaluation_on_some_ranks_only(pool, ranks, size, after):
    """What stage 0 evaluated used to be trained on, against the targets of another batch."""
    with pytest.raises(UserError, match=r"is in eval, and this stage in step"):
        pool.run("pipeline.agreement_jobs:evaluate_on", ranks, after, ranks=size, timeout=60)


@pytest.mark.parametrize(("ranks", "size"), [((1,), 2), ((2,), 3), ((1, 2), 3)])
@pytest.mark.parametrize("after", [0, 2])
def test_an_evaluation_that_the_stage_before_knows_nothing_of(pool, ranks, size, after):
    """Both used to wait for as long as they may."""
    with pytest.raises(UserError, match=r"is in step, and this stage in eval"):
        pool.run("pipeline.agreement_jobs:evaluate_on", ranks, after, ranks=size, timeout=60)


@pytest.mark.parametrize(("name", "values"), [("max_grad_norm", (None, 1.0)), ("scale_grads", (True, False))])
def test_data_ranks_that_were_told_different_things(pool, name, values):
    """Their weights used to go apart without a word."""
    with pytest.raises(UserError, match=rf"{name} is {values[0]!r} on rank 0 and {values[1]!r} on rank 1"):
        pool.run("pipeline.agreement_jobs:data_ranks_told", name, values, ranks=2, timeout=30)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_group_keeps_the_mode_that_it_entered_in(pool, reentrant):
    """Microbatches that were in flight when it changed used to be computed again in the new one."""
    runs = [
        pool.run("pipeline.agreement_jobs:turns_to_eval", reentrant, drained, ranks=2)
        for drained in (True, False)
    ]
    assert runs[0] == runs[1]
    assert len(runs[0][0][1]) == 6


def test_ranks_that_go_on_from_different_boundaries(pool):
    with pytest.raises(UserError, match=r"different groups: 2 on stage 0, 1 on stage 1"):
        pool.run("pipeline.agreement_jobs:torn", (2, 1), ranks=2, timeout=60)


def test_data_ranks_that_go_on_from_different_boundaries(pool):
    with pytest.raises(UserError, match=r"different groups: 2\.5 on stage 0"):
        pool.run("pipeline.agreement_jobs:torn_data_ranks", ranks=2, timeout=60)


def test_whoever_stands_elsewhere_objects():
    check_group(3, [3.0, 3.0])
    for group, means in ((3, [3.0, 4.0]), (3, [4.0, 4.0]), (2, [3.0]), (4, [3.0])):
        with pytest.raises(UserError, match="different groups"):
            check_group(group, means)


@pytest.mark.parametrize("way", ["dcp", "merged", "own", "bare"])
def test_stages_that_use_the_same_names_go_on_from_a_state(pool, way, tmp_path):
    """Distributed checkpoints took the second stage's parameters for replicas of the first's, and dropped them."""
    results = pool.run("pipeline.agreement_jobs:goes_on", way, str(tmp_path / "saved"), ranks=2)
    for expected, found, _ in results:
        assert found == expected
    assert results[1][0]


def test_such_a_state_is_of_as_many_stages(pool):
    *_, (_, _, state) = pool.run("pipeline.agreement_jobs:goes_on", "merged", "", ranks=2)
    assert {name.split(".", 2)[1] for name in state["master"]} == {"0", "1"}
    alone = Emulator(
        nn.Sequential(agreement_jobs.same_names(0), agreement_jobs.same_names(1)), 4, agreement_jobs.mean_square,
        tiny.adamw,
    )  # fmt: skip
    with pytest.raises(CheckpointError, match="parameter names are global"):
        alone.load_state_dict(state)
    modules = [agreement_jobs.same_names(index) for index in range(2)]
    both = Emulator(
        stages=modules, n_microbatches=4, loss_fn=agreement_jobs.mean_square, optimizer=tiny.adamw, cutover=3
    )
    both.load_state_dict(state)
    assert torch.equal(modules[1][0].weight, state["master"]["stage.1.0.weight"])


def test_a_whole_model_is_not_a_stage_whose_names_it_has(pool):
    """Its first layer used to go into every stage."""
    model = nn.Sequential(agreement_jobs.same_names(0), agreement_jobs.same_names(1))
    model = nn.Sequential(*model[0], *model[1])
    alone = Emulator(model, 4, agreement_jobs.mean_square, tiny.adamw, cutover=3)
    modules = [agreement_jobs.same_names(index) for index in range(2)]
    both = Emulator(
        stages=modules, n_microbatches=4, loss_fn=agreement_jobs.mean_square, optimizer=tiny.adamw, cutover=3
    )
    with pytest.raises(CheckpointError, match=r"lacks 4 of 4 parameters, 'stage\.0\.0\.weight'"):
        both.load_state_dict(cloned_state(alone.state_dict()))


def test_a_weight_that_is_tied_under_one_name(pool):
    for straight, merged in pool.run("pipeline.agreement_jobs:tied_by_one_name", ranks=2):
        assert straight == merged


def test_buffers_of_one_name_that_differ():
    """Every stage used to go on with the last one's."""
    states = []
    for value in (0.0, 1.0):
        module = nn.Linear(2, 2)
        module.register_buffer("scale", torch.tensor(value))
        states.append(cloned_state(Emulator(module, 2, agreement_jobs.mean_square, tiny.adamw).state_dict()))
    for section in ("master", "optimizer", "hyper"):
        states[1][section] = {f"second.{name}": held for name, held in states[1][section].items()}
    for bank, held in states[1]["banks"].items():
        states[1]["banks"][bank] = {f"second.{name}": tensor for name, tensor in held.items()}
    with pytest.raises(CheckpointError, match="something else of the name 'scale'"):
        merge_states(states)
    states[1]["buffers"]["scale"].zero_()
    assert merge_states(states)["buffers"]["scale"] == 0.0


def test_names_of_one_tied_weight_do_not_repeat():
    assert names_repeat([{"a": None, "w": None}, {"w": None}])
    assert names_repeat([{"w": "one"}, {"w": "other"}])
    assert not names_repeat([{"w": "one"}, {"w": "one", "b": None}])
