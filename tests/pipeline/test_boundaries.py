"""States at boundaries where few replicas are left, or where what was captured is still being copied."""

import pytest
import torch
from torch import nn

from pipeline import tiny
from pipeline.cutover_jobs import Copying
from slipstream import Emulator, cloned_state
from slipstream.optim.muon import Muon
from slipstream.pipeline.versions import Versions
from slipstream.schedule.cutover import Cutover, never

M, GROUPS = 4, 5


def flushed(group):
    return group == 2


def build(correction="none"):
    return Emulator(
        tiny.Model(), M, tiny.loss_fn, tiny.momentum, correction=correction, cutover=2, synchronous=flushed
    )


def train(emulator, groups):
    return [loss.item() for group in groups for loss in emulator.step(*tiny.batch(group))]


@pytest.mark.parametrize("correction", ["none", "error_feedback"])
@pytest.mark.parametrize("stop", range(GROUPS))
def test_a_state_beside_a_flush_goes_on(stop, correction):
    """Before a flush, the two parts of a group may read all replicas there are, and the next group has none yet."""
    expected = train(build(correction), range(GROUPS))
    emulator = build(correction)
    before = train(emulator, range(stop))
    state = cloned_state(emulator.state_dict())
    assert set(state["banks"]) == {"current", "next"}
    after = build(correction)
    after.load_state_dict(state)
    assert before + train(after, range(stop, GROUPS)) == expected
    assert before + train(emulator, range(stop, GROUPS)) == expected, "taking a state changes nothing"


@pytest.mark.parametrize("write", ["load_state_dict", "spread_master"])
def test_what_is_being_copied_is_not_written(write):
    emulator = build()
    train(emulator, range(2))
    state = cloned_state(emulator.state_dict())
    copying = Copying()
    emulator.hold(copying)
    emulator.load_state_dict(state) if write == "load_state_dict" else emulator.spread_master()
    assert copying.done


def test_replicas_that_are_views_of_one_buffer_keep_it():
    """A part of them is written where the optimizer is sharded: memory of the whole cannot come back for a part."""

    def flat():
        module = nn.Linear(3, 3)
        buffer = torch.zeros(12)
        module.weight.data, module.bias.data = buffer[:9].view(3, 3), buffer[9:]
        return module

    ready = [flat() for _ in range(3)]
    versions = Versions(nn.Linear(3, 3), Cutover(M, 2, never), ready=ready, parks=True)
    for replica in versions.replicas:
        replica.allocate([1])
        assert all(weight.untyped_storage().nbytes() for weight in replica.weights[1:])


def test_momentum_of_its_own_dtype_loads_where_another_rank_owns_a_matrix():
    """Such a matrix requires no gradient here and has no state."""
    matrices = [nn.Parameter(torch.zeros(3, 3)), nn.Parameter(torch.zeros(3, 3), requires_grad=False)]
    optimizer = Muon([{"params": matrices, "algorithm": "muon", "state_dtype": "bfloat16"}])
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.state[matrices[0]]["momentum_buffer"].dtype == torch.bfloat16
    assert not optimizer.state.get(matrices[1])
