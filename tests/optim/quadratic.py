"""SGD with momentum on f(z) = h z^2 / 2 when a part f of every gradient is one update old: exact, in a few lines.

    reads     (1 - f) z_g + f z_{g-1}                       no correction
              (1 - f) z_g + f (2 z_{g-1} - z_{g-2})         error feedback on the old part
    m_g     = mu m_{g-1} + (1 - mu) (h reads + noise)
    z_{g+1} = z_g - lr m_g

With x = lr h and y = x (1 - mu) this is one line, z_{g+1} = sum_k a_k z_{g-k} - lr (1 - mu) noise. Everything below
follows from its coefficients a: what is stable, and the variance at which noise holds it.
"""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor

Numbers = TypeVar("Numbers", float, Tensor)


def coefficients(x: float, momentum: float, old: float, feedback: bool = False) -> list[float]:
    """Of z_g, z_{g-1}, z_{g-2} in z_{g+1}."""
    y = x * (1 - momentum)
    reads = [1 - old, 2 * old, -old] if feedback else [1 - old, old, 0.0]
    return [a - y * weight for a, weight in zip([1 + momentum, -momentum, 0.0], reads, strict=True)]


def companion(x: float, momentum: float, old: float, feedback: bool = False) -> Tensor:
    rows = [coefficients(x, momentum, old, feedback), [1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]
    return torch.tensor(rows, dtype=torch.float64)


def growth(x: float, momentum: float, old: float, feedback: bool = False) -> float:
    """The factor per update that a run settles into: below 1 it converges."""
    return float(torch.linalg.eigvals(companion(x, momentum, old, feedback)).abs().max())


def limit(momentum: float, old: float, feedback: bool = False) -> float:
    """The largest stable x, by bisection."""
    low, high = 0.0, 400.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if growth(middle, momentum, old, feedback) < 1 else (low, middle)
    return low


def closed_limit(momentum: float, old: float) -> float:
    """The same without a correction: min(1 / f, 2 (1 + mu) / ((1 - mu) (1 - 2 f)) where f < 1/2)."""
    bounds = [1 / old] if old else []
    if old < 0.5:
        bounds.append(2 * (1 + momentum) / ((1 - momentum) * (1 - 2 * old)))
    return min(bounds)


def covariance(x: float, momentum: float, old: float, feedback: bool = False) -> Tensor:
    """S, that of (z_g, z_{g-1}, z_{g-2}) under noise of variance 1, curvature 1: it solves S = A S A' + q e1 e1'."""
    matrix = companion(x, momentum, old, feedback)
    noise = torch.zeros(9, dtype=torch.float64)
    noise[0] = (x * (1 - momentum)) ** 2
    identity = torch.eye(9, dtype=torch.float64)
    return torch.linalg.solve(identity - torch.kron(matrix, matrix), noise).view(3, 3)


def level(x: float, momentum: float, old: float, feedback: bool = False) -> float:
    """Variance of z under noise of variance 1, times 2 h / lr: in lr h -> 0 it is 1 for synchronous training."""
    return float(covariance(x, momentum, old, feedback)[0, 0]) * 2 / x


def closed_level(x: Numbers, momentum: float, old: float) -> Numbers:
    """`level` without a correction."""
    y, both = x * (1 - momentum), 2 * (1 + momentum)
    return (both + 2 * y * old) / ((1 - x * old) * (both - y * (1 - 2 * old)))


def closed_excess(x: float, momentum: float, old: float) -> float:
    """`level` over that of synchronous training, without a correction: 1 + x f + O(x^2), whatever the momentum."""
    return closed_level(x, momentum, old) / closed_level(x, momentum, 0.0)


def closed_average(x: Numbers, momentum: float, old: float) -> Numbers:
    """Variance of m without a correction, over that of averaged noise, (1 - mu) / (1 + mu).

    m_g is (z_g - z_{g+1}) / lr, so its variance is that of a step.
    """
    return closed_level(x, momentum, old) * (1 + momentum) / (1 + momentum + x * (1 - momentum) * old)


def simulated_level(x: float, momentum: float, old: float, feedback: bool = False) -> float:
    """`level` of 20,000 noisy runs of 400 updates from the optimum, at their last update."""
    generator = torch.Generator().manual_seed(0)
    a = coefficients(x, momentum, old, feedback)
    z = [torch.zeros(20_000, dtype=torch.float64) for _ in range(3)]
    for _ in range(400):
        noise = torch.randn(20_000, generator=generator, dtype=torch.float64)
        new = a[0] * z[0] + a[1] * z[1] + a[2] * z[2] - x * (1 - momentum) * noise
        z = [new, z[0], z[1]]
    return float(z[0].square().mean()) * 2 / x
