"""The emulator against rule 1, written down independently."""

import contextlib
import copy

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pipeline import reference, tiny
from slipstream import Emulator, UserError, cloned_state
from slipstream.optim import build
from slipstream.pipeline.state import merge_states

M, GROUPS = 4, 12


def emulate(model, optimizer, groups=GROUPS, **options):
    emulator = Emulator(model, M, tiny.loss_fn, optimizer, **{"correction": "none", **options})
    losses = [loss.item() for g in range(groups) for loss in emulator.step(*tiny.batch(g))]
    return losses, emulator


@pytest.mark.parametrize("optimizer", tiny.OPTIMIZERS)
@pytest.mark.parametrize(("correction", "lam"), [("none", 0.0), ("error_feedback", 1.0)])
@pytest.mark.parametrize(("delay", "start"), [(0, 0), (1, 0), (1, 3), (3, 0), (3, 4)])
def test_equals_rule_1(optimizer, correction, lam, delay, start):
    """With few versions each has been used and written again after eight groups."""
    model, groups = tiny.Model(tied=False), 8 if delay < 3 else GROUPS
    flushed = lambda g: g < start  # noqa: E731
    expected, master = reference.train(
        model,
        [tiny.batch(g) for g in range(groups)],
        M,
        tiny.loss_fn,
        tiny.OPTIMIZERS[optimizer],
        lam=lam,
        delay=delay,
        synchronous=flushed,
    )
    losses, emulator = emulate(
        model, tiny.OPTIMIZERS[optimizer], groups, correction=correction, delay=delay, synchronous=start
    )
    assert losses == pytest.approx(expected, rel=2e-6)
    for ours, theirs in zip(emulator.master.parameters(), master.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    if correction == "none":  # nothing but copies between steps: bit for bit
        assert losses == expected


def test_clipping_equals_torch():
    model = tiny.Model(tied=False)
    expected, _ = reference.train(
        model, [tiny.batch(g) for g in range(GROUPS)], M, tiny.loss_fn, tiny.momentum, clip=0.05
    )
    free, _ = emulate(copy.deepcopy(model), tiny.momentum)
    losses, _ = emulate(model, tiny.momentum, max_grad_norm=0.05)
    assert losses == pytest.approx(expected, rel=1e-5)
    assert losses[-1] != pytest.approx(free[-1], rel=1e-3), "the clip must have bitten"


def test_a_synchronous_finish_reads_the_newest_weights():
    model = tiny.Model(tied=False)
    flushed = lambda g: g >= 8  # noqa: E731
    expected, _ = reference.train(
        model,
        [tiny.batch(g) for g in range(GROUPS)],
        M,
        tiny.loss_fn,
        tiny.adamw,
        lam=1.0,
        synchronous=flushed,
    )
    losses, _ = emulate(model, tiny.adamw, correction="error_feedback", synchronous=flushed)
    assert losses == pytest.approx(expected, rel=2e-6)


def test_stages_with_delays_of_their_own():
    """Original PipeDream: the first stage is two updates late, the last is synchronous."""
    parts = [tiny.Model(*tiny.cut(s, 3), tied=False) for s in range(3)]
    emulator = Emulator(
        stages=parts,
        n_microbatches=M,
        loss_fn=tiny.loss_fn,
        optimizer=tiny.momentum,
        delay=[2, 1, 0],
        correction="none",
    )
    one = copy.deepcopy(parts)
    histories = [[[p.detach().clone() for p in part.parameters()]] for part in one]
    worker = copy.deepcopy(one)
    optimizer = tiny.momentum(torch.nn.ModuleList(one))
    for g in range(8):
        x, y = tiny.batch(g)
        for part, history, delay in zip(worker, histories, [2, 1, 0], strict=True):
            for p, b in zip(part.parameters(), history[max(g - delay, 0)], strict=True):
                p.data.copy_(b)
                p.grad = None
        expected = []
        for xk, yk in zip(x.chunk(M), y.chunk(M), strict=True):
            loss = tiny.loss_fn(worker[2](worker[1](worker[0](xk))), yk)
            (loss / M).backward()
            expected.append(loss.item())
        for part, twin in zip(one, worker, strict=True):
            for p, w in zip(part.parameters(), twin.parameters(), strict=True):
                p.grad = w.grad.clone()
        optimizer.step()
        for part, history in zip(one, histories, strict=True):
            history.append([p.detach().clone() for p in part.parameters()])
        assert [loss.item() for loss in emulator.step(x, y)] == expected


class InPlace(torch.optim.SGD):
    """Changes the gradients it is given, as torch's own list operations do on a GPU (Nesterov, weight decay)."""

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.mul_(0.5)
        return super().step(closure)


def test_an_optimizer_that_changes_gradients_in_place_changes_each_once():
    """Tied weights have a gradient each: halved twice, they would learn at half the rate."""

    def master(make):
        return emulate(tiny.Model(tied=True), make, max_grad_norm=0.5)[1].master.parameters()

    halved = master(lambda module: InPlace(module.parameters(), lr=0.1))
    plain = master(lambda module: torch.optim.SGD(module.parameters(), lr=0.05))
    for one, other in zip(halved, plain, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


def test_tied_weights_stay_equal_and_match_the_shared_parameter():
    shared = tiny.Model()
    expected, _ = reference.train(
        shared, [tiny.batch(g) for g in range(GROUPS)], M, tiny.loss_fn, tiny.adamw, clip=0.5
    )
    losses, emulator = emulate(tiny.Model(), tiny.adamw, max_grad_norm=0.5)
    assert losses == pytest.approx(expected, rel=1e-5)
    assert torch.equal(emulator.master.embedding.weight, emulator.master.head.weight)
    assert emulator.master.embedding.weight is not emulator.master.head.weight


def test_a_layer_that_is_used_twice_has_its_parameters_once():
    layer = torch.nn.Linear(3, 3)
    module = torch.nn.Sequential(layer, torch.nn.Tanh(), layer)
    plain = copy.deepcopy(module)
    emulator = Emulator(module, 1, lambda o, y: (o - y).square().mean(), tiny.momentum, "none", delay=0)
    optimizer = tiny.momentum(plain)
    for _ in range(3):
        x, y = torch.randn(2, 4, 3)
        loss = (plain(x) - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert emulator.step(x, y) == [loss]
    assert emulator.master[0] is emulator.master[2]


def test_a_non_finite_group_is_skipped_counted_and_logged(caplog):
    model = tiny.Model(tied=False)
    emulator = Emulator(
        model, M, lambda o, y: tiny.loss_fn(o, y) * scale, tiny.adamw, correction="error_feedback"
    )
    scale = 1.0
    for g in range(3):
        emulator.step(*tiny.batch(g))
    before = {name: p.clone() for name, p in emulator.master.state_dict().items()}
    caplog.clear()
    moments = copy.deepcopy(emulator.optimizer.state_dict()["state"])
    scale = float("inf")
    emulator.step(*tiny.batch(3))
    assert emulator.skipped == 1
    assert "group 3 is not finite" in caplog.text
    assert all(torch.equal(before[n], p) for n, p in emulator.master.state_dict().items())
    after = emulator.optimizer.state_dict()["state"]
    assert all(torch.equal(after[i]["exp_avg"], moments[i]["exp_avg"]) for i in moments)
    scale = 1.0
    assert all(loss.isfinite() for g in range(4, 8) for loss in emulator.step(*tiny.batch(g)))


def test_learning_rates_belong_to_groups():
    model = tiny.Model(tied=False)
    emulator = Emulator(model, M, tiny.loss_fn, tiny.adamw)
    used = []
    emulator.optimizer.register_step_pre_hook(
        lambda optimizer, *_: used.append(optimizer.param_groups[0]["lr"])
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(emulator.optimizer, lambda g: 1 / (1 + g))
    for g in range(5):
        emulator.step(*tiny.batch(g))
        scheduler.step()
    emulator.drain()
    assert used == pytest.approx([3e-3 / (1 + g) for g in range(5)])


@pytest.mark.parametrize("correction", ["none", "error_feedback"])
@pytest.mark.parametrize("start", [0, 6])
def test_resumes_bit_for_bit(correction, start):
    options = {"correction": correction, "max_grad_norm": 1.0, "synchronous": start}
    whole, final = emulate(tiny.Model(), tiny.adamw, **options)
    for stop in (1, 5, 6, 7):
        first = Emulator(tiny.Model(), M, tiny.loss_fn, tiny.adamw, **options)
        head = [loss.item() for g in range(stop) for loss in first.step(*tiny.batch(g))]
        state = first.state_dict()
        second = Emulator(tiny.Model(), M, tiny.loss_fn, tiny.adamw, **options)
        second.load_state_dict(state)
        tail = [loss.item() for g in range(stop, GROUPS) for loss in second.step(*tiny.batch(g))]
        assert head + tail == whole
        for a, b in zip(final.master.parameters(), second.master.parameters(), strict=True):
            assert torch.equal(a, b)


def test_paci_mismatch_gives_the_backward_newer_weights():
    """On a linear model the forward's weights decide the loss, the backward's decide the gradient of the input."""
    torch.manual_seed(0)
    parts = [torch.nn.Linear(3, 3, bias=False), torch.nn.Linear(3, 3, bias=False)]
    emulator = Emulator(
        stages=copy.deepcopy(parts),
        n_microbatches=1,
        loss_fn=lambda o, y: (o * y).sum(),
        delay=1,
        mismatch=1,
        correction="none",
        optimizer=lambda module: torch.optim.SGD(module.parameters(), lr=0.1),
    )
    a, b = (p.weight.detach().clone() for p in parts)
    old = (a, b)
    for _ in range(4):
        x, y = torch.randn(2, 3), torch.randn(2, 3)
        emulator.step(x, y)
        grad_b = y.T @ (x @ old[0].T)
        grad_a = (y @ b).T @ x  # through the newest b, while the forward read the old one
        old = (a, b)
        a, b = a - 0.1 * grad_a, b - 0.1 * grad_b
        torch.testing.assert_close(emulator.master[0].weight.data, a)
        torch.testing.assert_close(emulator.master[1].weight.data, b)


def test_wrong_use_says_what_to_change():
    model = tiny.Model(tied=False)
    with pytest.raises(UserError, match="cannot be cut into 4 equal microbatches"):
        Emulator(model, M, tiny.loss_fn, tiny.adamw).step(*tiny.batch(0, rows=6))
    with pytest.raises(UserError, match="must return a scalar"):
        Emulator(model, M, lambda o, y: o, tiny.adamw).step(*tiny.batch(0))
    with pytest.raises(UserError, match="misses 1 trainable"):
        Emulator(model, M, tiny.loss_fn, lambda m: torch.optim.SGD(list(m.parameters())[1:], lr=1))
    with pytest.raises(UserError, match="running statistics"):
        Emulator(torch.nn.BatchNorm1d(3), 1, tiny.loss_fn, tiny.adamw)
    with pytest.raises(UserError, match="sparse=False"):
        Emulator(torch.nn.Embedding(3, 2, sparse=True), 1, tiny.loss_fn, tiny.adamw)
    with pytest.raises(UserError, match="either a module or stages"):
        Emulator(None, M, tiny.loss_fn, tiny.adamw)
    with pytest.raises(UserError, match="error_feedback"):
        Emulator(model, M, tiny.loss_fn, tiny.adamw, correction="error_fedback")


@pytest.mark.parametrize("fails", [False, True])
def test_an_evaluation_leaves_each_layer_in_its_mode(fails):
    def loss(output, target):
        return output.missing if fails else (output - target).square().mean()

    module = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Dropout(0.5))
    module[1].eval()
    emulator = Emulator(module, 1, loss, tiny.momentum)
    with contextlib.suppress(AttributeError):
        emulator.eval(torch.randn(4, 3), torch.randn(4, 3))
    assert [part.training for part in module] == [True, False]


def test_an_optimizer_that_holds_what_is_not_the_masters_is_refused():
    """A trained scale of the loss would step along the sum of all its gradients so far."""
    scale = torch.nn.Parameter(torch.ones(()))

    def optimizer(module):
        return torch.optim.SGD([*module.parameters(), scale], lr=0.1)

    with pytest.raises(UserError, match=r"holds 1 parameters that are not the master's"):
        Emulator(tiny.Model(), M, lambda o, y: tiny.loss_fn(o, y) * scale, optimizer)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"optimizer": torch.optim.SGD([torch.zeros(1)], lr=1)}, "must be a callable"),
        ({"loss_fn": None}, "needs loss_fn"),
        ({"n_microbatches": 0}, "at least 1"),
        ({"n_microbatches": 2.5}, "whole number"),
        ({"max_grad_norm": -1.0}, "above 0"),
        ({"correction": None}, "Did you mean 'none'"),
        ({"delay": [1, 1]}, "one for each of the 1 stages"),
        ({"mismatch": 2}, "cannot exceed the delay"),
    ],
)
def test_wrong_arguments_say_what_to_change(options, words):
    given = {"n_microbatches": M, "loss_fn": tiny.loss_fn, "optimizer": tiny.adamw, **options}
    with pytest.raises(UserError, match=words):
        Emulator(tiny.Model(tied=False), **given)


