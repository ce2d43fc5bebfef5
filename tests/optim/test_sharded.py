"""Sharded parameters: the same weights as unsharded, each matrix orthogonalised once, clear refusals."""

from __future__ import annotations

import pytest
import torch

from optim import jobs
from slipstream.errors import UserError
from slipstream.optim import RECIPES
from slipstream.optim.sharded import owners

ON_SHARDS = [name for name, recipe in RECIPES.items() if recipe.on_shards]


@pytest.fixture(scope="module")
def whole():
    return {name: jobs.train(jobs.network(), name) for name in ON_SHARDS}


def assert_equal(results, expected, exact=True):
    for result in results:
        for key, value in expected.items():
            if exact:
                assert torch.equal(result[key], value), key
            else:
                torch.testing.assert_close(result[key], value, rtol=1e-5, atol=1e-6, msg=key)


def test_fsdp_muon_equals_the_unsharded_bit_for_bit(pool, whole):
    assert_equal(pool.run("optim.jobs:fsdp", "muon", ranks=2), whole["muon"])


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_any_shard_dimension(pool, whole, dim):
    assert_equal(pool.run("optim.jobs:sharded", "muon", dim, ranks=2), whole["muon"])


@pytest.mark.parametrize("name", [name for name in ON_SHARDS if name != "muon"])
def test_other_optimizers_on_shards(pool, whole, name):
    assert_equal(pool.run("optim.jobs:fsdp", name, ranks=2), whole[name], exact=False)


@pytest.mark.parametrize("name", ["muon", "adamw"])
def test_whole_matrices_on_their_owners(pool, whole, name):
    assert_equal(pool.run("optim.jobs:whole_matrices", name, ranks=2), whole[name])


def test_each_matrix_is_orthogonalised_once(pool):
    """Two blocks of 3 matrices and 3 experts, 3 steps: 36 in all, over both ranks together."""
    counts = pool.run("optim.jobs:orthogonalised", ranks=2)
    assert sum(sum(rank) for rank in counts) == 3 * 2 * (3 + 3)
    assert all(sum(rank) < 36 for rank in counts)


def test_a_step_can_be_taken_in_parts(pool):
    assert pool.run("optim.jobs:in_parts", ranks=2) == [(2, True), (2, True)]


def test_velocity_of_sharded_matrices(pool):
    assert all(all(rank) for rank in pool.run("optim.jobs:velocities", ranks=2))


@pytest.mark.parametrize("name", [name for name in RECIPES if name not in ON_SHARDS])
def test_refused_on_shards(pool, name):
    with pytest.raises(UserError, match=f"{name} needs whole matrices"):
        pool.run("optim.jobs:fsdp", name, ranks=2)


@pytest.mark.parametrize("shape", [(6, 10), (7, 5), (3, 6, 4)])
@pytest.mark.parametrize("cuts", [(0, 1), (1, 0), (0, 0)])
def test_a_matrix_cut_twice_equals_the_whole_one(pool, shape, cuts):
    """As FSDP2 and tensor parallelism together cut it, uneven ends among them."""
    for found, expected in pool.run("optim.jobs:two_axes", shape, cuts):
        assert (found - expected).norm() / expected.norm() < 1e-6


def test_layouts_that_cannot_be_put_together(pool):
    with pytest.raises(UserError, match="cannot put together a matrix laid out as"):
        pool.run("optim.jobs:unfinished", ranks=2)


def test_owners_share_the_work():
    shapes = [torch.Size(s) for s in [(64, 64)] * 4 + [(64, 256)] * 3 + [(16, 64)] * 2]
    owner = owners(shapes, 3)
    loads = [sum(s.numel() * min(s) for s, o in zip(shapes, owner, strict=True) if o == r) for r in range(3)]
    assert max(loads) < 1.5 * min(loads)
    assert owner == owners(shapes, 3)
