"""A number on its way from the device to the host. Invariant: asking whether it is there never waits.

Reading a loss with `.item()` would hold the host until the device has done everything queued before it, and
the device would then idle while the host queues the next group.
"""

from __future__ import annotations

import torch
from torch import Tensor


class Fetch:
    """The mean of some scalars, in double precision."""

    def __init__(self, scalars: list[Tensor]) -> None:
        mean = torch.stack(scalars).double().mean()
        self._event: torch.cuda.Event | None = None
        self._host = mean
        if mean.is_cuda:
            self._host = torch.empty((), dtype=mean.dtype, pin_memory=True)
            self._host.copy_(mean, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(mean.device))

    def ready(self) -> bool:
        return self._event is None or self._event.query()

    def value(self) -> float:
        """The number, waiting for it."""
        if self._event is not None:
            self._event.synchronize()
        return self._host.item()