def test_a_loss_without_a_gradient_is_refused():
    with pytest.raises(UserError, match="does not depend on any trainable parameter"):
        Emulator(tiny.Model(), M, lambda o, y: tiny.loss_fn(o.detach(), y), tiny.adamw).step(*tiny.batch(0))


def test_a_step_that_failed_leaves_nothing_behind():
    """Its first microbatches have gradients: they must not count in the step that is then made instead."""
    expected, _ = emulate(tiny.Model(), tiny.adamw)
    calls = 0

    def fails_once(output, target):
        nonlocal calls
        calls += 1
        return output if calls == 2 * M + 3 else tiny.loss_fn(output, target)

    emulator = Emulator(tiny.Model(), M, fails_once, tiny.adamw, correction="none")
    losses = [loss.item() for g in range(2) for loss in emulator.step(*tiny.batch(g))]
    with pytest.raises(UserError, match="must return a scalar"):
        emulator.step(*tiny.batch(2))
    losses += [loss.item() for g in range(2, GROUPS) for loss in emulator.step(*tiny.batch(g))]
    assert losses == expected


@pytest.mark.parametrize(("saved", "now"), [(20, 0), (0, 20), (20, 7), (0, 5)])
def test_a_state_loads_where_other_groups_are_synchronous(saved, now):
    """Whatever the saved run would have read, group 5 reads z_5 after a flush; later groups follow the rule of now."""
    options = {"correction": "error_feedback"}
    first = Emulator(tiny.Model(), M, tiny.loss_fn, tiny.adamw, synchronous=saved, **options)
    for g in range(5):
        first.step(*tiny.batch(g))
    second = Emulator(tiny.Model(), M, tiny.loss_fn, tiny.adamw, synchronous=now, **options)
    second.load_state_dict(first.state_dict())
    newest = [loss.item() for loss in first.eval(*tiny.batch(5))]
    found = [loss.item() for loss in second.step(*tiny.batch(5))]
    assert (found == pytest.approx(newest, rel=1e-6)) == (saved == 20 or now > 4)
    for g in range(6, 30):
        assert all(loss.isfinite() for loss in second.step(*tiny.batch(g)))


