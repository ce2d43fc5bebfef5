"""What Newton-Schulz multiplies singular values by: an odd quintic p(x) = a x + b x³ + c x⁵ for each iteration.

`jordan` (Jordan et al. 2024) has one for all. Five take every singular value from 0.0015 to 1 into [0.68, 1.21].

`polar_express` (Amsel et al. 2025) has each iteration's own: the first is as near to 1 on [0.003, 1.01] as an odd
quintic can be, in its largest error, the next on what that one makes of the interval, and so on. Four take the interval
into [0.799, 1.201], five into [0.994, 1.006]. So four do what five of the others do. (Singular values are at most 1;
rounding can carry that of a matrix of rank one further, where the first polynomial grows fast.)
"""

from __future__ import annotations

from slipstream.errors import UserError

Coefficients = tuple[float, float, float]

STEPS = 5
JORDAN: Coefficients = (3.4445, -4.7750, 2.0315)
POLYNOMIALS: dict[str, tuple[Coefficients, ...]] = {
    "jordan": (JORDAN,),
    "polar_express": (
        (8.301928846, -24.042428062, 17.469941796),
        (4.045405855, -3.012796839, 0.569670826),
        (3.511301261, -2.630844816, 0.526195346),
        (2.496868664, -1.840016730, 0.437465608),
        (1.919011177, -1.298077922, 0.379839342),
        (1.875, -1.25, 0.375),
    ),
}


def polynomials(name: str = "jordan", steps: int = STEPS) -> tuple[Coefficients, ...]:
    """Of `steps` iterations; the last one known is repeated."""
    if name not in POLYNOMIALS:
        raise UserError(f"Muon has no polynomial {name!r}. Set polynomial to {' or '.join(POLYNOMIALS)}.")
    if steps < 1 or steps != int(steps):
        raise UserError(f"Muon needs whole steps >= 1, not {steps=}.")
    known = POLYNOMIALS[name]
    return tuple(known[min(step, len(known) - 1)] for step in range(int(steps)))
