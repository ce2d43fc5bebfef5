"""Compile a study's models once, ahead of its runs.

Torch keeps compiled code on disk, and several workers that start together would each compile the same graphs
before the first of them has stored any. Two updates on random tokens, with a validation, bring every graph of a
shape into that cache. They need no data, so this can go on while text is still being prepared.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from slipstream.config import Config
from slipstream.data.shards import token_dtype, write_shard
from slipstream.errors import UserError
from slipstream.study.pool import Pool
from slipstream.study.sweep import Point, Study
from slipstream.study.worker import shape_of

POLL_SECONDS = 1.0
UPDATES = 2


def warm_up(study: Study) -> Iterator[tuple[str, float]]:
    """(name of a run, seconds its like took) for each shape that is compiled."""
    with TemporaryDirectory(prefix="slipstream-warm-") as folder, Pool(1, Path(folder)) as pool:
        for number, point in enumerate(_one_of_each_shape(study)):
            short = rehearsal(point.config, Path(folder) / f"data-{number}")
            pool.start(replace(point, config=short), Path(folder) / f"run-{number}")
            while not (ended := pool.wait(POLL_SECONDS)):
                pass
            ((_, report),) = ended
            if report.message:
                raise UserError(f"The run {point.name} could not be compiled: {report.message}")
            yield point.name, report.seconds


def _one_of_each_shape(study: Study) -> list[Point]:
    found: list[tuple[object, Point]] = []
    for point in study.expand({}).points:
        shape = shape_of(point.config.model_dump())
        if point.config.train.compile and all(shape != known for known, _ in found):
            found.append((shape, point))
    return [point for _, point in found]


def rehearsal(config: Config, folder: Path) -> Config:
    """A resolved run made short, with a validation after each update; writes random tokens for it into `folder`."""
    vocab = config.model.vocab
    assert vocab is not None
    folder.mkdir(parents=True)
    random = np.random.default_rng(0)
    for split in ("train", "val"):
        tokens = random.integers(0, vocab, UPDATES * config.tokens_per_step + 1)
        write_shard(folder / f"{split}_000.bin", tokens.astype(token_dtype(vocab)))
    (folder / "meta.json").write_text(json.dumps({"vocab": vocab, "end_of_document": 0}))
    return config.changed(
        train={"steps": UPDATES, "eval_every": 1, "eval_batches": 1},
        optim={"warmup": 0.0, "sync_start": 0.0, "sync_finish": 0.0},
        data={"path": str(folder)},
    )