class Features(torch.nn.Module):
    """Random features that are drawn once and saved; `counts` changes them in every forward."""

    def __init__(self, seed, counts=False):
        super().__init__()
        self.register_buffer("table", torch.randn(3, 3, generator=torch.Generator().manual_seed(seed)))
        self.head, self.counts = torch.nn.Linear(3, 3), counts
        torch.nn.init.ones_(self.head.weight)

    def forward(self, x):
        if self.counts:
            self.table += 1
        return [self.head(x @ self.table), x]  # a list is handed on as a tuple is


def featured(*parts):
    return Emulator(
        stages=[*parts, Add()],
        n_microbatches=2,
        loss_fn=lambda o, y: (o - y).square().mean(),
        optimizer=tiny.momentum,
    )


class Add(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.bias = torch.nn.Parameter(torch.zeros(3))

    def forward(self, one, other):
        return one + other + self.bias


def test_buffers_of_a_state_reach_the_banks():
    x, y = torch.randn(4, 3), torch.randn(4, 3)
    first, second = featured(Features(1)), featured(Features(2))
    first.step(x, y)
    second.load_state_dict(first.state_dict())
    assert first.step(x, y) == second.step(x, y)


class Places(torch.nn.Module):
    """Keeps a table of places that grows with its input, as caches of positions do."""

    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.zeros(1, 3), persistent=False)
        self.head = torch.nn.Linear(3, 3)
        torch.nn.init.ones_(self.head.weight)

    def forward(self, x):
        if len(self.table) < len(x):
            self.table = torch.arange(len(x) * 3.0).view(-1, 3)
        return self.head(x) + self.table[: len(x)]


