"""What is done to a module after its schedule was made is followed or refused, never ignored."""

import pytest
import torch
from torch import nn

from pipeline import tiny
from slipstream import Emulator, UserError

M = 2


class Dropping(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.drop, self.down = nn.Linear(4, 64), nn.Dropout(0.5), nn.Linear(64, 4)

    def forward(self, x):
        return self.down(self.drop(self.up(x)))


def build(module, optimizer=tiny.momentum):
    return Emulator(module, M, lambda output, target: (output - target).square().mean(), optimizer)


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


def test_a_module_that_cannot_be_copied_is_refused_in_our_words():
    import threading

    module = Dropping()
    module.lock = threading.Lock()
    with pytest.raises(UserError, match="The module cannot be copied"):
        build(module)
