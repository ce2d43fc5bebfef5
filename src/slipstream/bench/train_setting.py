"""What every process of `slipstream bench train` shares: the setting, how a step is timed, what is answered."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Setting:
    """One comparison. `rows` sequences make a microbatch, `microbatches` of them an update."""

    model: str = "smollm2-360m"
    sequence: int = 1024
    microbatches: int = 4
    rows: int = 32
    device: str = "cuda"
    compiled: bool = True
    steps: int = 10
    warmup: int = 3
    rival_rows: int | None = None  # sequences in a rival's microbatch, of the same update; None: `rows`
    overrides: tuple[str, ...] = ()  # of our trainer's config

    @property
    def tokens_per_step(self) -> int:
        return self.sequence * self.microbatches * self.rows


@dataclass(frozen=True)
class Measured:
    """What one process saw."""

    step_seconds: float
    setup_seconds: float  # building, compiling, warming up
    peak_memory_bytes: int
    rows: int
    microbatches: int


def timed(
    step: Callable[[int], None], settle: Callable[[], None], setting: Setting, began: float
) -> tuple[float, float]:
    """(seconds per step, seconds before the first timed one); `settle` waits until all that was asked is done."""
    for index in range(setting.warmup):
        step(index)
    settle()
    start = time.perf_counter()
    for index in range(setting.warmup, setting.warmup + setting.steps):
        step(index)
    settle()
    return (time.perf_counter() - start) / setting.steps, start - began
