"""The cutover in the emulator, against rule 1: the first c microbatches of a group are old, the others fresh."""

import copy

import pytest
import torch

from pipeline import reference, tiny
from pipeline.test_graphs import Again, as_on_a_gpu
from slipstream import Emulator, UserError
from slipstream.optim import build
from slipstream.optim.corrections import build_correction
from slipstream.pipeline import graphs

M, GROUPS = 4, 8


def swings(group):
    return group % (M + 1)


def muon(module):
    return build("muon", module, lr=3e-2)


OPTIMIZERS = {**tiny.OPTIMIZERS, "muon": muon}
CUTOVERS = [0, 1, 2, 3, 4, swings]


def emulator(model=None, optimizer=tiny.momentum, recorder=None, slack=False, m=M, **options):
    made = Emulator(
        copy.deepcopy(model) if model is not None else tiny.Model(tied=False),
        m,
        tiny.loss_fn,
        optimizer,
        recorder=recorder,
        **{"correction": "none", **options},
    )
    if slack:
        as_on_a_gpu(made)
    return made


def run(*args, groups=range(GROUPS), **options):
    made = emulator(*args, **options)
    losses = [loss.item() for g in groups for loss in made.step(*tiny.batch(g))]
    return losses, [p.detach().clone() for p in made.master.parameters()]


def expected(model, optimizer, cutover, groups=range(GROUPS), **options):
    function = cutover if callable(cutover) else lambda g: cutover
    batches = [tiny.batch(g) for g in groups]
    return reference.train(model, batches, M, tiny.loss_fn, optimizer, cutover=function, **options)