def test_a_cache_is_no_part_of_a_state():
    """The master, which has not run, has an empty one: spread over that of a bank it changed the losses."""
    x, y = torch.randn(4, 3), torch.randn(4, 3)
    emulator = Emulator(Places(), 2, lambda o, y: (o - y).square().mean(), tiny.momentum)
    emulator.step(x, y)
    state = cloned_state(emulator.state_dict())
    assert not state["buffers"]
    expected = emulator.step(x, y)
    emulator.load_state_dict(state)
    assert emulator.step(x, y) == expected


def test_stages_that_share_names_have_a_state_of_both():
    """One would be saved in the place of the other."""

    def build():
        torch.manual_seed(0)
        return Emulator(
            stages=[torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)],
            n_microbatches=1,
            loss_fn=lambda o, y: (o - y).square().mean(),
            optimizer=tiny.momentum,
        )

    x, y = torch.randn(4, 3), torch.randn(4, 3)
    emulator, again = build(), build()
    emulator.step(x, y)
    state = cloned_state(emulator.state_dict())
    assert list(state["master"]) == [f"stage.{i}.{name}" for i in range(2) for name in ("weight", "bias")]
    again.load_state_dict(state)
    assert again.step(x, y) == emulator.step(x, y)


def test_a_buffer_that_the_forward_changes_is_refused():
    emulator = featured(Features(1, counts=True))
    with pytest.raises(UserError, match=r"changed the buffer 'table'"):
        emulator.step(torch.randn(4, 3), torch.randn(4, 3))


