"""Recorded microbatches: the same bits as plain ones. The recorder here runs Python again, at fixed addresses."""

import copy
import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pipeline import tiny
from slipstream import Emulator, UserError, cloned_state
from slipstream.models.sizes import PRESETS
from slipstream.models.stages import build_model
from slipstream.optim import build
from slipstream.pipeline import graphs
from slipstream.pipeline.graphs import PLAIN_GROUPS, CudaGraphs
from slipstream.torch_private import tree_leaves

GROUPS = 14


class Again:
    """Like CUDA graphs of one pool: recording computes nothing, a replay writes where the recording said, and its
    scratch lies over what the other recordings computed."""

    def __init__(self):
        self.recorded = self.replayed = 0
        self.memory = []

    def record(self, body):
        self.recorded += 1
        loss, grads = body()
        fixed = [loss, *(g for g in grads if g is not None)]
        self.memory += fixed
        for tensor in fixed:
            tensor.fill_(torch.nan)

        def replay():
            self.replayed += 1
            again, found = body()
            for tensor in self.memory:
                tensor.fill_(torch.nan)
            for tensor, value in zip(fixed, [again, *(g for g in found if g is not None)], strict=True):
                tensor.copy_(value)

        return (loss, grads), replay


class Broken:
    def record(self, body):
        raise RuntimeError("operation not permitted when stream is capturing\nmore")


class Later:
    """A norm that arrives when it is waited for."""

    done = False

    def is_completed(self):
        return self.done

    def wait(self):
        self.done = True


def as_on_a_gpu(emulator):
    """An update is finished after the next group has been computed."""
    peers = emulator._updater.peers
    exchange, emulator._in_slack = peers.exchange, True

    def later(group, squares, status):
        yield Later()
        return (yield from exchange(group, squares, status))

    peers.exchange = later


def train(recorder, optimizer=tiny.momentum, microbatches=4, model=None, slack=False, **options):
    emulator = Emulator(
        copy.deepcopy(model) if model is not None else tiny.Model(tied=True),
        microbatches,
        tiny.loss_fn,
        optimizer,
        recorder=recorder,
        **{"correction": "error_feedback", "max_grad_norm": 0.5, **options},
    )
    if slack:
        as_on_a_gpu(emulator)
    losses = [loss.item() for g in range(GROUPS) for loss in emulator.step(*tiny.batch(g))]
    return losses, [p.detach().clone() for p in emulator.master.parameters()], emulator.state_dict()


