"""A trace of a few updates by torch's own profiler, on request (train.profile): one file per rank.

The files open in ui.perfetto.dev or chrome://tracing. Recording slows these updates down, and no others.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

UPDATES = 3


class Profiling:
    """Switched on before the update after step `at`, and off three updates later. 0: never."""

    def __init__(self, folder: Path, rank: int, at: int) -> None:
        self._path, self._at = folder / "profile" / f"rank-{rank}.json", at
        self._running: Any = None

    def before(self, step: int) -> None:
        """Called with the number of groups submitted, before the next one is."""
        if self._at and step == self._at:
            kinds = [torch.profiler.ProfilerActivity.CPU]
            if torch.cuda.is_available():
                kinds.append(torch.profiler.ProfilerActivity.CUDA)
            self._running = torch.profiler.profile(activities=kinds)
            self._running.start()
        elif self._running is not None and step >= self._at + UPDATES:
            self.finish()

    def finish(self) -> None:
        """Write what was recorded, if anything is being recorded."""
        if self._running is None:
            return
        self._running.stop()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._running.export_chrome_trace(str(self._path))
        self._running = None
