"""A run small enough to train in a second: a few thousand parameters on random tokens with structure."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from slipstream.config import Config, load, resolve
from slipstream.data.shards import write_shard
from slipstream.distributed import RankPool
from slipstream.train import session
from slipstream.train.master import load_master

VOCAB = 64
TINY = [
    f"model.vocab={VOCAB}",
    "model.dim=16",
    "model.layers=4",
    "model.heads=2",
    "model.kv_heads=1",
    "model.ffn=32",
    "data.sequence=16",
    "pipeline.microbatches=4",
    "pipeline.microbatch_size=2",
    "train.steps=12",
    "train.eval_every=0",
    "train.eval_batches=1",
    "train.device=cpu",
    "checkpoint.every=4",
    "optim.lr=0.01",
]


def make_data(folder: Path, tokens: int = 20_000) -> Path:
    """Every token is the last one plus a small step: something to learn."""
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(0)
    for split in ("train", "val"):
        stream = np.cumsum(random.integers(0, 4, tokens)) % VOCAB
        write_shard(folder / f"{split}_000.bin", stream.astype("<u2"))
    return folder


@pytest.fixture(scope="session")
def data(tmp_path_factory) -> Path:
    return make_data(tmp_path_factory.mktemp("data"))


class Runs:
    """Runs of the tiny config in one folder."""

    def __init__(self, folder: Path, data: Path, pool: RankPool) -> None:
        self.folder, self.data, self.pool = folder, data, pool

    def config(self, name: str, *overrides: str) -> Config:
        paths = [f"run.dir={self.folder / name}", f"data.path={self.data}"]
        given = load(None, [*TINY, *paths, *overrides])
        pipeline = given.pipeline
        # Half of each update old, whatever the stages: the default is another trajectory at every number of them.
        named = any(text.startswith("pipeline.cutover") for text in overrides)
        if not (named or given.synchronous) and pipeline.delay == 1 and pipeline.mismatch == 0:
            half = pipeline.model_copy(update={"cutover": pipeline.microbatches // 2 or 1})
            given = given.model_copy(update={"pipeline": half})
        return resolve(given)

    def train(self, name: str, *overrides: str) -> dict:
        """Train in this process (emulate) or on ranks; the leader's answer."""
        config = self.config(name, *overrides)
        if config.pipeline.schedule == "emulate":
            torch.set_num_threads(1)
            return session.run_rank(None, config.model_dump())
        assert config.pipeline.stages is not None
        ranks = config.pipeline.stages * config.pipeline.data_ranks
        return self.pool.run(session.run_rank, config.model_dump(), ranks=ranks, timeout=250)[0]

    def weights(self, name: str) -> dict[str, torch.Tensor]:
        return load_master(self.folder / name).weights

    def events(self, name: str, kind: str | None = None) -> list[dict]:
        path = self.folder / name / "events.jsonl"
        if not path.exists():
            return []
        lines = path.read_text().splitlines()
        # Some tests look a hundred times a second: what has not even the word of its kind is not read.
        events = [json.loads(line) for line in lines if line.endswith("}") and (kind is None or kind in line)]
        return [event for event in events if kind in (None, event["event"])]

    def steps(self, name: str) -> list[int]:
        return [event["step"] for event in self.events(name, "step")]


@pytest.fixture
def runs(tmp_path, data, pool) -> Runs:
    return Runs(tmp_path, data, pool)


@pytest.fixture(scope="session")
def reference(tmp_path_factory, data, four_ranks) -> Runs:
    """One finished run that was never disturbed, to hold the others against."""
    made = Runs(tmp_path_factory.mktemp("reference"), data, four_ranks)
    made.train("2bw", "pipeline.schedule=emulate")
    made.train("synchronous", "pipeline.schedule=emulate", "pipeline.delay=0")
    return made


def assert_equal_weights(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    different = [name for name in one if not torch.equal(one[name], other[name])]
    assert not different, different
