"""Checkpoints that somebody has changed and sealed again: every checksum is right, and what they say is not."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from fuzz.valid import tiny
from slipstream.errors import CheckpointError, UserError
from slipstream.train import checkpoint
from slipstream.train.manifest import sealed
from slipstream.train.master import load_master
from slipstream.train.sanity import check_state
from slipstream.train.session import run_rank


@pytest.fixture
def run(made, tmp_path) -> Path:
    """A finished run, with its data; the newest checkpoint is of step 4."""
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    return tmp_path


def newest(run: Path) -> Path:
    return run / "run" / "checkpoints" / "step-00000004"


def seal(path: Path, change=lambda body: None) -> None:
    body = json.loads((path / "manifest.json").read_text())
    del body["seal"]
    for name, value in body["files"].items():
        data = (path / name).read_bytes()
        value.update(bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
    change(body)
    (path / "manifest.json").write_text(json.dumps(sealed(body)))


def resume(run: Path) -> dict:
    return run_rank(None, tiny(run, "train.steps=6").model_dump())


MANIFESTS = {
    "a step no run has": lambda body: body.update(step=10**30),
    "a step that is text": lambda body: body.update(step="4x"),
    "a step that is true": lambda body: body.update(step=True),
    "a step below zero": lambda body: body.update(step=-1),
    "another step than its folder's": lambda body: body.update(step=2),
    "no pieces": lambda body: body.update(pieces=[]),
    "pieces of another kind": lambda body: body.update(pieces=7),
    "a piece outside": lambda body: body.update(pieces=["../stage-000"]),
    "files of another kind": lambda body: body.update(files=[1]),
    "sizes of another kind": lambda body: body["files"]["stage-000.json"].update(bytes="many"),
    "no meta": lambda body: body.pop("meta"),
    "no config": lambda body: body["meta"].pop("config"),
    "a config of another kind": lambda body: body["meta"].update(config=[1]),
    "a config with a stranger's key": lambda body: body["meta"]["config"].update(evil=1),
    "no data offset": lambda body: body["meta"].pop("data_offset"),
    "a data offset below zero": lambda body: body["meta"].update(data_offset=-5),
    "a data offset that is text": lambda body: body["meta"].update(data_offset="0"),
    "a fingerprint of another kind": lambda body: body["meta"].update(data_fingerprint=3),
}


@pytest.mark.parametrize("change", MANIFESTS.values(), ids=MANIFESTS)
def test_a_forged_manifest_is_refused_in_words(run, change):
    """On a resume either the whole start is refused, or this checkpoint is set aside and the one before it used."""
    seal(newest(run), change)
    with pytest.raises(CheckpointError):
        checkpoint.verify(newest(run)) and load_master(newest(run)) and resume(run)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused(run, value):
    path = newest(run) / "stage-000.safetensors"
    tensors = load_file(path)
    name = next(name for name in sorted(tensors) if name.startswith("master/"))
    tensors[name].view(-1)[3] = value
    save_file(tensors, path)
    seal(newest(run))
    with pytest.raises(CheckpointError, match="not finite"):
        load_master(run / "run")
    with pytest.raises(CheckpointError, match="not finite"):
        resume(run)


def test_a_buffer_may_hold_what_is_not_finite_where_the_models_own_does():
    mask, table = torch.full((2, 2), float("-inf")).triu(1), torch.ones(2)
    fresh = {"optimizer": {}, "hyper": {}, "buffers": {"mask": mask, "table": table}}
    state = {"group": 4, "skipped": 0, "master": {}, "banks": {}, "published": {}, **fresh}
    check_state(Path("here"), state, fresh, 4)
    damaged = {"mask": mask, "table": table * float("nan")}
    with pytest.raises(CheckpointError, match=r"buffers of 'table' is a tensor .* that is not finite"):
        check_state(Path("here"), {**state, "buffers": damaged}, fresh, 4)


@pytest.mark.parametrize("section", ["master", "banks", "optimizer"])
@pytest.mark.parametrize("how", ["shape", "kind", "missing"])
def test_tensors_that_are_not_those_of_the_run_are_refused(run, section, how):
    path = newest(run) / "stage-000.safetensors"
    tensors = load_file(path)
    name = next(
        name for name in sorted(tensors) if name.startswith(f"{section}/") and tensors[name].ndim == 2
    )
    tensor = tensors.pop(name)
    if how == "shape":
        tensors[name] = tensor.reshape(-1).clone()
    elif how == "kind":
        tensors[name] = tensor.to(torch.int64) if section != "optimizer" else torch.zeros(2)
    save_file(tensors, path)
    seal(newest(run))
    with pytest.raises(UserError):
        resume(run)


def test_a_piece_that_is_a_link_is_refused(run):
    path = newest(run) / "stage-000.safetensors"
    path.rename(run / "elsewhere")
    path.symlink_to(run / "elsewhere")
    with pytest.raises(CheckpointError, match="is a link"):
        checkpoint.verify(newest(run))


def test_a_setting_that_the_optimizer_did_not_have_yet_has_its_default(run, tmp_path):
    """Of an older version of it, or of torch's."""
    shutil.copytree(run / "run", run / "before")
    resume(run)
    expected = load_master(run / "run").weights
    shutil.rmtree(run / "run")
    shutil.move(run / "before", run / "run")
    path = newest(run) / "stage-000.json"
    tree = json.loads(path.read_text())
    for hyper in tree["tree"]["hyper"].values():
        hyper.pop("lookahead", None)
        hyper.pop("fused", None)
    path.write_text(json.dumps(tree))
    seal(newest(run))
    resume(run)
    found = load_master(run / "run").weights
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())


def test_a_state_of_another_step_is_refused(run):
    path = newest(run) / "stage-000.json"
    tree = json.loads(path.read_text())
    tree["tree"]["group"] = 3
    path.write_text(json.dumps(tree))
    seal(newest(run))
    with pytest.raises(CheckpointError, match="step 3"):
        resume(run)


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.update(layers=10**9),
        lambda model: model.update(dim=2**39),
        lambda model: model.update(vocab=64.5),
        lambda model: model.update(heads="2"),
        lambda model: model.update(tied=3),
        lambda model: model.update(norm_eps=float("nan")),
        lambda model: model.update(extra=1),
    ],
)
def test_a_model_that_its_weights_are_not_is_refused_before_it_is_built(run, change):
    seal(newest(run), lambda body: change(body["meta"]["model"]))
    with pytest.raises(UserError):
        load_master(run / "run")


def test_a_run_whose_log_was_removed_goes_on(run):
    for name in ("events.jsonl", "config.toml"):
        (run / "run" / name).unlink()
    assert resume(run)["step"] == 6


def test_an_honest_seal_is_accepted(run):
    seal(newest(run))
    assert resume(run)["step"] == 6
