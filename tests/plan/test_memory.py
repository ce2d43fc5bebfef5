"""The memory table, exactly, and the laws of memory."""

from __future__ import annotations

from dataclasses import asdict

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from slipstream import optim
from slipstream.errors import UserError
from slipstream.plan.memory import (
    BF16,
    FP32,
    held_together,
    peak_activation_bytes,
    state_bytes,
    weights_memory,
)
from slipstream.schedule.generate import build


def bytes_per_parameter(**settings) -> dict[str, float]:
    """The table of the module's docstring, for one hidden-matrix parameter."""
    return {name: value for name, value in asdict(weights_memory(1, 0, **settings)).items() if value}


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"asynchronous": False}, {"banks": 2, "master": 4, "gradients": 4, "state": 4}),
        (
            {"asynchronous": False, "optimizer": "adamw"},
            {"banks": 2, "master": 4, "gradients": 4, "state": 8},
        ),
        ({"asynchronous": True}, {"banks": 4, "master": 4, "gradients": 8, "state": 4}),
        ({"asynchronous": True, "optimizer": "adamw"}, {"banks": 4, "master": 4, "gradients": 8, "state": 8}),
        (
            {"asynchronous": True, "correction": "error_feedback"},
            {"banks": 4, "master": 4, "gradients": 8, "state": 4, "transient": 4},
        ),
        (
            {"asynchronous": True, "correction": "error_feedback", "fresh": True},
            {"banks": 4, "master": 2, "gradients": 8, "state": 4, "transient": 16},
        ),
        (
            {"asynchronous": True, "correction": "error_feedback", "fresh": True, "waiting": False},
            {"banks": 6, "master": 2, "gradients": 4, "state": 4, "transient": 16},
        ),
        (
            {"asynchronous": True, "correction": "error_feedback", "fresh": True, "optimizer": "lion"},
            {"banks": 4, "master": 4, "gradients": 8, "state": 4, "transient": 4},
        ),
        (
            {"asynchronous": True, "correction": "error_feedback", "fresh": True, "shards": 4},
            {"banks": 4, "master": 0.5, "gradients": 5, "state": 1, "transient": 4},
        ),
        (
            {"asynchronous": True, "paper_form": True},
            {"banks": 4, "master": 4, "gradients": 8, "state": 4, "correction": 4},
        ),
    ],
)
def test_bytes_per_parameter(settings, expected):
    assert bytes_per_parameter(precision=BF16, **settings) == expected


def test_error_feedback_costs_nothing_where_bank_and_master_share_a_dtype():
    plain = bytes_per_parameter(asynchronous=True, precision=FP32)
    corrected = bytes_per_parameter(asynchronous=True, precision=FP32, correction="error_feedback")
    assert plain == corrected == {"banks": 8, "master": 4, "gradients": 8, "state": 4}


def test_synchronous_fp32_reads_the_master_itself():
    assert "banks" not in bytes_per_parameter(asynchronous=False, precision=FP32)


def test_muon_keeps_adamw_state_for_what_is_no_hidden_matrix():
    assert weights_memory(0, 1, asynchronous=False).state == 8
    assert weights_memory(1, 0, asynchronous=False).state == 4


def test_an_unknown_optimizer_names_the_nearest():
    with pytest.raises(UserError, match="Did you mean 'muon'"):
        weights_memory(1, 0, asynchronous=True, optimizer="mun")


@given(
    matrices=st.integers(1, 10**9),
    others=st.integers(0, 10**8),
    shards=st.integers(1, 64),
    asynchronous=st.booleans(),
)
def test_laws_of_weights(matrices, others, shards, asynchronous):
    one = weights_memory(matrices, others, asynchronous=asynchronous)
    many = weights_memory(matrices, others, asynchronous=asynchronous, shards=shards)
    assert many.total <= one.total
    assert many.banks == one.banks  # they are whole on every rank
    waiting = 4 * (matrices + others) if asynchronous else 0
    assert many.gradients - waiting / shards == pytest.approx(one.gradients - waiting)
    assert many.master * shards == pytest.approx(one.master)
    assert weights_memory(matrices + 1, others, asynchronous=asynchronous).total > one.total
    if asynchronous:
        assert one.total > weights_memory(matrices, others, asynchronous=False).total


@pytest.mark.parametrize("name", ["1f1b", "2bw"])
@pytest.mark.parametrize("stages", [1, 2, 4, 7])
def test_one_forward_one_backward_holds_p_minus_s(name, stages):
    schedule = build(name, stages, 3 * stages, 2)
    assert peak_activation_bytes(held_together(schedule), [1.0] * stages) == [
        stages - s for s in range(stages)
    ]


def test_gpipe_holds_the_whole_group_and_weights_count():
    assert peak_activation_bytes(held_together(build("gpipe", 2, 9, 1)), [1.0, 10.0]) == [9.0, 90.0]


@pytest.mark.parametrize("stages", [2, 4, 8])
def test_zbv_holds_what_1f1b_holds_on_its_fullest_rank(stages):
    """ZB-V's chunks are half a stage each: its peak on every rank is 1F1B's on rank 0."""
    held = peak_activation_bytes(held_together(build("zbv", stages, 4 * stages, 1)), [0.5] * (2 * stages))
    assert max(held) == pytest.approx(stages)


@pytest.mark.parametrize("name", optim.RECIPES)
def test_every_optimizer_of_the_trainer_keeps_the_state_that_is_planned_for(name):
    pytest.importorskip("pytorch_optimizer")
    module = nn.Sequential(nn.Linear(512, 512, bias=False), nn.LayerNorm(512))
    optimizer = optim.build(name, module)
    for _ in range(2):
        for parameter in module.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
    held = [
        sum(v.nbytes for v in optimizer.state[parameter].values() if torch.is_tensor(v) and v.numel() > 1)
        / parameter.numel()
        for parameter in (module[0].weight, module[1].weight)
    ]
    assert held == pytest.approx(state_bytes(name), rel=0.02)
