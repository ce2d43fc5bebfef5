"""Learning-rate schedules: a multiplier of each parameter group's own rate.

Invariant: the multiplier is a pure function of the group index, never a counter that is stepped, so every
stage applies the same rate to update g whenever it runs it, and a resumed run continues on the same curve.

    warm-up   peak (g + 1) / warmup                        for g < warmup
    cosine    floor + (peak - floor) (1 + cos(pi t)) / 2   t from 0 at the end of warm-up to 1 at the end
    wsd       peak until `decay` updates before the end (a longer warm-up shortens them), then linearly to the floor
    constant  peak

The argument `floor` is a fraction of the peak. The last update, g = total - 1, runs at the floor.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from slipstream.errors import UserError
from slipstream.optimizers import unknown

SCHEDULES = ("cosine", "wsd", "constant")


def schedule(
    name: str,
    peak: float,
    total: int,
    warmup: int = 0,
    floor: float = 0.0,
    decay: int | None = None,
) -> Callable[[int], float]:
    """The multiplier of update g. `decay` (wsd): updates of the decline, by default a fifth of all."""
    _check(name, peak, total, warmup, floor, decay)
    decline = {
        "constant": lambda g: 0.0,
        "cosine": lambda g: (1 - math.cos(math.pi * _progress(g, warmup, total))) / 2,
        "wsd": lambda g: _progress(
            g, max(warmup, total - (max(1, total // 5) if decay is None else decay)), total
        ),
    }[name]

    def multiplier(group: int) -> float:
        if group < warmup:
            return peak * (group + 1) / warmup
        return peak * (1 - (1 - floor) * decline(group))

    return multiplier


def _progress(group: int, start: int, end: int) -> float:
    """0 for the last update before `start`, 1 for update `end - 1` and after."""
    return min(1.0, max(0.0, (group + 1 - start) / max(1, end - start)))


def _check(name: str, peak: float, total: int, warmup: int, floor: float, decay: int | None) -> None:
    if name not in SCHEDULES:
        raise UserError(unknown("learning-rate schedule", name, SCHEDULES))
    if peak <= 0 or total < 1:
        raise UserError(f"A schedule needs a peak > 0 and at least one update: peak={peak}, total={total}.")
    if not 0 <= warmup <= total:
        raise UserError(
            f"A warm-up of {warmup} updates does not fit into a run of {total}. Set warmup to 0 .. {total}."
        )
    if not 0 <= floor <= 1:
        raise UserError(f"floor={floor} is a fraction of the peak rate: set it between 0 and 1.")
    if decay is not None and name != "wsd":
        raise UserError(
            f"decay={decay} has no effect on the {name!r} schedule. Leave it out, or choose 'wsd'."
        )
    if decay is not None and not 1 <= decay <= total - warmup:
        raise UserError(
            f"A decline of {decay} updates after a warm-up of {warmup} does not fit into a run of {total}. "
            f"Set decay to 1 .. {total - warmup}."
        )
    if floor and name == "constant":
        raise UserError(
            f"floor={floor} has no effect on the constant schedule. Leave it out, or choose 'cosine'."
        )
