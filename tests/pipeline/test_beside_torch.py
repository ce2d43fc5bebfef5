"""Torch's own functions and schedules as oracles, called as torch's tests call them."""

import pytest
import torch
from torch.distributed.pipelining.microbatch import TensorChunkSpec, split_args_kwargs_into_chunks

from slipstream.pipeline.microbatches import split
from slipstream.torch_private import tree_flatten


@pytest.mark.parametrize(
    ("args", "kwargs", "args_spec", "kwargs_spec"),
    [
        ((torch.randn(8, 3),), {}, None, None),
        ((torch.randn(8, 3), torch.randn(8)), {"z": torch.randn(8, 2, 2)}, None, None),
        ((torch.randn(8, 3), torch.randn(3, 8)), {}, TensorChunkSpec.from_tuple((0, 1)), None),
        ((torch.randn(8, 3),), {"z": torch.randn(2, 8)}, None, TensorChunkSpec.from_dict({"z": 1})),
        (((torch.randn(8, 3), torch.randn(8, 5)),), {"z": {"a": torch.randn(8, 1)}}, None, None),
        ((torch.randn(8, 3),), {"scale": 2.0, "name": "x"}, None, None),
    ],
)
@pytest.mark.parametrize("count", [1, 2, 4])
def test_batches_are_cut_as_torch_cuts_them(args, kwargs, args_spec, kwargs_spec, count):
    arg_mbs, kwarg_mbs = split_args_kwargs_into_chunks(args, kwargs, count, args_spec, kwargs_spec)
    found = split(args, kwargs, None, count, args_spec, kwargs_spec)
    assert len(found) == len(arg_mbs) == count
    for (ours, named, _), theirs, theirs_named in zip(found, arg_mbs, kwarg_mbs, strict=True):
        pairs = zip(
            tree_flatten((ours, named))[0], tree_flatten((tuple(theirs), theirs_named))[0], strict=True
        )
        for one, other in pairs:
            assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


@pytest.mark.parametrize("scale_grads", [True, False])
def test_a_flushed_schedule_equals_torchs_1f1b(pool, scale_grads):
    """Outputs, losses, evaluations and weights, on every stage; with a mean and with a sum over microbatches."""
    results = pool.run("pipeline.citizen_jobs:beside_torch", scale_grads=scale_grads, ranks=2)
    for found, (theirs_seen, ours_seen), (theirs, ours) in results:
        for (output, losses), (own_output, own_losses) in found:
            assert own_losses == pytest.approx(losses, rel=1e-6)
            assert (output is None) == (own_output is None)
            if output is not None:
                torch.testing.assert_close(own_output, output)
        assert (theirs_seen is None) == (ours_seen is None)
        if ours_seen is not None:
            torch.testing.assert_close(ours_seen, theirs_seen)
        for one, other in zip(theirs, ours, strict=True):
            torch.testing.assert_close(other, one)
