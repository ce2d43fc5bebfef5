"""How many microbatches to keep in flight: as few as hide the links.

Between F_k and B_k stage s waits for the round trip through the stages behind it, (P-1-s)(T + 2L) for a forward
and backward of T seconds and a link of L seconds one way, and has w_s pairs of T seconds to fill it. So

    K - 1 = w_0 >= (P-1)(1 + 2L/T)

microbatches hide the latency; each costs one microbatch of activations on stage 0.
"""

from __future__ import annotations

import math

# Below this share of the time of a pair, a deeper pipeline costs more (activations) than it returns.
NEGLIGIBLE = 0.005


def choose_in_flight(stages: int, microbatches: int, work_seconds: float, link_seconds: float) -> int:
    """The number in flight on stage 0, from P (the least) to m, which leaves a pair of slack for the update."""
    if stages == 1 or work_seconds <= 0:
        return stages
    delay = 2 * link_seconds / work_seconds
    if delay < NEGLIGIBLE:
        return stages
    wanted = 1 + math.ceil((stages - 1) * (1 + delay))
    return max(stages, min(wanted, microbatches))
