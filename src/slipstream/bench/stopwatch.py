"""When a rank got where: read off the host's clock at once, or off the device's when it is done."""

from __future__ import annotations

import time

import torch

from slipstream.pipeline.trace import DeviceClock


class Stopwatch:
    """Moments on the clock that all processes of a machine share. On a GPU a mark does not wait for the device."""

    def __init__(self, device: torch.device) -> None:
        self.moments: list[float] = []
        self._clock = DeviceClock(device) if device.type == "cuda" else None
        self._marks: list[torch.cuda.Event] = []

    def mark(self) -> None:
        """Now; on a GPU, when what has been queued is done."""
        if self._clock is None:
            self.moments.append(time.perf_counter())
        else:
            self._marks.append(self._clock.mark())

    def read(self) -> None:
        """Wait for the device, so that `moments` has every mark."""
        if self._clock is not None:
            self.moments += [self._clock.seconds(mark) for mark in self._marks]
            self._marks.clear()
