"""What a loss gap is worth: extra tokens, and what is then left of the speed-up.

The token penalty of a delayed run is  τ(L_sync) / τ(L):  L_sync and L are the losses the two runs end at, τ the
tokens at which synchronous training gets there. On a curve that falls to its end τ(L_sync) is all the tokens T, and
the penalty is T / τ(L). τ is read off a curve of synchronous loss against tokens:

    within a run   the validation curve of the paired synchronous run (same seed), its running minimum, linear in
                   (ln tokens, loss) between its points; beyond its ends it goes on with the slope of its last two
                   points, and the penalty is marked as extrapolated
    by length      E + B tokens^-β through the final losses of synchronous runs of three lengths, each with its own
                   whole schedule; hardly beyond them (`BEYOND`)

The second is what a user pays who trains longer to make up for delay. The first needs one run, but it leans on a
learning rate that was still high at τ. Of two lengths only the chord is known. Loss falls ever more slowly with
ln tokens, so between them every curve lies below the chord, and exp(gap / slope) is a lower bound. It is none where the
gap is larger than what the loss falls from the one to the other: there the ratio of the two lengths is.

    net gain = speed-up over the fastest synchronous schedule at equal activations, divided by the penalty
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise

from slipstream.errors import UserError
from slipstream.schedule import steady
from slipstream.schedule.generate import GENERATORS
from slipstream.study.statistics import Estimate, interval

Curve = Sequence[tuple[float, float]]
# e-folds, near what a float holds: a run that diverged lies any distance beyond a flat start
FURTHEST = 690.0
BEYOND = 1.1  # a law is read up to this factor of tokens outside the runs it goes through


def token_penalty(curve: Curve, synchronous: float, loss: float) -> Estimate | None:
    """What ending at `loss` and not at `synchronous` is worth on the `curve`; None where that has no slope."""
    falling = envelope(curve)
    if len(falling) < 2:
        return None
    folds = log_tokens_at(falling, synchronous) - log_tokens_at(falling, loss)
    value = math.exp(max(-FURTHEST, min(FURTHEST, folds)))
    outside = any(not falling[-1][1] <= end <= falling[0][1] for end in (synchronous, loss))
    return Estimate(value, None, 1, extrapolated=outside)


def log_tokens_at(curve: Curve, loss: float) -> float:
    """The logarithm of the tokens at which a strictly falling curve reaches `loss`."""
    segment = next((i for i in range(1, len(curve)) if curve[i][1] <= loss), len(curve) - 1)
    (x0, y0), (x1, y1) = curve[segment - 1], curve[segment]
    share = (y0 - loss) / (y0 - y1)
    return math.log(x0) + share * (math.log(x1) - math.log(x0))


def loss_at(curve: Curve, tokens: float) -> float | None:
    """The loss on a curve where it has read `tokens`; None outside of it."""
    for (x0, y0), (x1, y1) in pairwise(sorted(curve)):
        if 0 < x0 <= tokens <= x1 and x0 < x1:
            return y0 + (y1 - y0) * math.log(tokens / x0) / math.log(x1 / x0)
    return None


@dataclass(frozen=True)
class PowerLaw:
    """loss = floor + excess * (tokens / longest)^-power, through runs of three lengths."""

    floor: float
    excess: float  # of the longest run's loss above the floor
    power: float
    shortest: float  # tokens
    longest: float

    def log_tokens_at(self, loss: float) -> float | None:
        """The logarithm of the tokens at which a run ends at `loss`; None far outside the runs it goes through."""
        above = (loss - self.floor) / self.excess
        if above <= 0:
            return None
        found = math.log(self.longest) - math.log(above) / self.power
        low, high = math.log(self.shortest / BEYOND), math.log(self.longest * BEYOND)
        return found if low <= found <= high else None

    def penalty(self, synchronous: float, loss: float) -> Estimate | None:
        """What ending at `loss` and not at `synchronous` is worth by length."""
        first, second = self.log_tokens_at(synchronous), self.log_tokens_at(loss)
        if first is None or second is None:
            return None
        low, high = math.log(self.shortest) - 1e-9, math.log(self.longest) + 1e-9
        outside = any(not low <= end <= high for end in (first, second))
        return Estimate(math.exp(first - second), None, 1, extrapolated=outside)


def power_law(points: Curve) -> PowerLaw | None:
    """The one through three points; None where they do not fall, or not ever more slowly with ln tokens."""
    (shortest, first), (middle, second), (longest, third) = sorted(points)
    far, near = math.log(longest / shortest), math.log(longest / middle)
    if not first > second > third or not far > near > 0:
        return None
    ratio = (first - second) / (second - third)
    if not math.isfinite(ratio) or ratio <= (far - near) / near * (1 + 1e-6):
        return None  # straight at best

    def falls(power: float) -> float:
        """The first fall over the second, on a curve of this power: rises from (far - near) / near without end."""
        return math.exp(power * (far - near)) * math.expm1(-power * far) / math.expm1(-power * near) - 1

    low, high = 0.0, math.log1p(ratio) / (far - near)
    for _ in range(100):
        middle_power = (low + high) / 2
        low, high = (middle_power, high) if falls(middle_power) < ratio else (low, middle_power)
    # (second - third) / (e^(power near) - 1), which does not overflow
    excess = -(second - third) * math.exp(-high * near) / math.expm1(-high * near)
    return PowerLaw(third - excess, excess, high, shortest, longest) if excess > 0 else None


def envelope(curve: Curve) -> list[tuple[float, float]]:
    """The points that improve on every earlier one, in the order of tokens: strictly falling."""
    kept: list[tuple[float, float]] = []
    for tokens, loss in sorted(curve):
        if tokens > 0 and (not kept or loss < kept[-1][1]):
            kept.append((tokens, loss))
    return kept


def mean_penalty(penalties: Sequence[Estimate]) -> Estimate | None:
    """The geometric mean over seeds with the interval of its logarithm; extrapolated where one of them is."""
    if not penalties:
        return None
    logs = interval([math.log(p.value) for p in penalties])
    return replace(_exponential(logs), extrapolated=any(p.extrapolated for p in penalties))


def penalty_of_gap(gap: float, slope: float) -> float:
    """exp(gap / slope): the tokens that make up for a gap as far as loss falls by `slope` per e-fold of tokens."""
    return math.exp(min(FURTHEST, gap / slope))


def _exponential(logs: Estimate) -> Estimate:
    """Infinite where a float does not reach: the interval of two seeds that differ much may be that wide."""
    return logs.mapped(lambda value: math.exp(value) if value < 709 else math.inf)


@dataclass(frozen=True)
class Speedup:
    """2BW against the fastest synchronous schedule, simulated with backward = 2 forward and free links."""

    stages: int
    microbatches: int
    rival: str
    factor: float  # rival's time per update / 2BW's
    flushed: float  # rival's time per update / that of a flushed group of 2BW (1F1B)


@cache
def speedup(stages: int, microbatches: int) -> Speedup:
    """At equal activations: rivals that keep more of them than 2BW does are left out."""
    ours = steady("pipedream_2bw", stages, microbatches)
    flush = steady("1f1b", stages, microbatches)
    rivals = [flush]
    for name, generator in GENERATORS.items():
        if generator.synchronous and name != "1f1b":
            try:
                rivals.append(steady(name, stages, microbatches))
            except UserError:
                continue  # this schedule does not exist at these counts
    most = max(ours.peak_activations)
    best = min(
        (rival for rival in rivals if max(rival.peak_activations) <= most + 1e-9),
        key=lambda rival: rival.time_per_update,
    )
    time = best.time_per_update
    return Speedup(stages, microbatches, best.name, time / ours.time_per_update, time / flush.time_per_update)


def net_gain(speed: Speedup, penalty: Estimate, flushed_share: float) -> Estimate:
    """Speed-up / penalty, a share of the updates (synchronous start and finish) running flushed."""
    factor = 1 / ((1 - flushed_share) / speed.factor + flushed_share / speed.flushed)
    return penalty.mapped(lambda tokens: factor / tokens if tokens else math.inf)
