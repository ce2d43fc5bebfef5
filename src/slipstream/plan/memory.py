"""Memory of a stage, by component, in bytes. Peaks, not sums over time.

Bytes per parameter (bf16 banks, fp32 master and gradients), D data ranks that share the optimizer:

                            banks  master  gradients  Muon  AdamW  at worst, beside these
    synchronous 1F1B          2     4/D        4       4/D   8/D   2 (a backward ends)
    2BW, all old              4     4/D        4       4/D   8/D   4/D (gradients that wait for their update)
    2BW with a cutover        4     2/D        4       4/D   8/D   4/D, or 2/D where none wait (a third bank)
    2BW + EF, paper's form    4     4          4       4     8     4, and a buffer of 4

With a cutover the newest weights are the upper half of the master, of which 2 bytes are left (`pipeline/compact.py`);
that takes bf16 banks and an optimizer that steps parameters apart. A single
process has no gradients that wait. Activations are what the schedule keeps in flight,
counted by `schedule.occupancy`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from slipstream.errors import UserError, did_you_mean
from slipstream.schedule.actions import Kind, Schedule


@dataclass(frozen=True)
class Precision:
    """Bytes per value of the banks (what a forward reads), the master, the gradient accumulator and Muon's momentum."""

    bank: int = 2
    master: int = 4
    gradient: int = 4
    activation: int = 2
    momentum: int = 4


BF16 = Precision()
NARROW = Precision(gradient=2, momentum=2)  # train.gradient_dtype, optim.options.state_dtype
FP32 = Precision(bank=4, activation=4)

# Optimizer state in bytes per parameter: (hidden matrices, everything else).
STATE_BYTES: dict[str, tuple[float, float]] = {
    "muon": (4, 8),  # the rest takes AdamW
    "normuon": (4, 8),
    "scion": (4, 8),
    "adamw": (8, 8),
    "adamw_capped": (8, 8),
    "nadamw": (8, 8),
    "soap": (24, 8),  # two moments, two Gram matrices, two bases; square matrices assumed
    "adan": (16, 16),
    "lion": (4, 4),
    "mars": (12, 8),
    "ademamix": (12, 12),
    "sgd": (4, 4),
}
STEPS_APART = ("muon", "normuon", "scion", "adamw", "nadamw", "sgd")
NEWTON_SCHULZ = ("muon", "normuon", "scion")
BUCKET_ELEMENTS, MOST_BUCKETS = 1 << 24, 16  # as in pipeline/compact.py, which a test compares
AT_ONCE_BYTES = 16 << 20  # of narrow gradients that are not in their sums yet
EXTRAPOLATES = ("error_feedback", "momentum_prediction")  # z_g must outlive the step


def state_bytes(optimizer: str) -> tuple[float, float]:
    if optimizer not in STATE_BYTES:
        hint = did_you_mean(optimizer, STATE_BYTES)
        known = ", ".join(STATE_BYTES)
        raise UserError(f"The planner does not know the optimizer '{optimizer}'.{hint} It knows: {known}.")
    return STATE_BYTES[optimizer]


@dataclass(frozen=True)
class StageMemory:
    """Bytes on the device that holds a stage, at the worst moment."""

    banks: float = 0.0
    master: float = 0.0
    gradients: float = 0.0
    state: float = 0.0
    transient: float = 0.0  # z_g kept during the step, as far as it adds to the peak
    correction: float = 0.0  # the persistent buffer of the paper's form of error feedback
    activations: float = 0.0
    working: float = 0.0  # one microbatch's recomputed layer, or the logits and their gradient
    buffers: float = 0.0  # receives posted ahead
    communicators: float = 0.0  # what they take of the device, outside the allocator

    @property
    def total(self) -> float:
        return sum(getattr(self, field.name) for field in fields(self))


