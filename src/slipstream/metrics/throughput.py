"""Speed of a run from what it has done: tokens per second, utilisation, time left. Imports no torch.

MFU = tokens/s x training FLOPs per token / (devices x peak FLOP/s)
busy fraction of a stage = seconds it computed / seconds that passed
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
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


Clock = tuple[float, float]  # a time, and the seconds a stage had computed by then


@dataclass
class Meter:
    """Speed over the last `window` marks, so that a pause (a validation, a restart) fades.

    Times are those at which steps were handed in, given by the caller: steps are reported late and in bursts. The first
    step handed in to an empty pipeline is not done then, so what is measured begins with it; until there is a second
    one the speed from before holds.
    """

    total_steps: int
    tokens_per_step: int
    flops_per_token: float
    peak_flops: float | None = None  # of all devices together
    window: int = 20
    _began: tuple[int, float] = (0, 0.0)
    _before: float = 0.0  # tokens per second up to the last start, where it was measured
    _steps: deque[tuple[int, float]] = field(default_factory=deque)
    _busy: deque[Sequence[Clock]] = field(default_factory=deque)

    def start(self, step: int, time: float, stages: Sequence[Clock] = ()) -> None:
        """Begin (again) after `step`: what came before does not count."""
        self._before = self.tokens_per_second if len(self._steps) > 1 else 0.0
        self._steps.clear()
        self._busy.clear()
        self._began = (step, time)
        self._busy.append(stages)

    def step(self, step: int, time: float) -> None:
        """`step` was handed in at `time`."""
        self._steps.append((step, time))
        if len(self._steps) > self.window + 1:
            self._steps.popleft()

    def stages(self, stages: Sequence[Clock]) -> None:
        """What every stage last said of itself."""
        self._busy.append(stages)
        if len(self._busy) > self.window + 1:
            self._busy.popleft()

    @property
    def tokens_per_second(self) -> float:
        if not self._steps or (len(self._steps) == 1 and self._before):
            return self._before
        (first, began), (last, now) = self._steps[0], self._steps[-1]
        if len(self._steps) == 1:
            first, began = self._began
        return (last - first) * self.tokens_per_step / max(now - began, 1e-9)

    @property
    def busy(self) -> tuple[float, ...]:
        """Share of the time each stage computed, by its own clock; nothing while a clock has not moved on."""
        pairs = list(zip(self._busy[0], self._busy[-1], strict=False)) if self._busy else []
        if any(b[0] <= a[0] for a, b in pairs):
            return ()
        return tuple((b[1] - a[1]) / (b[0] - a[0]) for a, b in pairs)

    @property
    def mfu(self) -> float | None:
        return self.tokens_per_second * self.flops_per_token / self.peak_flops if self.peak_flops else None

    @property
    def eta_seconds(self) -> float:
        done = self._steps[-1][0] if self._steps else self._began[0]
        left = (self.total_steps - done) * self.tokens_per_step
        return left / self.tokens_per_second if self.tokens_per_second else 0.0
