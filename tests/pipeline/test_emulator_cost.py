"""What the emulator costs over plain synchronous training of the same model: processor time, in turns."""

import copy
import time
from statistics import median

import pytest
import torch
from torch import nn

from slipstream import Emulator
from slipstream.bench.work import ComputeStage
from slipstream.lists import copy_, lerp_

WARM_UP, STEPS = 5, 2  # steps before anything counts, and of one turn


def loss_fn(output, target):
    return (output - target).square().mean()


def optimizer(module):
    return torch.optim.AdamW(module.parameters(), lr=1e-4)


class Plain:
    """Forward, backward, clip, step, zero. With two `banks`, these read, in turns, what error feedback publishes."""

    def __init__(self, model, microbatches, banks=0):
        self.master = model
        self.banks = [copy.deepcopy(model) for _ in range(banks)]
        self.optimizer = optimizer(model)
        self.microbatches = microbatches

    def step(self, x, y):
        model = self.banks[0] if self.banks else self.master
        for xk, yk in zip(x.chunk(self.microbatches), y.chunk(self.microbatches), strict=True):
            (loss_fn(model(xk), yk) / self.microbatches).backward()
        newest, read = list(self.master.parameters()), list(model.parameters())
        for p, source in zip(newest, read, strict=True):
            p.grad = source.grad
        nn.utils.clip_grad_norm_(newest, 1.0)
        if self.banks:
            with torch.no_grad():
                copy_(read, newest)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.banks:
            with torch.no_grad():
                lerp_(read, newest, 2.0)
            model.zero_grad()
            self.banks.reverse()


def cost(make, other, x, y, rounds):
    """How much more processor time a step of `make()` takes than one of `other()`: the median over paired turns."""
    contenders = [make(), other()]
    ratios = []
    for turn in range(-WARM_UP, rounds):
        seconds = {}
        for contender in contenders if turn % 2 else contenders[::-1]:
            started = time.process_time()
            for _ in range(STEPS):
                contender.step(x, y)
            seconds[contender] = time.process_time() - started
        if turn >= 0:
            ratios.append(seconds[contenders[0]] / seconds[contenders[1]])
    return median(ratios) - 1


def setting(dim, tokens, microbatches, **options):
    """The emulator, a plain loop, and a plain loop at two banks, over eight blocks and two rows a microbatch."""
    torch.set_num_threads(1)
    model = ComputeStage(range(8), dim, 4)
    x, y = torch.randn(2, 2 * microbatches, tokens, dim)
    made = lambda banks=0: Plain(copy.deepcopy(model), microbatches, banks)  # noqa: E731
    emulator = lambda: Emulator(  # noqa: E731
        copy.deepcopy(model), microbatches, loss_fn, optimizer, max_grad_norm=1.0, **options
    )
    return emulator, made, x, y


@pytest.mark.bench
@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize(("dim", "tokens", "microbatches", "rounds"), [(128, 64, 4, 40), (8, 2, 1, 300)])
def test_at_most_five_percent_over_plain_training(dim, tokens, microbatches, rounds, delay):
    """The work of the bench, and a model so small that only the fixed cost of a step is left."""
    emulator, plain, x, y = setting(dim, tokens, microbatches, delay=delay)
    assert cost(emulator, plain, x, y, rounds) < 0.05


@pytest.mark.bench
def test_with_few_tokens_a_step_it_costs_what_two_banks_cost():
    """128 tokens for 1.6M parameters: keeping z_g and publishing are two passes over the weights, whoever does it."""
    emulator, plain, x, y = setting(128, 64, 1)
    assert cost(emulator, lambda: plain(banks=2), x, y, 100) < 0.02
