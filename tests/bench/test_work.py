"""The work is the same for every contender, however the model is cut."""

from __future__ import annotations

import pytest
import torch

from slipstream.bench.work import SleepStage, Work
from slipstream.errors import UserError


@pytest.mark.parametrize("kind", ["compute", "sleep"])
def test_halving_the_stages_leaves_the_model_unchanged(kind: str) -> None:
    work = Work(kind, stages=2, microbatches=2, dim=16, tokens=4, forward_seconds=0, backward_seconds=0)
    value = work.inputs()
    whole, halved = value, value
    for part in range(2):
        whole = work.module(part, 2)(whole)
    for part in range(4):
        halved = work.module(part, 4)(halved)
    assert torch.equal(whole, halved)
    names = [name for part in range(4) for name in work.module(part, 4).state_dict()]
    assert len(set(names)) == len(names), "names are global: no two parts share one"


@pytest.fixture
def slept(monkeypatch) -> list[float]:
    """The time asked for since it was last emptied, and no waiting."""
    naps: list[float] = []
    monkeypatch.setattr("slipstream.bench.work.time.sleep", naps.append)
    return naps


def test_sleep_halves_its_backward_between_input_and_weights(slept: list[float]) -> None:
    stage = SleepStage(range(4), dim=4, forward_seconds=1, backward_seconds=10)
    value = torch.zeros(2, 4, requires_grad=True)
    output = stage(value).sum()
    assert sum(slept) == 1
    weights = list(stage.parameters())
    for run, expected in (
        (lambda: torch.autograd.grad(output, [value], retain_graph=True), 5),
        (lambda: torch.autograd.grad(output, weights, retain_graph=True), 5),
        (output.backward, 10),
    ):
        slept.clear()
        run()
        assert sum(slept) == expected


def test_sleep_without_an_input_gradient_takes_the_whole_backward(slept: list[float]) -> None:
    stage = SleepStage(range(4), dim=4, forward_seconds=0, backward_seconds=4)
    stage(torch.zeros(2, 4)).sum().backward()
    assert sum(slept) == 4


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kind": "nap"}, "--work compute or sleep"),
        ({"stages": 1}, "--stages to 2 or more"),
        ({"stages": 4, "microbatches": 2}, "--microbatches to 4 or more"),
        (
            {"stages": 2, "microbatches": 4, "correction": "delay_compensation", "cutover": 2},
            "--cutover 2: --correction delay_compensation takes a gradient that is old throughout",
        ),
    ],
)
def test_wrong_settings_say_what_to_change(options: dict, words: str) -> None:
    with pytest.raises(UserError, match=words):
        Work(**options)


@pytest.mark.parametrize(
    ("options", "old"),
    [
        ({"stages": 8}, 13),
        ({"stages": 8, "device": "cuda"}, 9),
        ({"stages": 4}, 5),
        ({"stages": 8, "cutover": 4}, 4),
        ({"stages": 8, "correction": "delay_compensation"}, 16),
        ({"stages": 8, "correction": "delay_compensation", "cutover": 16}, 16),
    ],
)
def test_as_many_are_old_as_in_a_run(options: dict, old: int) -> None:
    assert Work("sleep", microbatches=16, **options).old == old
