"""Recorded stages: the same bits as plain ones, with several microbatches in flight.

The recorder here runs Python again, at fixed addresses; `test_gpu.py` records CUDA graphs.
"""

import copy

import pytest
import torch
from torch import nn

from pipeline import tiny
from pipeline.recorded import Made
from slipstream.pipeline import stage_graphs
from slipstream.pipeline.gradients import Accumulator
from slipstream.pipeline.replica import make_replica
from slipstream.pipeline.stage_graphs import PLAIN_CALLS, StageGraphs

GROUPS = range(8)


def interleaved(calls, in_flight, microbatches=12, device="cpu"):
    """One forward, one backward, `in_flight` between them, over modules in turn: outputs, gradients of inputs."""
    waiting, seen = [], []

    def land():
        x, y = waiting.pop(0)
        y.square().sum().backward()
        seen.append((y.detach().clone(), x.grad.clone()))

    for index in range(microbatches):
        x = (
            torch.randn(3, tiny.WIDTH, generator=torch.Generator().manual_seed(index))
            .to(device)
            .requires_grad_()
        )
        waiting.append((x, calls[index // 2 % len(calls)](x)))
        if len(waiting) > in_flight:
            land()
    while waiting:
        land()
    return seen


@pytest.mark.parametrize("in_flight", [0, 1, 4])
@pytest.mark.parametrize("watched", [False, True])
def test_any_number_in_flight_changes_no_bit(in_flight, watched):
    modules = [tiny.Block() for _ in range(2)]
    plain, recorded, made, told = copy.deepcopy(modules), modules, Made(), []
    if watched:
        for parameter in recorded[0].parameters():
            parameter.register_post_accumulate_grad_hook(lambda p: told.append(p.grad.clone()))
    expected = interleaved(plain, in_flight)
    found = interleaved([made.prepare(module) for module in recorded], in_flight)
    for one, other in zip(found, expected, strict=True):
        assert all(map(torch.equal, one, other))
    for one, other in zip(recorded, plain, strict=True):
        for parameter, same in zip(one.parameters(), other.parameters(), strict=True):
            assert torch.equal(parameter.grad, same.grad)
    assert made.forwards == made.backwards == 12 - 2 * PLAIN_CALLS
    assert made.slots <= in_flight + 1
    assert made.recorded <= 2 * made.slots
    assert len(told) == (6 * len(list(recorded[0].parameters())) if watched else 0)


def test_it_says_when_all_later_calls_are_as_the_last_one():
    call = Made().prepare(tiny.Block())
    found = []
    for _ in range(PLAIN_CALLS + 3):
        call(torch.ones(2, tiny.WIDTH)).sum().backward()
        found.append(call.settled)
    assert found == [False] * (PLAIN_CALLS + 1) + [True] * 2


def test_outputs_that_are_handed_out_are_not_written_again(pool):
    for outputs, expected in pool.run("pipeline.recorded:outputs_of_both", range(6), ranks=2)[1:]:
        assert len(outputs) == 6
        assert all(map(torch.equal, outputs, expected))


def test_a_loss_is_recorded_together_with_its_stage():
    """So that one launch computes both, whatever else there is to call in between."""
    calls = []

    def loss(output, target):
        calls.append(1)
        return (output - target).square().mean()

    module, made = tiny.Block(), Made()
    plain, call = copy.deepcopy(module), made.prepare(module)
    assert call.with_loss(loss) is call.with_loss(loss)
    for index in range(6):
        x, target = torch.randn(2, tiny.WIDTH, requires_grad=True), torch.randn(2, tiny.WIDTH)
        same = x.detach().requires_grad_()
        found, expected = call.with_loss(loss)(x, target), loss(plain(same), target)
        assert torch.equal(found, expected)
        found.backward()
        expected.backward()
        assert torch.equal(x.grad, same.grad)
        assert (made.forwards, made.backwards) == (max(0, index - 1),) * 2
    for parameter, other in zip(module.parameters(), plain.parameters(), strict=True):
        assert torch.equal(parameter.grad, other.grad)


def test_sums_that_are_taken_away_are_not_added_to():
    module, made = tiny.Block(), Made()
    call, x = made.prepare(module), torch.ones(2, tiny.WIDTH)
    for _ in range(PLAIN_CALLS):
        call(x).sum().backward()
    module.zero_grad()
    call(x).sum().backward()
    once = [p.grad.clone() for p in module.parameters()]
    call(x).sum().backward()
    taken = call.release([*(p.grad for p in module.parameters()), None])
    module.zero_grad()
    call(x).sum().backward()
    assert taken.pop() is None
    for total, one, parameter in zip(taken, once, module.parameters(), strict=True):
        assert torch.equal(total, 2 * one)
        assert torch.equal(parameter.grad, one)
    assert made.recorded == 1


def test_a_module_with_a_release_of_its_own_is_left_alone():
    class Releasing(tiny.Block):
        def release(self):
            raise AssertionError

    replica = make_replica(Releasing(), None, None)
    replica.call(torch.ones(2, tiny.WIDTH)).sum().backward()
    assert all(grad is not None for grad in Accumulator(replica).take(replica))


def test_autograd_is_not_sent_to_every_weight():
    module = tiny.Block()
    call = Made().prepare(module)
    x = torch.ones(2, tiny.WIDTH)  # as the first stage's tokens: nothing to differentiate for
    for _ in range(PLAIN_CALLS):
        call(x).sum().backward()
    y = call(x)
    assert len([node for node, _ in y.grad_fn.next_functions if node is not None]) == 1
    y.sum().backward()
    plain = copy.deepcopy(module)
    plain.zero_grad()
    for _ in range(PLAIN_CALLS + 1):
        plain(x).sum().backward()
    for parameter, same in zip(module.parameters(), plain.parameters(), strict=True):
        assert torch.equal(parameter.grad, same.grad)


def test_what_a_stage_hands_on_beside_tensors_with_gradients():
    """Numbers that go through as they are, and an output that the loss does not depend on."""

    class Several(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.unused = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))

        def forward(self, x, numbers):
            return x * self.weight, numbers, x + self.weight

    module = Several()
    plain, call = copy.deepcopy(module), Made().prepare(module)
    for index in range(6):
        x, numbers = torch.randn(2, 3), torch.arange(2) + index
        for used in (call, plain):
            y, same, _ = used(x, numbers)
            assert torch.equal(same, numbers)
            assert not same.requires_grad
            y.sum().backward()
    assert torch.equal(module.weight.grad, plain.weight.grad)
    assert module.unused.grad is None


@pytest.mark.parametrize(
    ("stages", "options"),
    [  # on three stages one is neither the first nor the last
        (2, {"correction": "error_feedback", "max_grad_norm": 0.1}),
        (3, {"correction": "error_feedback", "max_grad_norm": 0.1}),
        (3, {"correction": "error_feedback", "cutover": 4, "m": 8}),
        (2, {"correction": "error_feedback", "cutover": 4, "m": 8, "outputs": False}),
        (3, {"correction": "error_feedback", "outputs": False, "evaluations": (4,)}),
        (3, {"correction": "none", "synchronous": 3, "outputs": False}),
        (2, {"correction": "error_feedback", "bank_dtype": torch.bfloat16, "cutover": 4, "m": 8}),
        (3, {"correction": "error_feedback", "max_grad_norm": 0.1, "tied": True, "drains": (4,)}),
        # The master is put together for a validation, from weights that give their memory back meanwhile.
        (
            3,
            {
                "correction": "error_feedback",
                "bank_dtype": torch.bfloat16,
                "cutover": 3,
                "compact_master": True,
                "evaluations": (4, 6),
            },
        ),
    ],
)
def test_the_engine_gives_the_same_bits(pool, stages, options):
    m = options.get("m", 4)
    for plain, recorded, (slots, _, forwards, backwards) in pool.run(
        "pipeline.recorded:train_both", GROUPS, ranks=stages, **{"tied": False, **options}
    ):
        assert recorded["losses"] == plain["losses"]
        assert recorded["evaluated"] == plain["evaluated"]
        for name, weight in plain["weights"].items():
            assert torch.equal(recorded["weights"][name], weight), name
        assert forwards == backwards >= (len(GROUPS) - 2) * m - 3 * PLAIN_CALLS
        assert slots <= m + 1


def test_a_recorded_replica_keeps_its_memory():
    assert make_replica(tiny.Block(), None, None).owns_memory
    assert not make_replica(tiny.Block(), None, Made().prepare).owns_memory


def test_a_stage_whose_weights_have_moved_is_recorded_again():
    module, made = tiny.Block(), Made()
    call = made.prepare(module)
    x = torch.ones(2, tiny.WIDTH)
    for _ in range(PLAIN_CALLS + 2):
        call(x).sum().backward()
    assert made.recorded == 1
    old = module.up.weight.data
    module.up.weight.data = old + 1
    plain = copy.deepcopy(module)
    for of in (module, plain):
        of.zero_grad()
    old.fill_(torch.nan)
    y, same = call(x), plain(x)
    y.sum().backward()
    same.sum().backward()
    assert made.recorded == 2
    assert torch.equal(y, same)
    for parameter, expected in zip(module.parameters(), plain.parameters(), strict=True):
        assert torch.equal(parameter.grad, expected.grad)


class Broken:
    def record(self, forward, backward):
        raise RuntimeError("operation not permitted when stream is capturing\nmore")


def test_what_cannot_be_recorded_is_computed_plainly_with_one_warning(monkeypatch):
    module, graphs = tiny.Block(), StageGraphs(Broken)
    plain, call = copy.deepcopy(module), graphs.wrap(module, module)
    with pytest.warns(UserWarning, match="not permitted when stream is capturing") as caught:
        found = interleaved([call], 2)
    for one, other in zip(found, interleaved([plain], 2), strict=True):
        assert all(map(torch.equal, one, other))
    assert len(caught) == 1
    assert not graphs._slots, "their memory is given back"
    assert call.settled
    monkeypatch.setattr(stage_graphs, "MOST_SLOTS", 2)
    made = Made()
    module = copy.deepcopy(plain)
    for one, other in zip(interleaved([made.prepare(module)], 4), found, strict=True):
        assert all(map(torch.equal, one, other))
    assert made.slots == 2


def test_weights_that_no_module_holds_are_not_lost():
    class Elsewhere(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = tiny.Block()
            self.weights = list(self.layer.parameters())

        def forward(self, x):
            return self.layer(x) + self.weights[0].sum()

    module = Elsewhere()
    plain, call = copy.deepcopy(module), Made().prepare(module)
    with pytest.warns(UserWarning, match="not attributes of its modules"):
        found = interleaved([call], 2)
    for one, other in zip(found, interleaved([plain], 2), strict=True):
        assert all(map(torch.equal, one, other))
    for parameter, same in zip(module.parameters(), plain.parameters(), strict=True):
        assert torch.equal(parameter.grad, same.grad)


def test_a_compiled_stage_is_not_compiled_again_for_its_recording():
    module, compilations = tiny.Block(), []

    def backend(graph, inputs):
        compilations.append(graph)
        return graph.forward

    made = Made()
    interleaved([made.graphs.wrap(module, torch.compile(module, backend=backend))], 2)
    assert made.recorded > 0
    assert len(compilations) == 1


def test_without_gradients_nothing_is_recorded():
    made, module = Made(), tiny.Block()
    call = made.prepare(module)
    with torch.no_grad():
        for _ in range(4):
            assert torch.equal(call(torch.ones(2, tiny.WIDTH)), module(torch.ones(2, tiny.WIDTH)))
    assert made.recorded == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("in_flight", [0, 1, 4])
@pytest.mark.parametrize("compiled", [False, True])
def test_cuda_graphs_with_any_number_in_flight_change_no_bit(in_flight, compiled):
    modules = [tiny.Block().cuda() for _ in range(2)]
    plain, graphs = copy.deepcopy(modules), stage_graphs.stage_graphs()

    def calls(of):
        return [torch.compile(module) if compiled else module for module in of]

    wrapped = [graphs.wrap(*pair) for pair in zip(modules, calls(modules), strict=True)]
    found = interleaved(wrapped, in_flight, device="cuda")
    assert not graphs.broken
    for one, other in zip(found, interleaved(calls(plain), in_flight, device="cuda"), strict=True):
        assert all(map(torch.equal, one, other))
    for one, other in zip(modules, plain, strict=True):
        for parameter, same in zip(one.parameters(), other.parameters(), strict=True):
            assert torch.equal(parameter.grad, same.grad)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_capture_that_fails_leaves_everything_usable():
    class Synchronising(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = tiny.Block()

        def forward(self, x):
            x = x + torch.rand(1, device=x.device)
            return self.layer(x) * (1.0 if x.sum().item() > 0 else 2.0)

    module, graphs = Synchronising().cuda(), stage_graphs.stage_graphs()
    stream = torch.cuda.current_stream()
    with pytest.warns(UserWarning, match="cannot be recorded"):
        found = interleaved([graphs.wrap(module, module)], 2, device="cuda")
    assert torch.cuda.current_stream() == stream
    assert torch.isfinite(torch.stack([y.sum() for y, _ in found])).all()
    assert len(torch.rand(100, device="cuda").unique()) > 90
