"""Stacks: which tensors share one, and that the layout is kept."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from slipstream.kernels.symmetric import tiles
from slipstream.optim import muon, newton_schulz
from slipstream.optim.muon import Muon
from slipstream.optim.newton_schulz import part_size, stacks
from slipstream.optim.sharded import group_matrices

SHAPES = [(24, 24), (8, 24), (24, 24), (3, 24, 8), (40, 24), (8, 24), (2, 24, 8), (0, 24), (40, 24)]


def test_equal_shapes_share_a_stack_and_views_find_their_places():
    tensors = [torch.randn(shape) for shape in SHAPES]
    found = stacks(tensors)
    assert [stack.indices for stack in found] == [[0, 2], [1, 5], [3, 6], [4, 8]]
    assert [tuple(stack.shape) for stack in found] == [(2, 24, 24), (2, 8, 24), (5, 24, 8), (2, 40, 24)]
    for stack in found:
        memory = stack.empty()
        for index, view in zip(stack.indices, stack.views(memory), strict=True):
            view.copy_(tensors[index])
        whole = torch.cat([tensors[i].view(-1, *memory.shape[1:]) for i in stack.indices])
        assert torch.equal(memory, whole)


@pytest.fixture
def deterministic():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def test_where_torch_is_deterministic_no_matrix_shares_a_product_of_the_vendors(deterministic, monkeypatch):
    """It picks a kernel by how many there are. Ours are cut alike in every stack, and on a CPU all are."""
    like = [
        torch.empty(shape, device="meta")
        for shape in (*SHAPES, (960, 2560), (960, 2560), (2560, 960), (2560, 960))
    ]
    apart = [[0], [2], [1], [5], [3], [6], [4], [8]]
    assert [stack.indices for stack in stacks(like)] == [*apart, [9], [10], [11], [12]]
    monkeypatch.setattr(newton_schulz, "runs_on", lambda device: True)
    assert [stack.indices for stack in stacks(like)] == [*apart, [9, 10], [11, 12]]
    assert len(stacks([torch.empty(shape) for shape in SHAPES])) == 4


def test_a_layout_is_kept_while_the_same_parameters_have_gradients(monkeypatch):
    made = []
    monkeypatch.setattr(muon, "group_matrices", lambda *args: made.append(1) or group_matrices(*args))
    params = [nn.Parameter(torch.randn(4, 6)) for _ in range(3)]
    optimizer = Muon([{"params": params, "algorithm": "muon"}])

    def step(*having: int) -> list[bool]:
        before = [p.detach().clone() for p in params]
        for i, parameter in enumerate(params):
            parameter.grad = torch.ones(4, 6) if i in having else None
        optimizer.step()
        return [not torch.equal(p, q) for p, q in zip(before, params, strict=True)]

    assert step(0, 1, 2) == step(0, 1, 2) == [True] * 3
    assert len(made) == 1
    assert step(0, 2) == [True, False, True]
    assert step(1) == [False, True, False]
    assert len(made) == 3
    optimizer.load_state_dict(optimizer.state_dict())
    assert step(1) == [False, True, False]
    assert len(made) == 4


H200 = 264  # programs at once


@pytest.mark.parametrize(
    ("count", "rows", "columns", "size", "rounds"),
    [
        (64, 960, 960, 64, 9),
        (64, 2560, 960, 64, 9),
        (32, 2048, 2048, 19, 17),  # of 16.5: two parts of 16 take 18
        (8, 8192, 2048, 8, 5),  # two parts of 4 take 6
        (96, 2048, 2048, 19, 51),
        (3, 16384, 16384, 1, 96),  # more than the scratch memory is for: one by one
        (5, 8, 0, 5, 0),
    ],
)
def test_matrices_are_worked_on_in_parts_that_fill_the_device(count, rows, columns, size, rounds):
    assert part_size(count, rows, columns, H200) == size
    assert rounds_of(count, size, min(rows, columns), H200) == rounds


def rounds_of(count, size, side, programs):
    return sum(-(-len(part) * tiles(side) // programs) for part in torch.arange(count).split(size))


def test_parts_take_no_more_scratch_nor_rounds_than_the_most_that_fit(monkeypatch):
    monkeypatch.setattr(newton_schulz, "_SCRATCH_BYTES", 7 * 10 * 512**2)
    for count in range(1, 40):
        size = part_size(count, 512, 512, 13)
        assert 1 <= size <= 7
        others = range(min(count, 4), min(count, 7) + 1)
        assert rounds_of(count, size, 512, 13) == min(rounds_of(count, other, 512, 13) for other in others)