def assert_same(found, expected):
    assert found[0] == expected[0]
    for one, other in zip(found[1], expected[1], strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("slack", [False, True])
@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("options", [{}, {"delay": 0}, {"delay": 3}, {"synchronous": 3}])
def test_recorded_microbatches_change_no_bit(microbatches, options, slack):
    slack = slack and options.get("delay", 1) > 0
    recorder = Again()
    expected = train(None, microbatches=microbatches, slack=slack, **options)
    assert_same(train(recorder, microbatches=microbatches, slack=slack, **options), expected)
    assert 1 <= recorder.recorded <= options.get("delay", 1) + 1
    assert recorder.replayed >= (GROUPS - 3 * (PLAIN_GROUPS + 1) - 3) * microbatches


@pytest.mark.parametrize("delay", [1, 3])
def test_gradients_that_an_update_still_needs_are_not_overwritten(monkeypatch, delay):
    """The first groups share a replica, and the second is computed before the first update is finished."""
    monkeypatch.setattr(graphs, "PLAIN_GROUPS", 0)
    for microbatches in (1, 4):
        expected = train(None, microbatches=microbatches, slack=True, delay=delay)
        assert_same(train(Again(), microbatches=microbatches, slack=True, delay=delay), expected)


def test_narrow_banks():
    expected = train(None, bank_dtype=torch.bfloat16, slack=True)
    assert_same(train(Again(), bank_dtype=torch.bfloat16, slack=True), expected)


def test_stages_of_their_own_delays():
    def run(recorder):
        emulator = Emulator(
            stages=[tiny.Model(*tiny.cut(s, 3), tied=False) for s in range(3)],
            n_microbatches=2,
            loss_fn=tiny.loss_fn,
            optimizer=tiny.momentum,
            delay=[2, 1, 0],
            recorder=recorder,
        )
        return [loss.item() for g in range(20) for loss in emulator.step(*tiny.batch(g))]

    assert run(Again()) == run(None)


@pytest.mark.parametrize(
    "name", ["muon", "adamw", "soap", "adan", "lion", "mars", "ademamix", "scion", "normuon"]
)
def test_no_optimizer_keeps_a_gradient_by_reference(name):
    """Gradients lie at fixed addresses and are overwritten by the next group."""
    if name not in ("muon", "adamw", "normuon", "scion"):
        pytest.importorskip("pytorch_optimizer")
    expected = train(None, lambda module: build(name, module), microbatches=1, slack=True)
    assert_same(train(Again(), lambda module: build(name, module), microbatches=1, slack=True), expected)


def test_what_cannot_be_recorded_is_computed_plainly_with_one_warning():
    expected = train(None)
    with pytest.warns(UserWarning, match="not permitted when stream is capturing") as caught:
        assert_same(train(Broken()), expected)
    assert len(caught) == 1


def test_a_restored_state_goes_on_in_place():
    recorder = Again()
    _, _, state = train(recorder)
    emulator = Emulator(
        tiny.Model(tied=True), 4, tiny.loss_fn, tiny.momentum, max_grad_norm=0.5, recorder=recorder
    )
    for g in range(8):
        emulator.step(*tiny.batch(g))
    emulator.load_state_dict(state)
    plain = Emulator(tiny.Model(tied=True), 4, tiny.loss_fn, tiny.momentum, max_grad_norm=0.5)
    plain.load_state_dict(state)
    for g in range(GROUPS, GROUPS + 6):
        assert [x.item() for x in emulator.step(*tiny.batch(g))] == [
            x.item() for x in plain.step(*tiny.batch(g))
        ]


def test_after_an_earlier_state_is_loaded_recordings_are_replayed_again():
    recorder = Again()
    emulator = Emulator(tiny.Model(tied=True), 1, tiny.loss_fn, tiny.momentum, recorder=recorder)
    early = cloned_state(emulator.state_dict())
    for g in range(GROUPS):
        emulator.step(*tiny.batch(g))
    emulator.load_state_dict(early)
    replayed = recorder.replayed
    losses = [emulator.step(*tiny.batch(g))[0].item() for g in range(GROUPS)]
    assert recorder.replayed - replayed >= GROUPS - 1
    plain = Emulator(tiny.Model(tied=True), 1, tiny.loss_fn, tiny.momentum)
    assert losses == [plain.step(*tiny.batch(g))[0].item() for g in range(GROUPS)]


class Reads(TorchDispatchMode):
    """Which memory was read."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        leaves = tree_leaves((args, kwargs))
        self.seen |= {leaf.data_ptr() for leaf in leaves if isinstance(leaf, torch.Tensor)}
        return function(*args, **(kwargs or {}))


def test_a_recording_reads_the_weights_and_not_what_autocast_made_of_them():
    """Its casts are kept for as long as the context lasts: here through the call before the recording."""

    class Capture(Again):
        def record(self, body):
            body()
            with Reads() as reads:
                body()
            missed.extend(
                name
                for versions in emulator._versions
                for name in versions.names
                if not any(r.module.get_parameter(name).data_ptr() in reads.seen for r in versions.replicas)
            )
            return super().record(body)

    missed, recorder = [], Capture()
    emulator = Emulator(tiny.Model(tied=False), 2, tiny.loss_fn, tiny.momentum, recorder=recorder)
    for g in range(GROUPS):
        with torch.autocast("cpu", torch.bfloat16):
            emulator.step(*tiny.batch(g))
    assert recorder.recorded == 2
    assert missed == []


def test_a_mismatch_cannot_be_recorded():
    with pytest.raises(UserError, match="one set of weights"):
        Emulator(tiny.Model(tied=False), 1, tiny.loss_fn, tiny.momentum, mismatch=1, recorder=Again())


def test_recordings_are_as_many_as_there_is_room_for(monkeypatch):
    monkeypatch.setattr(graphs, "MOST_RECORDINGS", 3)
    recorder = Again()

    def run(recorder):
        emulator = Emulator(tiny.Model(tied=True), 1, tiny.loss_fn, tiny.momentum, recorder=recorder)
        return [emulator.step(*tiny.batch(g, length=3 + g % 4))[0].item() for g in range(40)]

    with pytest.warns(UserWarning, match="any further kind") as caught:
        found = run(recorder)
    assert len(caught) == 1
    assert recorder.recorded == 3
    assert found == run(None)


def test_a_model_must_be_on_the_device_that_is_recorded(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    graphs.check_current(torch.device("cuda", 0))
    with pytest.raises(UserError, match=r"set_device\(1\)"):
        graphs.check_current(torch.device("cuda", 1))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("delay", [0, 1])
def test_cuda_graphs_change_no_bit(microbatches, delay):
    def run(recorder):
        emulator = Emulator(
            tiny.Model(tied=True).cuda(),
            microbatches,
            tiny.loss_fn,
            tiny.momentum,
            max_grad_norm=0.5,
            delay=delay,
            recorder=recorder,
        )
        batches = [tuple(tensor.cuda() for tensor in tiny.batch(g)) for g in range(GROUPS)]
        losses = [loss for x, y in batches for loss in emulator.step(x, y)]
        return [loss.item() for loss in losses]

    assert run(CudaGraphs()) == run(None)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_graphs_under_the_callers_autocast_follow_the_weights():
    def run(recorder):
        emulator = Emulator(tiny.Model(tied=True).cuda(), 2, tiny.loss_fn, tiny.momentum, recorder=recorder)
        losses = []
        for g in range(GROUPS):
            with torch.autocast("cuda", torch.bfloat16):
                losses += emulator.step(*(tensor.cuda() for tensor in tiny.batch(g)))
        return [loss.item() for loss in losses]

    assert run(CudaGraphs()) == pytest.approx(run(None), rel=1e-3)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("delay", [1, 3])
def test_cuda_graphs_of_a_language_model_train_as_plain_calls_do(delay):
    """Large enough for the graphs to lie over each other in their common memory; its attention sums in any order."""
    shape = PRESETS["llama-8m"]
    tokens = torch.randint(shape.vocab, (16, 256), generator=torch.Generator().manual_seed(0)).cuda()

    def loss_fn(logits, targets):
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    def run(recorder):
        emulator = Emulator(
            build_model(shape, seed=0, device="cuda"),
            1,
            loss_fn,
            lambda module: build("muon", module),
            max_grad_norm=1.0,
            delay=delay,
            recorder=recorder,
        )
        losses = [emulator.step(tokens[:, :-1], tokens[:, 1:])[0] for _ in range(24)]
        return [loss.item() for loss in losses]

    found = run(CudaGraphs())
    assert found == pytest.approx(run(None), abs=0.01)
    assert found[-1] < found[0] - 0.5


def muon(module):
    return build("muon", module, lr=1e-2)


@pytest.mark.parametrize("optimizer", [tiny.momentum, muon])
@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("options", [{"correction": "none"}, {"cutover": 1}, {"delay": 0}])
def test_a_group_that_is_not_finite_leaves_nothing_behind(options, microbatches, optimizer, monkeypatch):
    """Its gradients lie in sums that later groups use again."""
    batch, loss_fn = tiny.batch, tiny.loss_fn
    poisoned = 8

    def marked(group):
        x, y = batch(group)
        return (x, -1 - y) if group == poisoned else (x, y)

    def loss(logits, target):
        return loss_fn(logits, torch.where(target < 0, -1 - target, target)) * torch.where(
            (target < 0).any(), torch.inf, 1.0
        )

    monkeypatch.setattr(tiny, "batch", marked)
    monkeypatch.setattr(tiny, "loss_fn", loss)
    found = train(Again(), optimizer, microbatches, slack=True, **options)
    expected = train(None, optimizer, microbatches, **options)
    finite = [math.isfinite(one) for one in found[0]]
    assert [i // microbatches for i, one in enumerate(finite) if not one] == [poisoned] * microbatches
    assert [one for one in found[0] if math.isfinite(one)] == [
        one for one in expected[0] if math.isfinite(one)
    ]
    assert all(map(torch.equal, found[1], expected[1]))
