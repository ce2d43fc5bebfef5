"""Velocities of torch's optimizers, where counters are on a device: not read, and the same numbers."""

from __future__ import annotations

import pytest
import torch

from slipstream.optim import velocity
from slipstream.optim.velocity import RULES

GROUP = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-8, "momentum_decay": 4e-3}


def state_on(device: str, step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    moments = torch.randn(2, 5, 7, generator=generator)
    found = {
        "step": torch.tensor(float(step)),
        "mu_product": torch.tensor(0.9**step),
        "exp_avg": moments[0],
        "exp_avg_sq": moments[1].square(),
    }
    return {key: value.to(device) for key, value in found.items()}


@pytest.mark.parametrize("rule", ["adamw", "nadamw", "mars"])
def test_a_counter_on_a_device_is_not_read(rule):
    """The meta device has no numbers to read."""
    assert RULES[rule](GROUP, state_on("meta", 3)).shape == (5, 7)


@pytest.mark.parametrize("rule", ["adamw", "nadamw", "mars"])
def test_the_numbers_are_the_same(rule, monkeypatch):
    for step in (1, 2, 10, 1000):
        state = state_on("cpu", step)
        read = RULES[rule](GROUP, state)
        with monkeypatch.context() as patched:
            patched.setattr(velocity, "_number", lambda value: value.double())
            assert torch.equal(RULES[rule](GROUP, state), read)
