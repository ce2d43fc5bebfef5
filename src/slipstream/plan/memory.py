"""Memory of a stage, by component, in bytes. Peaks, not sums over time.

Bytes per parameter (bf16 banks, fp32 master and gradients):

                          banks  master  grads  Muon  AdamW  EF buffer
    synchronous 1F1B        2      4       4      4     8       -
    2BW                     4      4       8      4     8       -        (4 + 4: one set waits for its update)
    2BW + EF, paper's form  4      4       8      4     8       4
    2BW + EF, ours          4      4       8      4     8       0        (transient 4 where dtypes differ)

Sharding the optimizer over D data ranks divides master, state and the transient by D; banks and gradients
stay whole. Activations are what the schedule keeps in flight, counted by `schedule.occupancy`.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

from slipstream.errors import UserError
from slipstream.schedule.actions import Kind, Schedule


@dataclass(frozen=True)
class Precision:
    """Bytes per value of the banks (what a forward reads), the master and the gradient accumulator."""

    bank: int = 2
    master: int = 4
    gradient: int = 4
    activation: int = 2


BF16 = Precision()
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
EXTRAPOLATES = ("error_feedback", "momentum_prediction")  # z_g must outlive the step


def state_bytes(optimizer: str) -> tuple[float, float]:
    if optimizer not in STATE_BYTES:
        near = difflib.get_close_matches(optimizer, STATE_BYTES, n=1)
        hint = f" Did you mean '{near[0]}'?" if near else ""
        raise UserError(
            f"The planner does not know the optimizer '{optimizer}'.{hint} "
            f"It knows: {', '.join(STATE_BYTES)}."
        )
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

    @property
    def total(self) -> float:
        return sum(getattr(self, field.name) for field in fields(self))


def weights_memory(
    matrices: float,
    others: float,
    *,
    asynchronous: bool,
    optimizer: str = "muon",
    correction: str = "none",
    precision: Precision = BF16,
    shards: int = 1,
    waiting: bool = True,
    paper_form: bool = False,
) -> StageMemory:
    """Everything that grows with parameters: hidden `matrices`, and `others` (embedding, head, vectors).

    `waiting`: an asynchronous update waits for other ranks while the next group's gradients come in.
    """
    parameters = matrices + others
    on_matrices, on_others = state_bytes(optimizer)
    separate = precision.bank != precision.master
    if asynchronous:
        banks = 2 * precision.bank
    else:
        banks = precision.bank if separate else 0  # the master itself is read
    extrapolates = asynchronous and correction in EXTRAPOLATES
    return StageMemory(
        banks=banks * parameters,
        master=precision.master * parameters / shards,
        gradients=precision.gradient * parameters * (2 if asynchronous and waiting else 1),
        state=(on_matrices * matrices + on_others * others) / shards,
        transient=precision.master * parameters / shards if extrapolates and separate else 0.0,
        correction=precision.master * parameters if asynchronous and paper_form else 0.0,
    )


def bytes_per_parameter(**settings) -> Mapping[str, float]:
    """The table of this module's docstring, for one hidden-matrix parameter."""
    memory = weights_memory(1, 0, **settings)
    return {
        field.name: getattr(memory, field.name) for field in fields(memory) if getattr(memory, field.name)
    }


def peak_activation_bytes(schedule: Schedule, bytes_per_stage: Sequence[float]) -> list[float]:
    """The most activation bytes each rank holds, given what a microbatch costs on each model stage."""
    peaks = []
    for actions in schedule.ranks:
        alive = peak = 0.0
        for kind, stage, *_ in actions:
            if kind is Kind.FORWARD:
                alive += bytes_per_stage[stage]
                peak = max(peak, alive)
            elif kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT):
                alive -= bytes_per_stage[stage]
        peaks.append(peak)
    return peaks
