"""What can be known before torch is imported is refused before torch is imported, and leaves nothing behind."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
from tests.train.conftest import TINY, make_data

from slipstream.config import load
from slipstream.data.shards import write_shard
from slipstream.errors import UserError
from slipstream.train import preflight
from slipstream.train.preflight import cpu_only, prepare

REFUSED = {
    "train.stpes=3": "There is no key",
    "train.trackers=wandb": "train.trackers names wandb, which is not installed. Install it",
    "checkpoint.remote=nowhere://x": "checkpoint.remote = 'nowhere://x' cannot be used",
    "run.fork_from=/nowhere": "run.fork_from = '/nowhere' has no checkpoint",
    "data.path=/nowhere": "data.path /nowhere is not a folder",
    "data.sequence=1000000": "too few for a sequence of 1000000",
    "model.init_from=/nowhere": "/nowhere does not exist. Name the folder of a model",
    "model.module=nowhere:layers": "there is no module 'nowhere'",
    "model.module=nowhere": "is not MODULE:NAME",
}


def test_refused_without_torch_and_without_a_folder(tmp_path):
    """All of them in one process, which has not imported torch in the end."""
    code = (
        "import contextlib, io, json, sys; from slipstream.cli import main\n"
        "for arguments in json.loads(sys.argv[1]):\n"
        "    with contextlib.redirect_stderr(io.StringIO()) as said:\n"
        "        try: main(arguments)\n"
        "        except SystemExit as end: assert end.code == 2, end.code\n"
        "    print(json.dumps([said.getvalue(), 'torch' in sys.modules]))\n"
    )
    data = f"data.path={make_data(tmp_path / 'data')}"
    refused = REFUSED | ({"train.device=cuda": "built without GPUs"} if cpu_only() else {})
    commands = []
    for override in refused:
        own = override.startswith("model.module")
        tiny = [
            key for key in TINY if not own or not key.startswith("model.") or key.startswith("model.vocab")
        ]
        commands.append(["train", *tiny, data, f"run.dir={tmp_path / 'run'}", override])
    done = subprocess.run([sys.executable, "-c", code, json.dumps(commands)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    for (override, words), (said, torch_is_there) in zip(refused.items(), answers, strict=True):
        assert words in " ".join(said.split()), override
        assert not torch_is_there, override
    assert not (tmp_path / "run").exists()


def test_torchs_schedules_mask_documents_from_a_version_on(tmp_path, monkeypatch):
    settings = ["pipeline.schedule=1f1b", "pipeline.stages=2", "data.mask_documents=true"]
    given = load(None, [*TINY, f"run.dir={tmp_path / 'run'}", *settings])
    monkeypatch.setattr(preflight, "version", lambda name: "2.13.0+cpu")
    preflight.check(given)
    monkeypatch.setattr(preflight, "version", lambda name: "2.12.1")
    with pytest.raises(UserError, match=r"needs torch 2\.13"):
        preflight.check(given)


def test_the_banner_needs_no_torch_and_names_what_matters(tmp_path):
    code = (
        "import sys; from slipstream.cli.train import parse; from slipstream.train.preflight import prepare\n"
        "from slipstream.train.banner import banner; from slipstream.train.cutovers import expected\n"
        "print(banner(expected(prepare(parse(sys.argv[1:]))))); assert 'torch' not in sys.modules"
    )
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            code,
            "pipeline.stages=4",
            "run.dir=x/y",
            "train.fp8=rowwise",
            "train.device=cpu",
        ],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    for words in ("1.31M parameters", "2,048 tokens", "2bw: P=4 stages, m=8, c=5", "x/y", "standard library"):
        assert words in done.stdout, words
    assert "cpu, float32, products in fp8 (rowwise)" in done.stdout


def shards(folder, vocab: int | None):
    folder.mkdir()
    for split in ("train", "val"):
        write_shard(folder / f"{split}_0.bin", (np.arange(5000) % 50).astype("<u2"))
    if vocab is not None:
        (folder / "meta.json").write_text(json.dumps({"vocab": vocab, "end_of_document": 0}))
    return folder


def test_the_vocabulary_is_that_of_the_shards(tmp_path):
    with_meta, without = shards(tmp_path / "a", 777), shards(tmp_path / "b", None)
    assert prepare(load(None, [f"data.path={with_meta}"])).model.vocab == 777
    assert prepare(load(None, [f"data.path={with_meta}", "model.vocab=1024"])).model.vocab == 1024
    assert prepare(load(None, [f"data.path={without}"])).model.vocab == 4096
    assert prepare(load(None, [])).model.vocab == 4096


def test_a_vocabulary_that_is_too_small_is_refused(tmp_path):
    from slipstream.train.preflight import check

    config = prepare(load(None, [f"data.path={shards(tmp_path / 'a', 777)}", "model.vocab=500"]))
    with pytest.raises(UserError, match="uses a vocabulary of 777, but the model has 500"):
        check(config)


def test_nothing_compiles_so_no_compiler_is_loaded(tmp_path):
    code = (
        "import sys, slipstream.models.llama, slipstream.models.stages, slipstream.train.generate\n"
        "import slipstream.train.export\n"
        "assert 'torch' in sys.modules and 'torch._dynamo' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_fork_of_nothing_is_refused_before_anything_starts(tmp_path):
    """But where a run is there already, here or as a copy elsewhere, it goes on without what it was forked from."""

    def check(*overrides):
        preflight.check(
            prepare(
                load(None, [f"run.dir={tmp_path / 'run'}", f"run.fork_from={tmp_path / 'none'}", *overrides])
            )
        )

    with pytest.raises(UserError, match="has no checkpoint"):
        check()
    check(f"checkpoint.remote=file://{tmp_path}/copies")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "lock").write_text("7\n")
    check()
