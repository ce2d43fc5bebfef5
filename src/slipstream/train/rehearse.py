"""A run made short and given random tokens: all of its code, none of its data. For compiling before the real runs."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from slipstream.config import Config
from slipstream.data.shards import token_dtype, write_shard

UPDATES = 2


def rehearsal(config: Config, folder: Path) -> Config:
    """A resolved run as two updates with a validation after each; writes its tokens into `folder`."""
    return config.changed(
        train={"steps": UPDATES, "eval_every": 1, "eval_batches": 1},
        optim={"warmup": 0.0, "sync_start": 0.0, "sync_finish": 0.0},
        data={"path": str(_random_tokens(folder, config))},
    )


def _random_tokens(folder: Path, config: Config) -> Path:
    assert config.model.vocab is not None
    folder.mkdir(parents=True)
    random = np.random.default_rng(0)
    count = UPDATES * config.tokens_per_step + 1
    for split in ("train", "val"):
        tokens = random.integers(0, config.model.vocab, count).astype(token_dtype(config.model.vocab))
        write_shard(folder / f"{split}_000.bin", tokens)
    (folder / "meta.json").write_text(json.dumps({"vocab": config.model.vocab, "end_of_document": 0}))
    return folder
