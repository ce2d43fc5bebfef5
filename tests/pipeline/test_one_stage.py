"""The engine on one rank, in this process: what does not need a second stage to be seen."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage

from pipeline import tiny
from slipstream import Schedule2BW, UserError, cloned_state
from slipstream.pipeline.peers import Peers
from slipstream.schedule.actions import Kind

M = 2


@pytest.fixture(scope="module", autouse=True)
def alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def schedule(module=None, loss_fn=None, **options):
    stage = PipelineStage(module or nn.Linear(3, 3), 0, 1, torch.device("cpu"))
    return Schedule2BW(stage, M, loss_fn or squared, tiny.momentum, **{"cutover": M, **options})


def squared(output, target):
    return (output - target).square().mean()


def batch(group=0):
    x, y = torch.randn(2, 4, 3, generator=torch.Generator().manual_seed(group))
    return x, y


def test_a_closed_schedule_says_that_it_was_closed():
    closed = schedule()
    closed.close()
    closed.close()
    with pytest.raises(UserError, match="This schedule was closed"):
        closed.step(batch()[0], target=batch()[1])


class Named(nn.Module):
    """Returns a dictionary, or a list, as models from elsewhere do."""

    def __init__(self, kind):
        super().__init__()
        self.head, self.kind = nn.Linear(3, 3), kind

    def forward(self, x):
        return {"out": self.head(x), "size": len(x)} if self.kind is dict else [self.head(x), x]


@pytest.mark.parametrize(("kind", "key"), [(dict, "out"), (list, 0)])
def test_outputs_in_a_container_come_back_as_one_batch(kind, key):
    x, y = batch()
    engine = schedule(Named(kind), lambda output, target: squared(output[key], target))
    evaluated = engine.eval(x)
    returned = engine.step(x, target=y, return_outputs=True)
    torch.testing.assert_close(returned[key], evaluated[key])
    assert returned[key].shape == x.shape
    assert not returned[key].requires_grad


def test_a_hook_that_would_wait_for_its_own_update_is_told_what_to_call():
    engine = schedule()
    engine.after_update = lambda group: engine.state_dict()
    with pytest.raises(UserError, match=r"use capture\(\) there"):
        engine.step(batch()[0], target=batch()[1])


def test_spans_name_the_weights_that_were_read():
    """Two flushed groups, then the delay of one: group 3 is the first to read what group 2 read."""
    engine = schedule(synchronous=2)
    engine.trace(True)
    for group in range(5):
        engine.step(batch(group)[0], target=batch(group)[1])
    engine.drain()
    actions = [span.action for span in engine.take_trace()]
    for kind in (Kind.FORWARD, Kind.BACKWARD):
        versions = {action.group: action.version for action in actions if action.kind is kind}
        assert versions == {0: 0, 1: 1, 2: 2, 3: 2, 4: 3}


def test_a_loaded_state_knows_nothing_of_the_groups_after_it():
    engine = schedule()
    state = cloned_state(engine.state_dict())
    for group in range(3):
        engine.step(batch(group)[0], target=batch(group)[1])
    engine.drain()
    assert sorted(engine.grad_norms) == [0, 1, 2]
    engine.load_state_dict(state)
    assert not engine.grad_norms


def test_weights_that_are_tied_by_name_begin_equal_on_one_stage_too():
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    engine = schedule(module, tied={"both": ["0.weight", "1.weight"]})
    assert torch.equal(module[0].weight, module[1].weight)
    for group in range(3):
        engine.step(batch(group)[0], target=batch(group)[1])
    engine.drain()
    assert torch.equal(module[0].weight, module[1].weight)
    assert not torch.equal(module[0].bias, module[1].bias)


@pytest.mark.parametrize(
    ("names", "words"), [("0.weight", "none to tie it to"), (["0.weight", "0.bias"], "different shapes")]
)
def test_ties_that_cannot_be_are_refused(names, words):
    with pytest.raises(UserError, match=words):
        schedule(nn.Sequential(nn.Linear(3, 3)), tied={"both": names})


class Slow(Peers):
    """Hears of the norm only when an update is waited for, as where another stage is late."""

    def exchange(self, group, squares, status):
        yield self
        return (yield from super().exchange(group, squares, status))

    def is_completed(self):
        return False

    def wait(self):
        pass


def test_a_captured_state_has_the_rates_of_its_next_group_whenever_the_update_ran():
    """A later group may have entered since: a run that went on from the state began with that group's rate."""
    engine = schedule()
    engine._updater.peers = Slow(2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(engine.optimizer, lambda group: 1 / (1 + group))
    captured = {}
    engine.after_update = lambda group: captured.update({group: engine.capture()["hyper"]["weight"]["lr"]})
    for group in range(5):
        engine.step(batch(group)[0], target=batch(group)[1])
        scheduler.step()
    assert captured == pytest.approx({group: 0.05 / (2 + group) for group in range(3)})
    assert engine.state_dict()["hyper"]["weight"]["lr"] == pytest.approx(0.05 / 6)


def narrow(group=0):
    x, y = batch(group)
    return x.bfloat16(), y


def compact(**options):
    module = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))
    return module, schedule(module, bank_dtype=torch.bfloat16, cutover=1, compact_master=True, **options)