@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize(("correction", "lam"), [("none", 0.0), ("error_feedback", 1.0)])
@pytest.mark.parametrize("cutover", CUTOVERS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_equals_the_rule_to_the_bit(name, cutover, correction, lam, clip):
    """One that stays has used each of its three replicas twice by the fifth group."""
    model, groups = tiny.Model(tied=False), range(GROUPS if cutover is swings else 5)
    losses, master = expected(model, OPTIMIZERS[name], cutover, groups, lam=lam, clip=clip, exact=True)
    options = {"correction": correction, "cutover": cutover, "max_grad_norm": clip}
    found, weights = run(model, OPTIMIZERS[name], groups=groups, **options)
    assert found == losses
    assert all(map(torch.equal, weights, (p.detach() for p in master.parameters())))


@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("cutover", [2, swings])
def test_equals_the_rule_in_torchs_own_words(cutover, clip):
    """z + (z - z before) and torch's clipping, which round elsewhere."""
    model = tiny.Model(tied=False)
    losses, master = expected(model, tiny.momentum, cutover, lam=1.0, clip=clip)
    found, weights = run(model, correction="error_feedback", cutover=cutover, max_grad_norm=clip)
    assert found == pytest.approx(losses, rel=1e-5)
    for ours, theirs in zip(weights, master.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_all_old_is_2bw_and_none_old_is_synchronous():
    for correction in ("none", "error_feedback"):
        assert run(cutover=M, correction=correction)[0] == run(correction=correction)[0]
        assert run(cutover=0, correction=correction)[0] == run(delay=0)[0]
        short = run(synchronous=3, correction=correction)
        long = run(cutover=lambda g: 0 if g <= 3 else M, correction=correction)
        assert short[0] == long[0]
        mixed = run(synchronous=3, cutover=2, correction=correction)
        assert mixed[0] == run(cutover=lambda g: 0 if g <= 3 else 2, correction=correction)[0]


def test_every_cutover_is_another_trajectory():
    runs = [run(cutover=c, correction="error_feedback")[0] for c in CUTOVERS]
    assert len({tuple(losses) for losses in runs}) == len(CUTOVERS)


def test_a_cutover_for_each_stage():
    """Stage s switches at its own c_s: a microbatch meets old weights early and new ones late."""
    parts = [tiny.Model(*tiny.cut(s, 2), tied=False) for s in range(2)]
    made = Emulator(
        stages=copy.deepcopy(parts),
        n_microbatches=M,
        loss_fn=tiny.loss_fn,
        optimizer=tiny.momentum,
        cutover=[3, 1],
        correction="none",
    )
    optimizer = tiny.momentum(torch.nn.ModuleList(parts))
    worker = copy.deepcopy(parts)
    history = [[[p.detach().clone() for p in part.parameters()]] for part in parts]
    for g in range(8):
        x, y = tiny.batch(g)
        for part in worker:
            part.zero_grad()
        losses = []
        for k, (xk, yk) in enumerate(zip(x.chunk(M), y.chunk(M), strict=True)):
            for part, versions, old in zip(worker, history, [3, 1], strict=True):
                for p, b in zip(part.parameters(), versions[max(g - 1, 0) if k < old else g], strict=True):
                    p.data.copy_(b)
            loss = tiny.loss_fn(worker[1](worker[0](xk)), yk)
            (loss / M).backward()
            losses.append(loss.item())
        for part, twin in zip(parts, worker, strict=True):
            for p, w in zip(part.parameters(), twin.parameters(), strict=True):
                p.grad = w.grad.clone()
        optimizer.step()
        for part, versions in zip(parts, history, strict=True):
            versions.append([p.detach().clone() for p in part.parameters()])
        assert [loss.item() for loss in made.step(x, y)] == losses


@pytest.mark.parametrize("correction", ["none", "error_feedback", "momentum_prediction"])
@pytest.mark.parametrize("cutover", [1, 3, swings])
@pytest.mark.parametrize("bank_dtype", [None, torch.bfloat16])
def test_recorded_microbatches_change_no_bit(correction, cutover, bank_dtype, monkeypatch):
    """Update g is pending while the old part of group g+1 is computed, as on a GPU."""
    monkeypatch.setattr(graphs, "PLAIN_GROUPS", 1)
    options = {"correction": correction, "cutover": cutover, "bank_dtype": bank_dtype, "max_grad_norm": 0.5}
    plain = run(**options)
    recorder = Again()
    found = run(recorder=recorder, slack=True, **options)
    assert found[0] == plain[0]
    assert all(torch.equal(a, b) for a, b in zip(found[1], plain[1], strict=True))
    assert recorder.recorded <= 3
    assert recorder.replayed >= (GROUPS - 5) * M, "old and fresh parts are both replayed"


def test_narrow_banks_differ_from_wide_ones_by_rounding_alone():
    wide = run(cutover=2, correction="error_feedback")[0]
    narrow = run(cutover=2, correction="error_feedback", bank_dtype=torch.bfloat16)[0]
    assert narrow != wide
    assert narrow == pytest.approx(wide, rel=2e-2)


@pytest.mark.parametrize("correction", ["none", "error_feedback"])
@pytest.mark.parametrize("cutover", [1, 3, swings])
def test_a_state_goes_on_bit_for_bit(correction, cutover):
    options = {"correction": correction, "cutover": cutover, "optimizer": tiny.adamw}
    whole = run(**options)
    for stop in (1, 2, 7):
        first = emulator(**options)
        for g in range(stop):
            first.step(*tiny.batch(g))
        second = emulator(**options)
        second.load_state_dict(first.state_dict())
        losses = [loss.item() for g in range(stop, GROUPS) for loss in second.step(*tiny.batch(g))]
        assert losses == whole[0][stop * M :]


@pytest.mark.parametrize(("saved", "now"), [(M, 2), (2, M), (0, 2), (2, 0), (1, 3)])
@pytest.mark.parametrize("correction", ["none", "error_feedback"])
def test_a_state_of_another_cutover_loads(saved, now, correction):
    """Its banks are those of the same updates; where none was published the master stands in, as after a flush."""
    first = emulator(cutover=saved, correction=correction)
    for g in range(5):
        first.step(*tiny.batch(g))
    second = emulator(cutover=now, correction=correction)
    second.load_state_dict(first.state_dict())
    changed = run(cutover=lambda g: saved if g < 5 else now, correction=correction)[0]
    losses = [loss.item() for g in range(5, GROUPS) for loss in second.step(*tiny.batch(g))]
    if saved == 0:  # nothing was published for group 5 to read: its old part reads z_5 too
        again = emulator(cutover=lambda g: saved if g < 6 else now, correction=correction)
        assert losses[:M] == [loss.item() for g in range(6) for loss in again.step(*tiny.batch(g))][5 * M :]
    else:
        assert losses == changed[5 * M :]


def test_fused_microbatches_are_the_same_to_rounding():
    for options in ({"cutover": 3}, {"cutover": 1, "correction": "error_feedback"}, {}, {"delay": 0}):
        one = run(**options)
        fused = run(fuse=True, **options)
        means = [sum(losses[g * M : (g + 1) * M]) / M for losses in (one[0], fused[0]) for g in range(GROUPS)]
        assert means[GROUPS:] == pytest.approx(means[:GROUPS], rel=1e-5)
        for a, b in zip(one[1], fused[1], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_fused_microbatches_are_computed_at_once():
    calls = []

    def counted(output, target):
        calls.append(len(target))
        return tiny.loss_fn(output, target)

    made = emulator(cutover=1, fuse=True)
    made.loss_fn = counted
    for g in range(3):
        made.step(*tiny.batch(g))
    made.eval(*tiny.batch(9))
    assert calls == [2, 6, 2, 6, 2, 6, 8]


def test_an_error_in_a_microbatch_leaves_nothing_behind():
    clean, made = emulator(cutover=2), emulator(cutover=2)
    plain, count = made.loss_fn, 0

    def fails_once(output, target):
        nonlocal count
        count += 1
        if count == 4 + 3:  # the first fresh microbatch of group 1
            raise ValueError("once")
        return plain(output, target)

    made.loss_fn = fails_once
    made.step(*tiny.batch(0))
    with pytest.raises(ValueError, match="once"):
        made.step(*tiny.batch(1))
    losses = [[loss.item() for loss in made.step(*tiny.batch(g))] for g in (1, 2)]
    clean.step(*tiny.batch(0))
    assert losses == [[loss.item() for loss in clean.step(*tiny.batch(g))] for g in (1, 2)]


def test_what_does_not_go_with_a_cutover_is_refused():
    with pytest.raises(UserError, match="delay_compensation"):
        emulator(cutover=2, correction="delay_compensation")
    emulator(cutover=M, correction="delay_compensation")
    for options in ({"delay": 2}, {"delay": 0}, {"mismatch": 1}):
        with pytest.raises(UserError, match="of PipeDream-2BW"):
            emulator(cutover=2, **options)
    with pytest.raises(UserError, match="one for each of the 1 stages"):
        emulator(cutover=[1, 2])
    with pytest.raises(UserError, match="from 0"):
        emulator(cutover=M + 1)
    assert build_correction("lr_scaling", steps=10, delay=0.5).factor(0) == 1.5**-1


@pytest.mark.parametrize("correction", ["none", "error_feedback"])
def test_a_state_goes_on_with_updates_cut_otherwise(correction):
    """Half of an update old in four microbatches, then, after three updates, all of it in two."""
    model, lam = tiny.Model(tied=False), 1.0 if correction == "error_feedback" else 0.0
    first = emulator(model, cutover=2, correction=correction)
    found = [loss.item() for g in range(3) for loss in first.step(*tiny.batch(g))]
    then = emulator(m=2, cutover=2, correction=correction)
    then.load_state_dict(first.state_dict())
    found += [loss.item() for g in range(3, GROUPS) for loss in then.step(*tiny.batch(g))]
    batches = [tiny.batch(g) for g in range(GROUPS)]
    losses, master = reference.train(
        model,
        batches,
        lambda g: 4 if g < 3 else 2,
        tiny.loss_fn,
        tiny.momentum,
        lam=lam,
        cutover=lambda g: 2,
        exact=True,
    )
    assert found == losses
    assert all(map(torch.equal, then.master.parameters(), master.parameters()))
