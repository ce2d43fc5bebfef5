"""Is the run still well? Spikes, non-finite updates, and silent divergence of what must be equal.

    spike      loss > mean + k * deviation of the recent losses
    failure    as many non-finite updates in a row as count; with rollback, a spike
    divergence replicas over the data axis, tied weights or banks whose bits differ

A bit-level checksum of a tensor is the sum of its bytes' words, plain and weighted by position, both modulo
2^64: equal tensors give equal sums on every device, and neither a changed bit nor a swap goes unseen.
"""

from __future__ import annotations

import hashlib
import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slipstream.optim.sharded import local
from slipstream.pipeline.compact import Halves, whole

PIECE = 1 << 24  # words that are summed at once
NAMED = 3  # damaged weights in an error
WINDOW = 64
WARM_UP = 16  # losses seen before a spike can be told from the steep start


@dataclass
class Monitor:
    """Watches the losses and norms of finished steps. A failure is remembered: stages hear of it some groups
    later, and what came in between may look well again."""

    spike: float
    max_skipped: int
    # From then on a spike is a failure too: there is something to go back to.
    spike_fails_after: int | None = None
    failed_at: int | None = None  # the first step of what failed
    failure: str = ""
    skipped: bool = False  # it failed by updates that were not finite
    _recent: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    _skipped_in_a_row: int = 0

    def go_on(self, before: Monitor) -> None:
        """With what another one has seen, of the same run."""
        self._recent, self._skipped_in_a_row = before._recent, before._skipped_in_a_row

    def observe(self, step: int, loss: float, skipped: bool) -> str | None:
        """A warning in words, if this step deserves one."""
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if skipped else 0
        if skipped:
            count = self._skipped_in_a_row
            if count == self.max_skipped:
                self._fail(step - count + 1, f"{count} updates in a row were not finite.", skipped=True)
            return f"Update {step} was not finite and was skipped on all stages ({count} in a row)."
        warning = self._spike(step, loss)
        if warning is not None and self.spike_fails_after is not None and step > self.spike_fails_after:
            self._fail(step, warning)
        self._recent.append(loss)
        return warning

    def _spike(self, step: int, loss: float) -> str | None:
        if not self.spike or len(self._recent) < WARM_UP:
            return None
        mean = sum(self._recent) / len(self._recent)
        deviation = math.sqrt(sum((x - mean) ** 2 for x in self._recent) / len(self._recent))
        deviation = max(deviation, 1e-3 * abs(mean))
        if loss <= mean + self.spike * deviation:
            return None
        return (
            f"Loss {loss:.4f} at step {step} is {(loss - mean) / deviation:.0f} deviations above its recent mean "
            f"{mean:.4f}."
        )

    def _fail(self, step: int, why: str, skipped: bool = False) -> None:
        if self.failed_at is None:
            self.failed_at, self.failure, self.skipped = step, why, skipped


@dataclass
class Best:
    """The lowest validation loss so far. Every rank sees the same losses at the same steps, so all of them agree."""

    step: int | None = None
    loss: float = math.inf
    since: int = 0  # validations after the best one

    @classmethod
    def after(cls, validations: Iterable[tuple[int, float]]) -> Best:
        best = cls()
        for step, loss in validations:
            best.see(step, loss)
        return best

    def see(self, step: int, loss: float) -> bool:
        """Take note of a validation; whether it is the best so far."""
        if loss < self.loss:
            self.step, self.loss, self.since = step, loss, 0
            return True
        self.since += 1
        return False


def checksum(tensors: Iterable[Tensor]) -> str:
    """A hash of the bits of the tensors, in order."""
    pairs = [_sums(tensor) for tensor in tensors]
    # One wait for the device, not one a tensor.
    sums = torch.stack(pairs).cpu().numpy() if pairs else np.empty(0)
    return hashlib.blake2b(sums.tobytes(), digest_size=8).hexdigest()


def _sums(tensor: Tensor) -> Tensor:
    """Of the words, plain and weighted by position. A piece at a time: as int64 an embedding would fill a GPU."""
    words = tensor.detach().contiguous().flatten()
    words = words.view(
        {2: torch.int16, 4: torch.int32, 8: torch.int64}.get(words.element_size(), torch.uint8)
    )
    total = torch.zeros(2, dtype=torch.int64, device=words.device)
    for start in range(0, words.numel(), PIECE):
        piece = words[start : start + PIECE].to(torch.int64)
        position = torch.arange(2 * start + 1, 2 * (start + piece.numel()), 2, device=words.device)
        total += torch.stack([piece.sum(), (piece * position).sum()])
    return total