def test_no_part_of_a_module_saves_weights_that_it_does_not_hold():
    module, engine = compact()
    for part in (module, module[0]):
        with pytest.raises(UserError, match="does not hold its weights"):
            part.state_dict()
    assert module[1].state_dict() == {}
    with engine.gathered_master():
        with engine.gathered_master():
            pass
        assert module[0].state_dict().keys() == {"weight", "bias"}, "still, after the inner one"
    engine.close()
    assert module[0].state_dict()["weight"].shape == (3, 3)


def test_a_compact_master_that_is_whole_can_be_saved_and_changed_but_not_loaded():
    module, engine = compact()
    for group in range(3):
        engine.step(narrow(group)[0], target=narrow(group)[1])
    expected = cloned_state(engine.state_dict())
    with engine.gathered_master():
        found = cloned_state(engine.state_dict())
        with pytest.raises(UserError, match="inside gathered_master"):
            engine.load_state_dict(expected)
        module[0].weight.data.mul_(2)
    assert all(torch.equal(found["master"][name], each) for name, each in expected["master"].items())
    assert torch.equal(engine.state_dict()["master"]["0.weight"], 2 * expected["master"]["0.weight"])
    engine.load_state_dict(expected)
    engine.spread_master()
    engine.step(narrow(3)[0], target=narrow(3)[1])
    engine.close()


def test_a_compact_master_that_finds_no_room_stays_as_it_was(monkeypatch):
    _, engine = compact()
    for group in range(3):
        engine.step(narrow(group)[0], target=narrow(group)[1])
    expected = cloned_state(engine.state_dict())
    parts = engine._versions.compact
    monkeypatch.setattr(parts, "_buckets", [[i] for i in range(4)])
    opened = parts.open

    def open_some(indices):
        if 2 in indices:
            raise MemoryError("no room")
        opened(indices)

    with monkeypatch.context() as small:
        small.setattr(parts, "open", open_some)
        with pytest.raises(MemoryError, match="no room"), engine.gathered_master():
            pass
    found = engine.state_dict()["master"]
    assert all(torch.equal(found[name], each) for name, each in expected["master"].items())
    with engine.gathered_master():
        pass
    engine.close()


def test_a_schedule_that_failed_gives_a_compact_module_its_weights_back():
    failing = []

    def loss(output, target):
        if failing:
            raise ValueError("no such target")
        return squared(output, target)

    module, engine = compact(loss_fn=loss)
    for group in range(3):
        engine.step(narrow(group)[0], target=narrow(group)[1])
    with engine.gathered_master():
        expected = cloned_state(module.state_dict())
    failing.append(True)
    with pytest.raises(ValueError, match="no such target"), engine:
        engine.step(narrow(3)[0], target=narrow(3)[1])
    found = module.state_dict()
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())
    assert engine.master is module


def test_weights_that_were_lost_inside_an_update_are_not_taken_for_weights():
    module, engine = compact()

    def fail():
        raise ValueError("no step")

    engine.step(narrow()[0], target=narrow()[1])
    engine.optimizer.step = fail
    with pytest.raises(ValueError, match="no step"), engine:
        engine.step(narrow()[0], target=narrow()[1])
    with pytest.raises(UserError, match="failed inside an update, and its weights with it"):
        module.state_dict()
    with pytest.raises(UserError, match="failed inside an update, and its weights with it"):
        engine.master  # noqa: B018
    assert module[0].weight.isnan().all(), "not memory that is gone"
