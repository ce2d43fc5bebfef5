"""Validation at the master, and the number it is measured against.

Invariant: nothing here changes the trajectory: the next group reads the bank it would have read anyway.
"""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from slipstream.data.shards import open_shard
from slipstream.train.batches import Share, load
from slipstream.train.board import Board
from slipstream.train.engine import RunEngine, losses_of
from slipstream.train.sources import Dataset

OWN_TOKENS = 100_000  # of a function's batches that are counted
SHARD_TOKENS = 20_000_000  # the same, of shards


def validate(
    engine: RunEngine,
    dataset: Dataset,
    batches: int,
    share: Share,
    device: torch.device,
    board: Board,
    step: int,
) -> float:
    """The validation loss, the same on every rank."""
    batches = max(1, min(batches, dataset.num_windows // dataset.batch_size))
    engine.drain()
    losses = []
    for group in range(batches):
        losses += losses_of(engine.eval, load(dataset, group, share).to(device))
    if share.last:
        board.post(f"valid/{step}/{share.data_rank}", torch.stack(losses).double().mean().item())
    means = board.wait(*(f"valid/{step}/{rank}" for rank in range(share.data_ranks)))
    return sum(means) / len(means)


def unigram_entropy(dataset: Dataset, vocab: int) -> float:
    """Nats per token of the best model that knows only how often each token occurs."""
    if dataset.paths:
        counts = _counted(tuple((path, path.stat().st_mtime_ns) for path in dataset.paths), vocab)
    else:
        counts, group = np.zeros(vocab, dtype=np.int64), 0
        while counts.sum() < OWN_TOKENS:
            _, targets = dataset.batch(group)
            counts += np.bincount(targets[targets >= 0].numpy(), minlength=vocab)[:vocab]
            group += 1
    share = counts[counts > 0] / counts.sum()
    return float(-(share * np.log(share)).sum()) if share.size else math.nan


@cache  # a process that trains many runs counts its text once
def _counted(files: tuple[tuple[Path, int], ...], vocab: int) -> NDArray[np.int64]:
    counts, left = np.zeros(vocab, dtype=np.int64), SHARD_TOKENS
    for path, _ in files:
        shard = open_shard(path)
        counts += np.bincount(np.asarray(shard[:left]), minlength=vocab)[:vocab]
        left -= min(left, len(shard))
    return counts
