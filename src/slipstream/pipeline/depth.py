"""How many microbatches to keep in flight: as few as hide the links.

With the least warm-up every input arrives just when it is needed, so a link of L seconds one way adds
2 (P-1) L / P to each forward-and-backward of T seconds. A link is hidden when the stage before it is ahead of the
stage behind it by 1 + ceil(2L / T) pairs instead of one (stages alternate strictly, so a part of a pair hides
nothing): K - 1 = w_0 = (P-1)(1 + ceil(2L / T)). Each further microbatch costs its activations on stage 0. L here
includes how much longer than the least a forward and backward typically take: a stage that is late by chance
delays its neighbours just as a slow link does.
"""

from __future__ import annotations

import math

# A loss below this share of the time is not worth twice the activations.
NEGLIGIBLE = 0.01


# Cores are late several microbatches in a row (other programs, clocks), and their memory is cheap. Measured on two
# shared cores, P=2, m=8: 0.91 of the bound with 3 in flight, 0.97 with 5, 0.98 with 9.
HOST_LATENESS = 5.0


def effective_link_seconds(link_seconds: float, least: float, typical: float, on_host: bool) -> float:
    """L: the link one way, and how late this stage typically is with a forward and backward."""
    return link_seconds + (typical - least) * (HOST_LATENESS if on_host else 1.0)


def choose_in_flight(stages: int, microbatches: int, work_seconds: float, link_seconds: float) -> int:
    """The number in flight on stage 0, from P (the least) to m, which leaves a pair of slack for the update."""
    if stages == 1 or work_seconds <= 0:
        return stages
    lost = 2 * (stages - 1) * link_seconds / (stages * work_seconds)
    if lost < NEGLIGIBLE:
        return stages
    wanted = 1 + (stages - 1) * (1 + math.ceil(2 * link_seconds / work_seconds))
    return max(stages, min(wanted, microbatches))
