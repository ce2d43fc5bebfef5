"""Valid files of every kind, small enough to be copied and damaged thousands of times."""

from __future__ import annotations

import gzip
import json
import lzma
import shutil
from pathlib import Path

import numpy as np
import torch

from fuzz import mutate
from slipstream.config import load, resolve
from slipstream.data.shards import write_shard
from slipstream.data.tokenizer import Tokenizer
from slipstream.plan.devices import PRESETS
from slipstream.plan.profile import PARTS, Measured
from slipstream.train.export import export
from slipstream.train.master import load_master
from slipstream.train.session import run_rank

ROOT = Path(__file__).parents[2]
VOCAB = 300
TEXT = "The quick brown fox jumps over the lazy dog.\nThen it sleeps until it is hungry again.\n\f\n" * 40
TINY = [
    f"model.vocab={VOCAB}", "model.dim=8", "model.layers=2", "model.heads=2", "model.kv_heads=1", "model.ffn=8",
    "data.sequence=8", "pipeline.schedule=emulate", "pipeline.microbatches=2", "pipeline.microbatch_size=1",
    "train.steps=4", "train.eval_every=2", "train.eval_batches=1", "train.device=cpu", "train.quiet=true",
    "checkpoint.every=2", "optim.lr=0.01", "train.timeline_at=0",
]  # fmt: skip


def make_shards(folder: Path) -> None:
    random_tokens = np.random.default_rng(0)
    folder.mkdir(exist_ok=True)
    for name in ("train_0", "train_1", "val_0"):
        write_shard(folder / f"{name}.bin", random_tokens.integers(0, VOCAB, 400).astype("<u2"))
    Tokenizer.train([TEXT], VOCAB).save(folder / "tokenizer.json")
    mutate.write_json(folder / "meta.json", {"vocab": VOCAB, "end_of_document": 0, "documents": {"train": 3}})


def tiny(folder: Path, *overrides: str):
    places = [f"run.dir={folder / 'run'}", f"data.path={folder / 'data'}"]
    return resolve(load(None, [*TINY, *places, *overrides]))


def make_run(folder: Path) -> None:
    make_shards(folder / "data")
    torch.set_num_threads(1)
    run_rank(None, tiny(folder).model_dump())


def make_export(folder: Path) -> None:
    make_run(folder)
    master = load_master(folder / "run")
    assert master.model is not None
    export(master.weights, master.model, folder / "hf", tokenizer=master.tokenizer, sequence=8)
    shutil.rmtree(folder / "run")


def make_study(folder: Path) -> None:
    for name in ("toy.toml", "a-cutover.toml", "b-muon-adamw.toml", "cpu-moe.toml"):
        shutil.copy(ROOT / "studies" / name, folder)


def make_results(folder: Path) -> None:
    """The shipped file of a study and its results."""
    shutil.copy(ROOT / "studies" / "a-moe.toml", folder / "study.toml")
    (folder / "results").mkdir()
    shutil.copy(ROOT / "docs" / "results" / "a-moe.jsonl.gz", folder / "results")


def make_plan_files(folder: Path) -> None:
    device = PRESETS["h100"]
    figures = {
        "name": "mine",
        "peak_flops": device.peak_flops,
        "memory_bytes": device.memory_bytes,
        "per_node": 8,
    }
    figures |= {"efficiency": 0.4, "intra_latency": 1e-5, "inter_bandwidth": 1e10, "source": "a sheet"}
    (folder / "device.toml").write_text(mutate.toml(figures))
    table = json.loads((ROOT / "src/slipstream/plan/penalty.json").read_text())
    mutate.write_json(
        folder / "penalty.json",
        {"about": "x", "entries": [one for one in table["entries"] if one["optimizer"] == "muon"]},
    )
    from slipstream.models.sizes import PRESETS as MODELS

    measured = Measured.of(MODELS["cpu-default"], 128, "muon")
    names = (
        "forward_overhead",
        "forward_per_sequence",
        "backward_overhead",
        "backward_per_sequence",
        "update",
    )
    timing = dict.fromkeys(names, 1e-3)
    mutate.write_json(
        folder / "profile.json",
        {"measured": vars(measured), "device": "cpu", "memory_bytes": 8e9, "timings": dict.fromkeys(PARTS, timing),
         "link": {"latency": 1e-5, "bandwidth": 1e9}, "engine": {"action": 1e-5, "update": 1e-5}},
    )  # fmt: skip


def make_texts(folder: Path) -> None:
    inputs = folder / "texts"
    inputs.mkdir()
    (inputs / "a.txt").write_text(TEXT)
    rows = "".join(json.dumps({"text": part, "id": i}) + "\n" for i, part in enumerate(TEXT.split("\f")))
    (inputs / "b.jsonl").write_text(rows)
    (inputs / "c.txt.gz").write_bytes(gzip.compress(TEXT.encode(), mtime=0))
    (inputs / "d.jsonl.xz").write_bytes(lzma.compress(rows.encode()))
    try:
        import pyarrow
        from pyarrow import parquet

        parquet.write_table(pyarrow.table({"text": TEXT.split("\f")}), inputs / "e.parquet")
        import zstandard

        (inputs / "f.txt.zst").write_bytes(zstandard.compress(TEXT.encode()))
    except ImportError:
        pass  # the extra `data` is not installed
    Tokenizer.train([TEXT], VOCAB).save(folder / "tokenizer.json")


def nothing(_: Path) -> None: ...


def make_config(folder: Path) -> None:
    for name in ("laptop.toml", "experts.toml", "synchronous.toml", "one_gpu_42m.toml"):
        shutil.copy(ROOT / "examples" / name, folder)