def weights_memory(
    matrices: float,
    others: float,
    *,
    largest: float = 0,
    asynchronous: bool,
    optimizer: str = "muon",
    correction: str = "none",
    precision: Precision = BF16,
    shards: int = 1,
    waiting: bool = True,
    fresh: bool = False,
    paper_form: bool = False,
) -> StageMemory:
    """Everything that grows with parameters: hidden `matrices`, and `others` (embedding, head, vectors). `largest`: of
    the tensors that one step takes whole.

    `waiting`: an asynchronous update waits for other ranks while the next group's gradients come in. `fresh`: a group
    has a part that reads the newest weights.
    """
    parameters = matrices + others
    on_matrices, on_others = state_bytes(optimizer)
    if optimizer == "muon":
        on_matrices = precision.momentum
    # A tensor has one owner. The fullest rank has the largest: often an embedding or a head, whose state takes more.
    owned = max(parameters / shards, min(largest, parameters))
    owned_others = (
        min(others, owned) if 0 < largest <= others and shards > 1 else others * owned / max(parameters, 1)
    )
    separate = precision.bank != precision.master
    extrapolates = asynchronous and correction in EXTRAPOLATES
    compact = fresh and is_compact(optimizer, correction, precision)
    # Two moments compete: the old bank is not dead yet and the next is there; gradients wait.
    part = owned / parameters if parameters else 1.0
    third = precision.bank * part if asynchronous and fresh and extrapolates else 0.0
    waits = precision.gradient * part if asynchronous and waiting else 0.0
    if asynchronous:
        banks = 2 * precision.bank + (third if third > waits else 0.0)
    else:
        banks = precision.bank if separate else 0  # the master itself is read
    z_g = precision.master * owned if extrapolates and separate else 0.0
    return StageMemory(
        banks=banks * parameters,
        master=(precision.master - (precision.bank if compact else 0)) * owned,
        gradients=(precision.gradient + (waits if waits >= third else 0.0)) * parameters,
        state=on_matrices * (owned - owned_others) + on_others * owned_others,
        transient=_bucket(owned, largest, optimizer, precision) if compact else z_g,
        correction=precision.master * parameters if asynchronous and paper_form else 0.0,
    )


def is_compact(optimizer: str, correction: str, precision: Precision) -> bool:
    """Whether the master is kept in halves, given that a group has a fresh part."""
    narrow = precision.bank == BF16.bank and precision.master == BF16.master
    return narrow and optimizer in STEPS_APART and correction in ("none", *EXTRAPOLATES)


def _bucket(parameters: float, largest: float, optimizer: str, precision: Precision) -> float:
    """Bytes of the part of the master that is whole at a time: before the step, after it, and one pass of scratch; what
    is kept narrow, wide; and what Newton-Schulz works on (docs/notes/memory.md)."""
    widened = 4 * (precision.gradient == 2) + 4 * (precision.momentum == 2)
    each = 12 + widened + (4 if optimizer in NEWTON_SCHULZ else 0)
    return each * min(parameters, max(BUCKET_ELEMENTS, parameters / MOST_BUCKETS, largest))


Held = list[set[tuple[tuple[int, int], ...]]]


def held_together(schedule: Schedule) -> Held:
    """Of each rank, what it ever holds at one time: (model stage, microbatches between forward and backward) pairs."""
    ranks: Held = []
    for actions in schedule.ranks:
        alive = dict.fromkeys(sorted({action.stage for action in actions}), 0)
        seen: set[tuple[tuple[int, int], ...]] = set()
        for kind, stage, *_ in actions:
            if kind is Kind.FORWARD:
                alive[stage] += 1
                seen.add(tuple(alive.items()))
            elif kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT):
                alive[stage] -= 1
        ranks.append({max(seen)} if len(alive) == 1 else seen)  # of one stage only the most counts
    return ranks


def peak_activation_bytes(held: Held, bytes_per_stage: Sequence[float]) -> list[float]:
    """The most activation bytes each rank holds, given what a microbatch costs on each model stage."""
    return [
        max(sum((count * bytes_per_stage[stage] for stage, count in alive), 0.0) for alive in seen)
        for seen in held
    ]