def fingerprint(state: Mapping[str, Any], tied: Iterable[str], *, one_age: bool = True) -> dict[str, str]:
    """Checksums of one rank's state: everything the data ranks must agree on, and the tied weights, in the banks too
    where all stages read weights of one age."""
    tied = set(tied)
    found = {"master": checksum(map(whole, state["master"].values()))}
    for reader, bank in state["banks"].items():
        found[f"{reader} bank"] = checksum(bank.values())
    for name in tied & state["master"].keys():
        found[f"tied/{name}/master"] = checksum([whole(state["master"][name])])
        for reader, bank in state["banks"].items() if one_age else ():
            found[f"tied/{name}/{reader} bank"] = checksum([bank[name]])
    return found


def divergence(
    posts: Mapping[int, dict[str, str]], stages: int, step: int, *, replicated: bool = True
) -> str | None:
    """What differs though it must not, by rank; None when all is well. Ranks are data-major."""
    differs = f"Silent divergence at step {step}: the"
    stopped = "The run was stopped; earlier checkpoints are untouched."
    tied: dict[str, dict[str, str]] = {}  # what -> checksum -> one holder
    for rank, own in posts.items():
        for key, value in own.items():
            if key.startswith("tied/"):
                _, name, what = key.split("/", 2)
                tied.setdefault(what, {}).setdefault(value, f"stage {rank % stages} ({name})")
            elif replicated and posts[rank % stages].get(key) != value:
                return (
                    f"{differs} {key} of stage {rank % stages} differs between data rank 0 and data rank "
                    f"{rank // stages}. {stopped}"
                )
    for what, values in tied.items():
        if len(values) > 1:
            return f"{differs} tied embedding in the {what} differs between {' and '.join(values.values())}. {stopped}"
    return None


def damaged(state: Mapping[str, Any]) -> list[str]:
    """The weights of this rank that hold numbers that are not finite: the master's, and banks' whose master is well.

    Not its buffers: no forward may change them, so they are as the model was built, and a mask may hold -inf."""
    found = {name: name for name, weight in state["master"].items() if not _is_finite(weight)}
    for reader, bank in state["banks"].items():
        for name, weight in bank.items():
            if name not in found and not _is_finite(weight):
                found[name] = f"{name} ({reader} bank)"
    return list(found.values())


def _is_finite(weight: Tensor | Halves) -> bool:
    """Of what this rank keeps of it, a piece at a time: there may be no room for another embedding."""
    halves = (weight.high, weight.low) if isinstance(weight, Halves) else (weight,)
    flat = [local(half).detach().flatten() for half in halves]
    for start in range(0, flat[0].numel(), PIECE):
        pieces = [half[start : start + PIECE] for half in flat]
        if not torch.isfinite(whole(Halves(*pieces) if len(pieces) > 1 else pieces[0])).all():
            return False
    return True


def state_of_weights(found: Mapping[int, list[str] | None], ranks: int, *, skipped: bool) -> str:
    """What the ranks that were heard of found damaged (None: they could not look), in one sentence; `skipped`: updates
    were not finite."""
    names = list(dict.fromkeys(name for own in found.values() for name in own or ()))
    if names:
        more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
        return f"Weights hold numbers that are not finite: {', '.join(names[:NAMED])}{more}."
    blind = [rank for rank, own in found.items() if own is None]
    silent = [rank for rank in range(ranks) if rank not in found]
    why = [
        f"{_ranks(some)} {what}"
        for some, what in ((blind, "could not look at its own"), (silent, "said nothing in time"))
        if some
    ]
    if why:
        return f"Whether all weights are finite is not known: {' and '.join(why)}."
    reason = (
        ", so the loss, its gradients or their norm are not, at these weights or on this data"
        if skipped
        else ""
    )
    return f"All weights are finite{reason}."


def _ranks(some: Sequence[int]) -> str:
    return f"rank{'s' if len(some) > 1 else ''} {', '.join(map(str, some))}"
