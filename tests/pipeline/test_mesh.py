"""Data parallelism inside a stage: replicated, with a sharded optimizer, and through FSDP2."""

from functools import cache

import pytest
import torch

from pipeline.mesh_jobs import GROUPS, swings
from slipstream import merge_states


def whole(results):
    merged = {}
    for result in results:
        merged.update(result["weights"])
    return merged


@pytest.fixture(scope="module")
def trained(pool):
    """Whole runs on two stages, which several tests compare with; once each."""

    @cache
    def train(mode, optimizer="adamw", ranks=4):
        return pool.run("pipeline.mesh_jobs:train", 2, mode, optimizer, ranks=ranks)

    return train


@pytest.mark.parametrize("mode", ["plain", "zero1", "fsdp"])
def test_two_by_two_matches_two_stages(trained, mode):
    """The reduction over data ranks makes bits impossible; 1e-6 relative, as stated."""
    single, results = trained("plain", ranks=2), trained(mode)
    expected, found = whole(single), whole(results)
    for name, weight in expected.items():
        error = (found[name] - weight).norm() / weight.norm()
        assert error < 1e-6, (name, error)
    half = [(a + b) / 2 for a, b in zip(results[1]["losses"], results[3]["losses"], strict=True)]
    assert half == pytest.approx(single[1]["losses"], rel=1e-6)
    assert results[1]["evaluated"] == pytest.approx(single[1]["evaluated"], rel=1e-6)
    assert torch.equal(found["embedding.weight"], found["head.weight"])
    for name, weight in results[0]["weights"].items():
        assert torch.equal(results[2]["weights"][name], weight), "replicas over the data axis stay equal"


def test_muon_over_fsdp_equals_muon_alone(trained):
    """The exchange of its matrices runs in the slack, beside FSDP2's own gathers."""
    expected, found = whole(trained("plain", "muon", ranks=2)), whole(trained("fsdp", "muon"))
    for name, weight in expected.items():
        assert (found[name] - weight).norm() / weight.norm() < 1e-6, name


def test_muon_over_fsdp_where_the_last_stage_has_no_hidden_matrix(pool):
    """It has nothing to exchange, and must not wait for a group that nobody else makes."""
    head_alone = ((0, 3), (4, 4))
    expected = whole(pool.run("pipeline.mesh_jobs:train", 2, "plain", "muon", cuts=head_alone, ranks=2))
    found = whole(
        pool.run("pipeline.mesh_jobs:train", 2, "fsdp", "muon", cuts=head_alone, ranks=4, timeout=200)
    )
    for name, weight in expected.items():
        assert (found[name] - weight).norm() / weight.norm() < 1e-6, name


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_sharded_optimizer_equals_the_replicated_one(trained, optimizer):
    plain, sharded = trained("plain", optimizer), trained("zero1", optimizer)
    assert [r["losses"] for r in sharded] == [r["losses"] for r in plain]
    for one, other in zip(sharded, plain, strict=True):
        for name, weight in other["weights"].items():
            assert torch.equal(one["weights"][name], weight), name
    for stage in (0, 1):
        total = plain[stage]["held"]
        shares = [sharded[stage]["held"], sharded[stage + 2]["held"]]
        assert sum(shares) == total
        assert max(shares) < 0.7 * total, "each data rank owns about half"


def test_a_sharded_state_loads_into_an_unsharded_run(pool, trained):
    straight = trained("plain", ranks=2)
    head = pool.run("pipeline.mesh_jobs:train", 2, "zero1", groups=range(3), ranks=4)
    state = merge_states([result["state"] for result in head])
    tail = pool.run("pipeline.mesh_jobs:train", 2, "plain", state=state, groups=range(3, GROUPS), ranks=2)
    for name, weight in whole(straight).items():
        assert (whole(tail)[name] - weight).norm() / weight.norm() < 1e-6, name


@pytest.mark.parametrize("mode", ["zero1", "fsdp"])
def test_a_sharded_run_goes_on_from_its_own_state_bit_for_bit(pool, trained, mode):
    straight = trained(mode)
    head = pool.run("pipeline.mesh_jobs:train", 2, mode, groups=range(3), ranks=4)
    states = [result["state"] for result in head]
    state = merge_states(states) if mode == "zero1" else states  # FSDP: to each rank its own shards
    tail = pool.run("pipeline.mesh_jobs:train", 2, mode, state=state, groups=range(3, GROUPS), ranks=4)
    for one, two, whole_run in zip(head, tail, straight, strict=True):
        assert one["losses"] + two["losses"] == whole_run["losses"]
        for name, weight in whole_run["weights"].items():
            assert torch.equal(two["weights"][name], weight), name


@pytest.mark.parametrize("sharded", [False, True])
def test_an_expert_without_tokens_on_one_data_rank(pool, sharded):
    expected = pool.run("pipeline.mesh_jobs:experts", ranks=1)[0]
    for found in pool.run("pipeline.mesh_jobs:experts", sharded, ranks=2):
        for name, weight in expected.items():
            assert (found[name] - weight).norm() / weight.norm() < 1e-6, name


@pytest.mark.parametrize("sharded", [False, True])
def test_data_ranks_begin_with_the_weights_of_the_first(pool, sharded):
    """As under DDP. They kept their own, and trained two models."""
    one, other = pool.run("pipeline.mesh_jobs:seeds", sharded, ranks=2)
    assert one == other


def test_a_module_that_has_a_part_of_its_weights_does_not_save_zeros_for_the_rest(pool):
    for said, same, complete in pool.run("pipeline.mesh_jobs:saving", ranks=2):
        assert "gathered_master" in said
        assert same
        assert complete


def test_a_whole_state_loads_into_fsdp_with_a_cutover(pool):
    """Without a correction two parts of a group and the next group read two replicas: what is one must stay one."""
    options = {"tied": False, "cutover": 2, "correction": "none"}
    head = pool.run("pipeline.mesh_jobs:train", 1, "plain", ranks=1, groups=range(3), **options)
    (expected,) = pool.run("pipeline.mesh_jobs:train", 1, "plain", ranks=1, **options)
    for result in pool.run(
        "pipeline.mesh_jobs:train",
        1,
        "fsdp",
        ranks=2,
        state=head[0]["state"],
        groups=range(3, GROUPS),
        **options,
    ):
        for name, weight in expected["weights"].items():
            assert (result["weights"][name] - weight).norm() / weight.norm() < 1e-6, name


@pytest.mark.parametrize("in_flight", [None, 5])
def test_a_sharded_optimizer_and_a_compact_master_follow_any_cutover(pool, in_flight):
    options = {"cutover": swings, "bank_dtype": torch.bfloat16, "in_flight": in_flight, "groups": range(9)}
    plain = pool.run("pipeline.mesh_jobs:train", 2, "plain", ranks=4, **options)
    for compact in (False, True):
        found = pool.run("pipeline.mesh_jobs:train", 2, "zero1", ranks=4, compact_master=compact, **options)
        for one, other in zip(found, plain, strict=True):
            assert one["losses"] == other["losses"]
            assert all(torch.equal(one["weights"][name], weight) for name, weight in other["weights"].items())
