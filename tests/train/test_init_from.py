"""Training that starts from the weights in a Hugging Face folder."""

from __future__ import annotations

import pytest
import torch

from slipstream.cli import main
from slipstream.models.sizes import ModelConfig
from slipstream.models.stages import build_model
from slipstream.train import export

SHAPE = ModelConfig(vocab=64, dim=16, layers=4, heads=2, kv_heads=1, ffn=32)  # the tiny run's


@pytest.fixture
def folder(tmp_path):
    """A model with other weights than any seed of the tiny run gives."""
    state = {name: 1.5 * p.detach() for name, p in build_model(SHAPE, seed=7).named_parameters()}
    export.export(state, SHAPE, tmp_path / "theirs")
    return tmp_path / "theirs", state


def test_a_run_starts_from_those_weights(runs, folder):
    path, state = folder
    still = ("optim.name=adamw", "optim.lr=1e-12", "train.steps=2", "pipeline.schedule=emulate")
    runs.train("still", f"model.init_from={path}", *still)
    found = runs.weights("still")
    state["head.weight"] = state["embedding.weight"]  # tied
    assert found.keys() == state.keys()
    for name, weight in state.items():
        torch.testing.assert_close(found[name], weight, rtol=0, atol=1e-6)


def test_it_does_not_depend_on_the_number_of_stages_nor_on_a_stop(runs, folder):
    path, _ = folder
    given = (f"model.init_from={path}", "optim.name=adamw", "checkpoint.every=4", "train.steps=12")
    runs.train("whole", *given, "pipeline.schedule=emulate")
    runs.train("cut", *given, "pipeline.stages=2")
    for step in (8, 12):  # as if it had been killed after step 4
        for piece in (runs.folder / "cut" / "checkpoints").glob(f"step-*{step}"):
            piece.rename(piece.with_name(f"gone-{step}"))
    runs.train("cut", *given, "pipeline.stages=4")
    whole, cut = runs.weights("whole"), runs.weights("cut")
    assert all(torch.equal(cut[name], weight) for name, weight in whole.items())


def test_a_dry_run_shows_the_folders_shape(folder, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["train", "--dry-run", f"model.init_from={folder[0]}", "optim.name=adamw"])
    assert not ended.value.code
    assert "dim = 16" in capsys.readouterr().out