@pytest.mark.parametrize("delay", [0, 1])
def test_a_run_under_one_autocast_reads_new_weights_in_every_group(delay):
    def emulator():
        return Emulator(tiny.Model(tied=True), 2, tiny.loss_fn, tiny.adamw, delay=delay)

    def autocast():
        return torch.autocast("cpu", torch.bfloat16)

    inside, each = emulator(), emulator()
    expected = []
    for g in range(5):
        with autocast():
            expected += each.step(*tiny.batch(g))
    with autocast():
        found = [loss for g in range(5) for loss in inside.step(*tiny.batch(g))]
        assert torch.equal(torch.stack(found), torch.stack(expected))
        seen = torch.stack(inside.eval(*tiny.batch(9)))
    with autocast():
        assert torch.equal(seen, torch.stack(each.eval(*tiny.batch(9))))


def test_narrow_banks_keep_a_wide_master():
    """bf16 banks: gradients are summed in fp32 and the master never loses bits to the bank."""
    model = torch.nn.Linear(2, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    emulator = Emulator(
        model,
        4,
        lambda o, y: (o * y).sum(),
        lambda m: torch.optim.SGD(m.parameters(), lr=1e-4),
        bank_dtype=torch.bfloat16,
    )
    x = torch.ones(4, 2, dtype=torch.bfloat16)
    y = torch.tensor([[256.0], [1.0], [1.0], [1.0]], dtype=torch.bfloat16)
    emulator.step(x, y)
    assert emulator.master.weight.dtype == torch.float32
    torch.testing.assert_close(emulator.master.weight.data, torch.full((1, 2), 1 - 1e-4 * 259 / 4))


def test_what_a_correction_remembers_of_a_tensor_goes_where_the_tensor_goes():
    """Two stages' states, joined, in one process: as if that had trained from the start."""
    correction = "slipstream.study.adaptive:AdaptiveErrorFeedback"
    _, whole = emulate(tiny.Model(tied=False), tiny.adamw, groups=8, correction=correction)
    states = []
    for part in range(2):
        # One process holds both parts; of its state each "stage" keeps what is its own.
        emulator = Emulator(
            stages=[tiny.Model(*tiny.cut(s, 2), tied=False) for s in range(2)],
            n_microbatches=M,
            loss_fn=tiny.loss_fn,
            optimizer=tiny.adamw,
            correction=correction,
        )
        for g in range(8):
            emulator.step(*tiny.batch(g))
        state = emulator.state_dict()
        names = {name for name, _ in tiny.Model(*tiny.cut(part, 2), tied=False).named_parameters()}
        assert len(state["memory"]) > len(names)
        for section in ("master", "optimizer", "hyper", "memory"):
            state[section] = {name: state[section][name] for name in names}
        state["banks"] = {
            group: {name: bank[name] for name in names} for group, bank in state["banks"].items()
        }
        states.append(state)
    joined = Emulator(tiny.Model(tied=False), M, tiny.loss_fn, tiny.adamw, correction)
    joined.load_state_dict(merge_states(states[::-1]))
    for g in range(8, 12):
        expected = [loss.item() for loss in whole.step(*tiny.batch(g))]
        assert [loss.item() for loss in joined.step(*tiny.batch(g))] == expected


@pytest.mark.parametrize("optimizer", ["muon", "normuon", "adamw", "adamw_capped"])
@pytest.mark.parametrize("correction", ["none", "error_feedback"])
def test_an_update_reads_nothing_of_the_device_but_its_norms(optimizer, correction):
    """On a GPU the host would wait for all that it has queued, and the device then for the host."""

    class Queued(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            assert function not in (
                torch.ops.aten.lift_fresh.default,
                torch.ops.aten._local_scalar_dense.default,
                torch.ops.aten.nonzero.default,
            )
            return function(*args, **(kwargs or {}))

    make = lambda module: build(optimizer, module)  # noqa: E731
    options = {"correction": correction, "max_grad_norm": 0.01}
    emulator = Emulator(tiny.Model(tied=True), M, tiny.loss_fn, make, **options)
    emulator.step(*tiny.batch(0))
    with Queued():
        emulator.step(*tiny.batch(1))
    assert emulator.grad_norms[1] > 0.01
