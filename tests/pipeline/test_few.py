"""A sharded optimizer where some data rank owns nothing, or where a parameter is a scalar."""

import pytest
import torch


def assert_equal(found, expected):
    for weights in found:
        assert weights.keys() == expected.keys()
        for name, weight in expected.items():
            assert torch.equal(weights[name], weight), name


@pytest.mark.parametrize("module", ["one", "scalars"])
def test_it_equals_the_replicated_optimizer(pool, module):
    for cutover in (4, 2):
        (expected, _) = pool.run("pipeline.few_jobs:run", module, False, ranks=2, cutover=cutover)
        assert_equal(pool.run("pipeline.few_jobs:run", module, ranks=2, cutover=cutover), expected)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("correction", ["none", "error_feedback"])
def test_a_state_goes_on(pool, correction, in_place):
    for cutover in (4, 2):
        options = {"cutover": cutover, "correction": correction}
        (expected, _) = pool.run("pipeline.few_jobs:run", "one", ranks=2, **options)
        found = pool.run("pipeline.few_jobs:run", "one", ranks=2, stop=3, in_place=in_place, **options)
        assert_equal(found, expected)
