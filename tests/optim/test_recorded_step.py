"""A recorded step of Muon does what a plain one does: on a GPU as a CUDA graph; on a CPU, in Triton's interpreter where
that is installed, by a recorder that runs Python again."""

import contextlib

import pytest
import torch

from slipstream import lists
from slipstream.kernels import tables
from slipstream.kernels.compiler import runs_on
from slipstream.optim import muon, recorded_step
from slipstream.optim.muon import Muon

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SMALL = [[(24, 16)] * 3 + [(16, 40)] * 2, [(4, 24, 16)] * 2]
LARGER = [[(512, 512)] * 6 + [(512, 1376)] * 3, [(640, 1280)] * 4]


class Again:
    """Runs Python again. Nothing may be copied to the device by what is recorded: it would not be there in a replay."""

    def __init__(self, body):
        self.body = body

    def replay(self):
        known = self.copied()
        self.body()
        assert self.copied() == known

    @staticmethod
    def copied():
        return tables._addresses.cache_info().misses, tables._blocks.cache_info().misses


@pytest.fixture
def recorder(monkeypatch):
    """Of the machine's own kind."""
    if DEVICE.type == "cpu":
        # Directions are as wide as weights on a CPU; a GPU has narrower ones, so that our kernel adds them.
        monkeypatch.setattr(lists, "_differ", lambda *_: True)
        monkeypatch.setattr(recorded_step, "worth_recording", lambda *_: True)
        monkeypatch.setattr(recorded_step, "beside", contextlib.nullcontext)
        monkeypatch.setattr(torch.cuda, "Stream", lambda *_: None)
        monkeypatch.setattr(recorded_step, "captured", lambda body, _: (Again(body), None))


def trained(shapes, places, most, monkeypatch, **options):
    """Eight steps at falling rates, with gradients at so many places in turn; the weights, and what was recorded."""
    monkeypatch.setattr(recorded_step, "MOST_RECORDINGS", most)
    random = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(shape, generator=random).to(DEVICE)) for shape in shapes]
    optimizer = Muon([{"params": params, "algorithm": "muon"}], **options)
    grads = [[torch.empty_like(p) for p in params] for _ in range(places)]
    for step in range(8 if places < 3 else 12):
        optimizer.param_groups[0]["lr"] = 1e-2 / (step + 1)
        for parameter, grad in zip(params, grads[step % places], strict=True):
            parameter.grad = grad.copy_(torch.randn(grad.shape, generator=random))
        optimizer.step()
    state = [optimizer.state[p]["momentum_buffer"] for p in params]
    return [*(p.detach() for p in params), *state], len(optimizer._steps._recordings)


@pytest.mark.skipif(not runs_on(DEVICE), reason="needs Triton")
@pytest.mark.parametrize(
    ("places", "options"),
    [(1, {}), (2, {}), (3, {}), (2, {"state_dtype": "bfloat16"}), (2, {"lookahead": 2, "steps": 3})],
)
@pytest.mark.parametrize("shapes", SMALL + (LARGER if DEVICE.type == "cuda" else []))
def test_a_recorded_step_changes_no_bit(shapes, places, options, recorder, monkeypatch):
    plain, none = trained(shapes, places, 0, monkeypatch, **options)
    found, some = trained(shapes, places, 8, monkeypatch, **options)
    assert (none, some) == (0, 1)  # wherever the gradients lie
    assert all(map(torch.equal, found, plain))


@pytest.mark.skipif(not runs_on(DEVICE), reason="needs Triton")
def test_what_cannot_be_recorded_is_done_plainly_with_one_warning(recorder, monkeypatch):
    def refuse(*_):
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    plain, _ = trained(SMALL[0], 1, 0, monkeypatch)
    monkeypatch.setattr(recorded_step, "captured", refuse)
    with pytest.warns(UserWarning, match="launched one by one: operation not permitted") as caught:
        found, recorded = trained(SMALL[0], 1, 8, monkeypatch)
    assert (recorded, len(caught)) == (0, 1)
    assert all(map(torch.equal, found, plain))


@pytest.mark.skipif(not runs_on(DEVICE), reason="needs Triton")
def test_a_recording_that_fails_in_the_middle_leaves_everything_as_it_was(recorder, monkeypatch):
    """Out of memory on the second stack, when the first is written: its weights were zero from then on."""
    plain, _ = trained(SMALL[0], 1, 0, monkeypatch)
    own = muon.add_recorded
    writes = []

    def fails(weights, *rest):
        own(weights, *rest)
        writes.append(1)
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(muon, "add_recorded", fails)
    with pytest.warns(UserWarning, match="launched one by one: no room"):
        found, recorded = trained(SMALL[0], 1, 8, monkeypatch)
    assert (recorded, len(writes)) == (0, 1)
    assert all(map(torch.equal, found, plain))


@pytest.mark.skipif(not runs_on(DEVICE), reason="needs Triton")
def test_a_step_on_some_of_the_matrices_is_not_recorded(recorder):
    """A master in halves steps bucket by bucket, and recordings of all of them would keep more than it saves."""
    params = [torch.nn.Parameter(torch.ones(24, 16, device=DEVICE)) for _ in range(2)]
    optimizer = Muon([{"params": params, "algorithm": "muon"}])
    for _ in range(8):
        for parameter in params:
            parameter.grad = torch.ones_like(parameter)
            optimizer.step()
            parameter.grad = None
    assert not optimizer._steps._recordings


@pytest.mark.skipif(not runs_on(DEVICE), reason="needs Triton")
def test_places_that_never_come_again_are_forgotten(recorder, monkeypatch):
    monkeypatch.setattr(recorded_step, "MOST_MET", 4)
    steps, changed = recorded_step.RecordedSteps(), [torch.zeros(4, device=DEVICE)]
    for place in range(20):
        assert not steps.run(place, lambda *_: None, changed, changed, [], [(1.0, 1.0)])
        assert len(steps._met) <= 4
