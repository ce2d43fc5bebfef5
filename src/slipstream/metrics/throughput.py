"""Speed of a run from what it has done: tokens per second, utilisation, time left. Imports no torch.

MFU = tokens/s x training FLOPs per token / (devices x peak FLOP/s)
busy fraction of a stage = seconds it computed / seconds that passed
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

# Dense bfloat16 peaks in FLOP/s, by a part of the device's name.
PEAK_FLOPS = {
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "H800": 989e12,
    "B200": 2250e12,
    "A100": 312e12,
    "A800": 312e12,
    "L40S": 362e12,
    "RTX 4090": 165e12,
}


def peak_flops(device_name: str) -> float | None:
    """The bf16 peak of a GPU, None where it is not known (MFU is then not reported)."""
    return next((peak for part, peak in PEAK_FLOPS.items() if part in device_name), None)


@dataclass(frozen=True)
class Speed:
    tokens_per_second: float
    busy: tuple[float, ...]  # per stage, share of the time
    mfu: float | None
    eta_seconds: float


@dataclass
class Meter:
    """Speed over the last `window` steps, so that a pause (validation, a resume) fades."""

    total_steps: int
    tokens_per_step: int
    flops_per_token: float
    peak_flops: float | None = None  # of all devices together
    window: int = 20
    clock: Callable[[], float] = time.perf_counter
    _marks: deque[tuple[int, float, tuple[float, ...]]] = field(default_factory=deque)

    def start(self, step: int, busy_seconds: Sequence[float] = ()) -> None:
        """Begin (again) at `step`: what came before, a validation or a restart, does not count."""
        self._marks.clear()
        self._marks.append((step, self.clock(), tuple(busy_seconds)))

    def update(self, step: int, busy_seconds: Sequence[float] = ()) -> Speed:
        """The speed after `step`; `busy_seconds` are each stage's running totals."""
        self._marks.append((step, self.clock(), tuple(busy_seconds)))
        while len(self._marks) > self.window + 1:
            self._marks.popleft()
        (first, began, before), (last, now, after) = self._marks[0], self._marks[-1]
        elapsed, steps = max(now - began, 1e-9), last - first
        rate = steps * self.tokens_per_step / elapsed
        busy = tuple(min(1.0, max(0.0, (b - a) / elapsed)) for a, b in zip(before, after, strict=False))
        mfu = rate * self.flops_per_token / self.peak_flops if self.peak_flops else None
        left = (self.total_steps - step) * elapsed / steps if steps else 0.0
        return Speed(rate, busy, mfu, left)
