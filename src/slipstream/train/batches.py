"""Groups of a dataset as the tensors one rank needs, loaded ahead of time.

Invariant: what a rank gets is a pure function of (group, its share), so neither P nor D nor a restart changes the
tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.data.tokens import Prefetch
from slipstream.models.loss import with_group_count
from slipstream.train.sources import Dataset


@dataclass(frozen=True)
class Batch:
    """One group on one rank: inputs [B, T] on the first stage, packed targets [B, T + 1] on the last."""

    inputs: Tensor | None
    targets: Tensor | None

    def to(self, device: torch.device) -> Batch:
        """Start the copies to the device; pinned memory lets them overlap with compute."""
        return Batch(_to(self.inputs, device), _to(self.targets, device))


@dataclass(frozen=True)
class Share:
    """Which part of a group a rank needs."""

    microbatches: int
    first: bool = True
    last: bool = True
    data_rank: int = 0
    data_ranks: int = 1
    pin: bool = False


def load(dataset: Dataset, group: int, share: Share) -> Batch:
    """Group `group` of the dataset as this rank needs it."""
    if not (share.first or share.last):
        return Batch(None, None)
    inputs, targets = dataset.batch(group)
    inputs, targets = _rows_of(inputs, share), _rows_of(with_group_count(targets), share)
    if share.pin:
        inputs, targets = inputs.pin_memory(), targets.pin_memory()
    return Batch(inputs if share.first else None, targets if share.last else None)


def ahead(dataset: Dataset, share: Share, start: int) -> Prefetch[Batch]:
    """A thread that keeps the next groups ready, from `start` on."""
    return Prefetch(lambda group: load(dataset, group, share), start)


def _rows_of(rows: Tensor, share: Share) -> Tensor:
    """This data rank's rows of every microbatch."""
    size = rows.shape[0] // share.microbatches // share.data_ranks
    grid = rows.view(share.microbatches, share.data_ranks, size, rows.shape[1])
    return grid[:, share.data_rank].reshape(-1, rows.shape[1])


def _to(tensor: Tensor | None, device: torch.device) -> Tensor | None:
    return None if tensor is None else tensor.to(device, non_blocking=True)
