"""The cutover on real processes: bit-identical at P = 1, 2, 3, 4 and in the emulator, for every cutover."""

from functools import cache

import pytest
import torch

from pipeline import reference, tiny
from pipeline.cutover_jobs import GROUPS, ROWS, M, cases_at, length, muon, swings
from pipeline.test_runtime import assert_same, join
from slipstream import Emulator, StageError, UserError, merge_states
from slipstream.distributed import RankPool
from slipstream.schedule.actions import Kind
from slipstream.schedule.generate import build

EF = {"optimizer": tiny.adamw, "correction": "error_feedback", "max_grad_norm": 0.1}


@cache
def emulate(optimizer, groups=GROUPS, in_flight=None, poisoned=None, **options):
    made = Emulator(tiny.Model(tied=True), M, tiny.loss_fn, optimizer, **options)
    plain, count = made.loss_fn, 0

    def bad(output, target):
        nonlocal count
        count += 1
        return plain(output, target) * (float("nan") if (count - 1) // M == poisoned else 1.0)

    made.loss_fn = bad
    losses = [loss.item() for g in range(groups) for loss in made.step(*tiny.batch(g, rows=ROWS))]
    return losses, {n: p.detach() for n, p in made.master.named_parameters()}


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_every_depth_is_bit_identical(pool, stages):
    cases = cases_at(stages)
    ranks = pool.run("pipeline.cutover_jobs:many", cases, ranks=stages, timeout=300)
    for index, case in enumerate(cases):
        assert_same(join([rank[index] for rank in ranks]), emulate(groups=length(case), **case))


def test_five_stages_on_processors_have_seven_old_unless_told():
    """2P - 3, where four stages and fewer have P + 1, which is as much."""
    m, groups, layers = ROWS, 3, 5
    options = {"m": m, "cutover": None, "optimizer": tiny.adamw, "layers": layers}
    with RankPool(5) as ranks:
        found = join(ranks.run("pipeline.cutover_jobs:one", range(groups), **options))
    made = Emulator(tiny.Model(tied=True, layers=layers), m, tiny.loss_fn, tiny.adamw, cutover=7)
    losses = [loss.item() for g in range(groups) for loss in made.step(*tiny.batch(g, rows=ROWS))]
    assert_same(found, (losses, {n: p.detach() for n, p in made.master.named_parameters()}))


@pytest.mark.parametrize(
    ("before", "after", "ways"),
    [
        (1, 4, [(2, 1), (2, 4), (swings, 1), (swings, 4)]),
        (4, 1, [(2, 4), (swings, 1)]),
        (3, 2, [(2, 1), (swings, 4)]),
    ],
)
def test_a_state_loads_into_another_depth(pool, before, after, ways):
    for cutover, stop in ways:
        case = {**EF, "cutover": cutover}
        head = join(pool.run("pipeline.cutover_jobs:one", range(stop), ranks=before, **case))
        tail = join(pool.run("pipeline.cutover_jobs:one", range(stop, GROUPS), head[3], ranks=after, **case))
        assert_same((head[0] + tail[0], tail[1]), emulate(**case))


def test_a_state_goes_on_in_larger_microbatches(pool):
    """A fine start: the first three groups are cut into twice as many, of which as many are old."""
    case, fine = {**EF, "cutover": 4}, 3
    head = join(pool.run("pipeline.cutover_jobs:one", range(fine), ranks=3, m=2 * M, **case))
    tail = join(pool.run("pipeline.cutover_jobs:one", range(fine, GROUPS), head[3], ranks=3, **case))
    found, master = reference.train(
        tiny.Model(tied=True),
        [tiny.batch(g, rows=ROWS) for g in range(GROUPS)],
        lambda g: 2 * M if g < fine else M,
        tiny.loss_fn,
        tiny.adamw,
        lam=1.0,
        clip=EF["max_grad_norm"],
        cutover=lambda g: 4,
    )
    assert head[0] + tail[0] == pytest.approx(found, rel=1e-5)
    for name, parameter in master.named_parameters():
        torch.testing.assert_close(tail[1][name], parameter.detach(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("cutover", [1, 3, 5, swings])
def test_a_state_captured_without_a_drain_belongs_to_one_moment(pool, cutover):
    case = {**EF, "cutover": cutover}
    results = pool.run("pipeline.cutover_jobs:one", snapshot=4, ranks=3, **case)
    state = merge_states([result["taken"] for result in results])
    assert state["group"] == 5
    tail = join(pool.run("pipeline.cutover_jobs:one", range(5, GROUPS), state, ranks=2, **case))
    for result in results:
        for name, weight in result["weights"].items():
            assert torch.equal(tail[1][name], weight), name


@pytest.mark.parametrize("cutover", [2, 4])
def test_a_group_that_is_not_finite_is_skipped_on_all_stages(pool, cutover):
    case = {"optimizer": tiny.momentum, "correction": "error_feedback", "cutover": cutover}
    losses, weights = emulate(poisoned=3, **case)
    results = pool.run("pipeline.cutover_jobs:one", poisoned=3, ranks=3, **case)
    assert [result["skipped"] for result in results] == [1, 1, 1]
    found = join(results)
    assert [loss for loss in found[0] if loss == loss] == [loss for loss in losses if loss == loss]
    assert all(torch.equal(found[1][name], weight) for name, weight in weights.items())


@pytest.mark.parametrize(
    ("stages", "cutovers"), [(1, (1, 5, swings)), (3, (2, 3, swings)), (4, (1, 2, 3, 5, swings))]
)
def test_memory_that_is_given_back_changes_nothing(pool, stages, cutovers):
    """Where replicas give their memory back when nothing reads them, the bits are the same and a state is whole."""
    cases = [{**EF, "cutover": c, "snapshot": 4} for c in cutovers]
    cases += [{"optimizer": muon, "correction": "error_feedback", "cutover": 4, "bank_dtype": torch.bfloat16}]
    wide = [{key: value for key, value in case.items() if key != "snapshot"} for case in cases]
    ranks = pool.run("pipeline.cutover_jobs:parked", cases, ranks=stages)
    for index, case in enumerate(wide):
        results = [rank[index][0] for rank in ranks]
        assert_same(join(results), emulate(**case))
        assert all(rank[index][1] <= 2 for rank in ranks), "one of three was freed"
        if cases[index].get("snapshot"):
            state = merge_states([result["taken"] for result in results])
            tail = join(pool.run("pipeline.cutover_jobs:one", range(5, GROUPS), state, ranks=2, **case))
            assert_same((results[-1]["losses"][: 5 * M] + tail[0], tail[1]), emulate(**case))


@pytest.mark.parametrize("stages", [1, 3])
def test_what_is_being_copied_is_not_given_back(pool, stages):
    for seen in pool.run("pipeline.cutover_jobs:copied_late", ranks=stages, **EF):
        assert len(seen) > 3
        assert all(seen)


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_the_default_is_a_pair_more_than_the_least_warm_up_needs(pool, stages):
    expected = stages + 1 if stages > 1 else 1
    assert pool.run("pipeline.cutover_jobs:default", ranks=stages) == [[expected] * 3] * stages


@pytest.mark.parametrize(("stages", "in_flight"), [(1, 1), (3, 3), (4, 4), (3, 6)])
def test_the_executed_order_is_the_schedules(pool, stages, in_flight):
    for cutover in (0, 1, stages, M - 1, M):
        schedule = build("pipedream_2bw", stages, M, 4, in_flight=in_flight, cutover=cutover)
        ranks = pool.run("pipeline.cutover_jobs:order", cutover, in_flight, ranks=stages)
        for rank, actions in enumerate(ranks):
            computed = [action for action in actions if action[0] != Kind.UPDATE]
            assert computed == [tuple(a) for a in schedule.ranks[rank] if a.kind != Kind.UPDATE]


def test_a_state_of_another_cutover_goes_on(pool):
    case = {"optimizer": tiny.momentum, "correction": "error_feedback"}
    head = join(pool.run("pipeline.cutover_jobs:one", range(4), ranks=2, cutover=M, **case))
    tail = join(pool.run("pipeline.cutover_jobs:one", range(4, GROUPS), head[3], ranks=3, cutover=2, **case))
    assert_same((head[0] + tail[0], tail[1]), emulate(cutover=lambda g: M if g < 4 else 2, **case))


def test_a_lost_rank_stops_the_others_with_its_name(pool):
    for cutover in (1, 4):
        with pytest.raises(StageError, match=r"stage 1 \(rank 1\)"):
            pool.run("pipeline.cutover_jobs:lose", cutover, ranks=3, timeout=60)


def test_wrong_use_says_what_to_change(pool):
    with pytest.raises(UserError, match="The cutover is 7"):
        pool.run("pipeline.cutover_jobs:one", ranks=1, cutover=7, **EF)
    with pytest.raises(UserError, match="delay_compensation"):
        pool.run(
            "pipeline.cutover_jobs:one", ranks=1, cutover=2, optimizer=muon, correction="delay_compensation"
        )
