"""What is done to a module after its schedule was made is followed or refused, never ignored."""

import copy

import pytest
import torch
from torch import nn

from pipeline import tiny
from pipeline.recorded import Made
from pipeline.test_graphs import Again
from slipstream import CheckpointError, Emulator, UserError, cloned_state
from slipstream.pipeline.graphs import PLAIN_GROUPS
from slipstream.pipeline.stage_graphs import PLAIN_CALLS

M = 2


class Dropping(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.drop, self.down = nn.Linear(4, 64), nn.Dropout(0.5), nn.Linear(64, 4)

    def forward(self, x):
        return self.down(self.drop(self.up(x)))


def mean_square(output, target):
    return (output - target).square().mean()


def build(module, optimizer=tiny.momentum):
    return Emulator(module, M, mean_square, optimizer)


def step(emulator):
    x = torch.randn(2 * M, 4, generator=torch.Generator().manual_seed(1))
    torch.manual_seed(3)
    return [loss.item() for loss in emulator.step(x, x)]


def test_the_mode_of_a_module_reaches_its_replicas():
    """A model as `from_pretrained` hands it out is in eval mode, and was trained without dropout, whatever was said."""
    trains, late = Dropping(), Dropping().eval()
    expected, emulator = step(build(trains)), build(late)
    late.train()
    assert step(emulator) == expected
    module = Dropping()
    emulator = build(module)
    module.drop.eval()
    assert step(emulator) == step(build(Dropping().eval())) != expected


def test_evaluating_leaves_the_mode():
    emulator = build(Dropping())
    expected = step(build(Dropping()))
    emulator.eval(torch.ones(2 * M, 4), torch.ones(2 * M, 4))
    assert step(emulator) == expected


@pytest.mark.parametrize(("frozen", "word"), [(False, "frozen"), (True, "thawed")])
def test_freezing_after_the_start_is_refused(frozen, word):
    module = Dropping()
    module.up.bias.requires_grad_(not frozen)
    emulator = build(module)
    step(emulator)
    module.up.bias.requires_grad_(frozen)
    with pytest.raises(UserError, match=rf"'up.bias' was {word}"):
        step(emulator)


def test_a_parameter_that_an_optimizer_is_given_later_is_refused():
    emulator = build(Dropping())
    emulator.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    with pytest.raises(UserError, match="holds 5 parameters, and held 4"):
        step(emulator)


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_gradient_hooks_are_refused_since_copies_would_not_have_them(kind):
    module = Dropping()
    getattr(module.up.weight, kind)(lambda grad: None)
    with pytest.raises(UserError, match=r"'up.weight' has a gradient hook"):
        build(module)


def test_a_hook_on_what_is_frozen_is_never_called():
    module = Dropping()
    module.up.weight.register_hook(lambda grad: None)
    module.up.weight.requires_grad_(False)
    step(build(module))


class Ours(torch.optim.SGD):
    def __init__(self, module):
        super().__init__(module.parameters(), lr=0.05, momentum=0.9, nesterov=True)


def test_a_class_can_be_what_makes_the_optimizer():
    assert step(build(Dropping(), Ours)) == step(build(Dropping()))
    with pytest.raises(UserError, match=r"AdamW\(module\) says: .*not iterable"):
        build(Dropping(), torch.optim.AdamW)


def test_numbers_of_other_libraries():
    import numpy as np

    options = {"synchronous": np.int64(2), "max_grad_norm": torch.tensor(1.0)}
    emulator = Emulator(Dropping(), M, mean_square, tiny.momentum, **options)
    expected = Emulator(Dropping(), M, mean_square, tiny.momentum, synchronous=2, max_grad_norm=1.0)
    assert [step(emulator) for _ in range(3)] == [step(expected) for _ in range(3)]


def test_each_mode_has_its_own_recordings():
    """A graph replays what was recorded, in whichever mode the module is now."""
    module, recorder = Dropping(), Again()
    emulator = Emulator(module, M, mean_square, tiny.momentum, recorder=recorder)
    for _ in range(4 * (PLAIN_GROUPS + 1)):
        step(emulator)
    recorded, replayed = recorder.recorded, recorder.replayed
    assert recorded > 0
    module.eval()
    step(emulator)
    assert recorder.replayed == replayed
    for _ in range(4 * (PLAIN_GROUPS + 1)):
        step(emulator)
    assert recorder.recorded == 2 * recorded
    module.train()
    step(emulator)
    assert recorder.recorded == 2 * recorded


def test_a_recorded_stage_is_plain_in_a_mode_that_was_not_recorded():
    module, made = Dropping(), Made()
    emulator = Emulator(module, M, mean_square, tiny.momentum, prepare=made.prepare)
    for train, replays in ((True, True), (False, False), (True, True)):
        module.train(train)
        before = made.forwards
        for _ in range(2 * PLAIN_CALLS):
            step(emulator)
        assert (made.forwards > before) == replays


@pytest.mark.parametrize("scheduler", [True, False])
def test_a_state_from_before_a_scheduler_or_a_label(scheduler):
    emulator = build(Dropping())
    step(emulator)
    state = cloned_state(emulator.state_dict())
    expected = step(emulator)

    def labelled(module):
        made = tiny.momentum(module)
        made.param_groups[0]["name"] = "all"
        return made

    again = build(Dropping(), tiny.momentum if scheduler else labelled)
    if scheduler:
        torch.optim.lr_scheduler.LambdaLR(again.optimizer, lambda update: 1.0)
    again.load_state_dict(state)
    assert step(again) == expected
    assert ("initial_lr" if scheduler else "name") in again.optimizer.param_groups[0]


def test_a_state_of_another_optimizer():
    emulator = build(Dropping())
    step(emulator)
    with pytest.raises(CheckpointError, match="of another optimizer: it has no betas, eps, step for AdamW"):
        build(Dropping(), tiny.adamw).load_state_dict(cloned_state(emulator.state_dict()))


def test_a_lack_of_memory_is_told_as_such(monkeypatch):
    def deepcopy(module, memo):
        raise torch.OutOfMemoryError("tried to allocate 20 GiB")

    monkeypatch.setattr(copy, "deepcopy", deepcopy)
    with pytest.raises(torch.OutOfMemoryError, match="20 GiB"):
        build(Dropping())


def test_a_module_that_cannot_be_copied_is_refused_in_our_words():
    import threading

    module = Dropping()
    module.lock = threading.Lock()
    with pytest.raises(UserError, match="The module cannot be copied"):
        build(module)
