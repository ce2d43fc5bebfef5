"""A master in halves: the same bits as a plain one, at every depth, through states, skips and evaluations."""

import pytest
import torch

from pipeline import tiny
from pipeline.cutover_jobs import GROUPS, M, length, muon, narrow_muon, swings
from pipeline.test_cutover_engine import emulate
from pipeline.test_runtime import assert_same, join
from slipstream import UserError, merge_states

BF16 = {"bank_dtype": torch.bfloat16}
EF = {"optimizer": tiny.adamw, "correction": "error_feedback", "max_grad_norm": 0.1, **BF16}
CASES = [
    *({**EF, "cutover": cutover} for cutover in (1, 3, 5, swings)),
    {"optimizer": muon, "correction": "error_feedback", "cutover": 4, **BF16},
    *(
        {"optimizer": tiny.momentum, "correction": "none", "cutover": cutover, **BF16}
        for cutover in (2, swings)
    ),
    {"optimizer": tiny.momentum, "correction": "momentum_prediction", "cutover": 3, **BF16},
]


def test_a_narrow_momentum_is_kept_and_saved_narrow(pool):
    case = {**EF, "optimizer": narrow_muon, "cutover": 3}
    expected = emulate(**case)
    head = join(pool.run("pipeline.cutover_jobs:one", range(3), ranks=3, compact_master=True, **case))
    states = head[3]["optimizer"].values()
    assert {state["momentum_buffer"].dtype for state in states if "momentum_buffer" in state} == {
        torch.bfloat16
    }
    rest = pool.run(
        "pipeline.cutover_jobs:one", range(3, GROUPS), head[3], ranks=2, compact_master=True, **case
    )
    tail = join(rest)
    assert_same((head[0] + tail[0], tail[1]), expected)
    assert expected[0] != emulate(**{**case, "optimizer": muon})[0]


NARROW = [{**case, "gradient_dtype": torch.bfloat16} for case in (CASES[1], CASES[4], CASES[6])]


@pytest.mark.parametrize("stages", [1, 3])
def test_sums_in_bfloat16_are_rounded_alike_at_every_depth(pool, stages):
    for job in ("compact", "many"):
        ranks = pool.run(f"pipeline.cutover_jobs:{job}", NARROW, ranks=stages)
        for index, case in enumerate(NARROW):
            expected = emulate(groups=length(case), **case)
            assert_same(join([rank[index] for rank in ranks]), expected)
            plain = emulate(**{**case, "groups": length(case), "gradient_dtype": None})
            assert expected[0] != plain[0]


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_the_bits_are_those_of_a_plain_master(pool, stages):
    cases = {1: CASES[::2], 2: CASES[1::2], 4: CASES}[stages]
    ranks = pool.run("pipeline.cutover_jobs:compact", cases, ranks=stages)
    for index, case in enumerate(cases):
        assert_same(join([rank[index] for rank in ranks]), emulate(groups=length(case), **case))


def test_a_state_goes_from_one_kind_to_the_other(pool):
    kinds = ((True, False), (False, True), (True, True))
    for case, some in ((CASES[1], kinds[:1]), (CASES[3], kinds), (CASES[6], kinds[1:2])):
        expected = emulate(**case)
        for before, after in some:
            head = join(
                pool.run("pipeline.cutover_jobs:one", range(3), ranks=3, compact_master=before, **case)
            )
            assert all(tensor.dtype == torch.float32 for tensor in head[3]["master"].values())
            rest = pool.run(
                "pipeline.cutover_jobs:one", range(3, GROUPS), head[3], ranks=2, compact_master=after, **case
            )
            tail = join(rest)
            assert_same((head[0] + tail[0], tail[1]), expected)


@pytest.mark.parametrize("cutover", [1, 3, swings])
def test_a_state_captured_without_a_drain_is_whole(pool, cutover):
    case = {**EF, "cutover": cutover, "compact_master": True}
    results = pool.run("pipeline.cutover_jobs:one", snapshot=4, ranks=3, **case)
    state = merge_states([result["taken"] for result in results])
    tail = join(pool.run("pipeline.cutover_jobs:one", range(5, GROUPS), state, ranks=2, **case))
    for result in results:
        for name, weight in result["weights"].items():
            assert torch.equal(tail[1][name], weight), name


def test_a_capture_loads_as_it_is(pool):
    assert pool.run("pipeline.cutover_jobs:reloaded", ranks=2, **EF) == [True, True]


def test_a_skipped_group_leaves_the_weights(pool):
    for case in ({**EF, "cutover": 3}, {**EF, "correction": "none", "cutover": 3}):
        losses, weights = emulate(poisoned=3, **case)
        results = pool.run("pipeline.cutover_jobs:one", poisoned=3, compact_master=True, ranks=3, **case)
        assert [result["skipped"] for result in results] == [1, 1, 1]
        found = join(results)
        assert [loss for loss in found[0] if loss == loss] == [loss for loss in losses if loss == loss]
        assert all(torch.equal(found[1][name], weight) for name, weight in weights.items())


def test_evaluations_read_the_newest_weights_and_change_nothing(pool):
    case = {**EF, "optimizer": "adamw", "cutover": 2, "evaluations": (1, 4), "drains": (2,)}
    plain = pool.run("pipeline.jobs:train", range(6), ranks=2, **case)
    found = pool.run("pipeline.jobs:train", range(6), ranks=2, compact_master=True, **case)
    assert_same(join(found), join(plain))
    assert join(found)[2] == join(plain)[2]
    assert len(join(found)[2]) == 8


def test_wrong_use_says_what_to_change(pool):
    def refused(match, **options):
        with pytest.raises(UserError, match=match):
            pool.run(
                "pipeline.cutover_jobs:one", ranks=1, compact_master=True, **{**EF, "cutover": 2, **options}
            )

    refused("no group has both an old part and a fresh one", cutover=M)
    refused("bank_dtype=torch.bfloat16", bank_dtype=None)
    refused("rounded at random", gradient_dtype=torch.float16)
    refused("Adadelta does not allow", optimizer=tiny.adadelta)
    for message in pool.run("pipeline.cutover_jobs:unread", ranks=1, **EF)[0]:
        assert "gathered_master" in message


@pytest.mark.parametrize("stages", [1, 2])
def test_what_a_closed_schedule_leaves_is_a_whole_module(pool, stages):
    assert pool.run("pipeline.cutover_jobs:closed", ranks=stages, **EF) == [True] * stages
