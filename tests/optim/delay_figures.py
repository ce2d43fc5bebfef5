"""What delay does on two small problems; the figures of docs/convergence.md.

    PYTHONPATH=tests python -m optim.delay_figures        writes docs/figures/delay-*.svg, their numbers inside

*Noisy matrix.* Muon; drawn from `noisy_matrix.csv`, which `noisy_matrix.py` writes.

*Quadratic.* f(w) = w^2 / 2, whose curvature is 1, so that lr is lr times curvature; see `quadratic.py`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from optim import noisy_matrix, quadratic
from slipstream.optim import build
from slipstream.pipeline.emulator import Emulator

FIGURES = Path(__file__).parents[2] / "docs" / "figures"
CASES = {
    "synchronous": ("none", 0),
    "delay 1": ("none", 1),
    "delay 1 + error feedback": ("error_feedback", 1),
}
PARTS = {  # case -> the old part of an update, whether it is corrected
    "synchronous": (0.0, False),
    "delay 1": (1.0, False),
    "delay 1 + error feedback": (1.0, True),
}
Curves = dict[str, list[tuple[float, ...]]]  # points x, y, and where it was averaged half of an error bar


def added_by_length() -> Curves:
    """What delay adds to the mean gradient norm of a run of T updates, exact Muon; the bound's term for it."""
    table, curves = noisy_matrix.read(), {}
    for name, old in (("all old", 1.0), ("half old", 0.5)):
        rows = [
            table["exact", length, noisy_matrix.of_length(length, old)] for length in noisy_matrix.LENGTHS
        ]
        curves[name] = [(row.updates, row.added, 2 * row.added_error) for row in rows]
    cases = [(length, noisy_matrix.of_length(length, 1.0)) for length in noisy_matrix.LENGTHS]
    return {
        "the bound's term, all old": [(t, noisy_matrix.bound(t, case).delay) for t, case in cases],
        **curves,
    }


def share_by_rate() -> Curves:
    """What delay adds to the norm exact Muon settles at, in %, by lr sqrt((1 + mu) / (1 - mu))."""
    shares = noisy_matrix.shares()
    return {
        f"momentum {mu:g}": [
            (lr * math.sqrt((1 + mu) / (1 - mu)), *(100 * v for v in shares[lr, mu])) for lr in rates
        ]
        for mu in noisy_matrix.MOMENTA
        if (rates := sorted(lr for lr, other in shares if other == mu))
    }


class Quadratic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(1, dtype=torch.float64))

    def forward(self, _: Tensor) -> Tensor:
        return 0.5 * self.w.square().sum()


def sgd_growth(case: str, lr: float, momentum: float = 0.0, updates: int = 600) -> float:
    """|w| at the end of a run that starts at 1, capped."""
    correction, delay = CASES[case]
    make = lambda m: build("sgd", m, lr=lr, momentum=momentum, dampening=momentum)  # noqa: E731
    emulator = Emulator(Quadratic(), 1, lambda f, _: f, make, correction, delay=delay)
    for _ in range(updates):
        emulator.step(torch.zeros(1), torch.zeros(1))
        size = float(emulator.master.w.detach().abs())
        if size > 1e6:
            return size
    return size


def sgd_threshold(case: str, momentum: float = 0.0) -> float:
    """The largest stable lr."""
    return quadratic.limit(momentum, *PARTS[case])


def growth_curves(momentum: float, rates: Sequence[float]) -> Curves:
    """The factor per update that SGD settles into, by rate: below 1 it converges."""
    return {case: [(lr, quadratic.growth(lr, momentum, *PARTS[case])) for lr in rates] for case in CASES}


def limits_by_old_part(momentum: float = 0.9) -> Curves:
    """The largest stable lr x curvature by the old part of an update, from a tenth on."""
    parts = [k / 20 for k in range(2, 21)]
    plain = [(old, quadratic.limit(momentum, old)) for old in parts]
    fed = [(old, quadratic.limit(momentum, old, feedback=True)) for old in parts]
    return {"no correction": plain, "error feedback": fed}


def excess_by_old_part(x: float = 0.1, momentum: float = 0.9) -> Curves:
    """The loss that noise leaves, over that of synchronous training, less 1."""
    floor = quadratic.level(x, momentum, 0.0)
    parts = [k / 20 for k in range(21)]
    plain = [(old, quadratic.level(x, momentum, old) / floor - 1) for old in parts]
    fed = [(old, quadratic.level(x, momentum, old, feedback=True) / floor - 1) for old in parts]
    return {"no correction": plain, "error feedback": fed}


def figures() -> dict[str, tuple[str, Curves]]:
    """Name -> title and curves, everything docs/convergence.md shows."""
    rates = [0.05 * k for k in range(1, 61)]
    return {
        "delay-muon-length": (
            "Muon: what delay adds to the mean gradient norm of a run, by updates T",
            added_by_length(),
        ),
        "delay-muon-share": (
            "Muon, all old: what delay adds, in %, by η √((1 + μ) / (1 - μ))",
            share_by_rate(),
        ),
        "delay-sgd": ("SGD, no momentum: factor per update, by lr x curvature", growth_curves(0.0, rates)),
        "delay-sgd-momentum": (
            "SGD, momentum 0.9: factor per update, by lr x curvature",
            growth_curves(0.9, rates),
        ),
        "delay-cutover-limit": (
            "SGD, momentum 0.9: largest stable lr x curvature, by the old part c/m",
            limits_by_old_part(),
        ),
        "delay-cutover-level": (
            "SGD, momentum 0.9, lr x curvature 0.1: loss that noise adds, by c/m",
            excess_by_old_part(),
        ),
    }


COLOURS = {"synchronous": "#1b7837", "delay 1": "#c51b7d", "delay 1 + error feedback": "#2166ac"}
COLOURS |= {"no correction": "#c51b7d", "error feedback": "#2166ac"}
COLOURS |= {"the bound's term, all old": "#777777", "all old": "#c51b7d", "half old": "#b35806"}
SHADES = ("#b35806", "#c51b7d", "#762a83", "#2166ac", "#1b7837")
COLOURS |= {f"momentum {mu:g}": shade for mu, shade in zip(noisy_matrix.MOMENTA, SHADES, strict=True)}
LEFT, TOP, WIDTH, HEIGHT = 60, 34, 420, 230


def svg(title: str, curves: Mapping[str, Sequence[tuple[float, ...]]], logarithmic: bool) -> str:
    """A line chart as text, its numbers in <metadata> for the test to compare."""
    scale: Callable[[float], float] = math.log10 if logarithmic else float
    xs = sorted({point[0] for points in curves.values() for point in points})
    ys = [point[1] for points in curves.values() for point in points]
    x_low, x_high, y_low, y_high = scale(xs[0]), scale(xs[-1]), scale(min(ys)), scale(max(ys))

    def place(x: float, y: float) -> tuple[float, float]:
        across = (scale(x) - x_low) / (x_high - x_low)
        up = (scale(y) - y_low) / (y_high - y_low)
        return LEFT + WIDTH * across, TOP + HEIGHT * (1 - up)

    numbers = {name: [[*map(_round, point)] for point in points] for name, points in curves.items()}
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{LEFT + WIDTH + 30}" '
        f'height="{TOP + HEIGHT + 42 + 18 * len(curves)}" font-family="sans-serif" font-size="12">',
        f"<metadata>{json.dumps(numbers)}</metadata>",
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="{LEFT}" y="20" font-size="13">{title}</text>',
        f'<rect x="{LEFT}" y="{TOP}" width="{WIDTH}" height="{HEIGHT}" fill="none" stroke="#999"/>',
    ]
    x_ticks = xs if len(xs) <= 6 else [xs[round(k * (len(xs) - 1) / 6)] for k in range(7)]
    for x in x_ticks:
        middle = f'x="{place(x, max(ys))[0]:.1f}" text-anchor="middle"'
        parts.append(f'<text {middle} y="{TOP + HEIGHT + 16}">{x if x >= 1000 else _round(x):g}</text>')
    unscale = (lambda v: 10**v) if logarithmic else float
    for value in (unscale(y_low + k * (y_high - y_low) / 4) for k in range(5)):
        y = place(xs[0], value)[1]
        parts.append(f'<line x1="{LEFT}" x2="{LEFT + WIDTH}" y1="{y:.1f}" y2="{y:.1f}" stroke="#eee"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value:.3g}</text>')
    for number, (name, points) in enumerate(curves.items()):
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point[:2]) for point in points))
        dash = ' stroke-dasharray="6 4"' if "feedback" in name or "bound" in name else ""
        line = f'fill="none" stroke="{COLOURS[name]}" stroke-width="2"{dash}'
        y = TOP + HEIGHT + 36 + 18 * number
        parts.append(f'<polyline points="{path}" {line}/>')
        for x, middle, half in (point for point in points if len(point) == 3):
            (across, low), (_, high) = place(x, middle - half), place(x, middle + half)
            parts.append(f'<line x1="{across:.1f}" x2="{across:.1f}" y1="{low:.1f}" y2="{high:.1f}" {line}/>')
            parts.append(
                f'<circle cx="{across:.1f}" cy="{place(x, middle)[1]:.1f}" r="3" fill="{COLOURS[name]}"/>'
            )
        parts.append(f'<line x1="{LEFT}" x2="{LEFT + 30}" y1="{y}" y2="{y}" {line}/>')
        parts.append(f'<text x="{LEFT + 38}" y="{y + 4}">{name}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _round(value: float) -> float:
    return float(f"{value:.4g}")


def read_numbers(path: Path) -> Curves:
    text = path.read_text()
    data = json.loads(text[text.index("<metadata>") + 10 : text.index("</metadata>")])
    return {name: [tuple(point) for point in points] for name, points in data.items()}


if __name__ == "__main__":
    FIGURES.mkdir(parents=True, exist_ok=True)
    for figure, (heading, data) in figures().items():
        (FIGURES / f"{figure}.svg").write_text(svg(heading, data, figure.startswith("delay-muon")))
    for mu in (0.0, 0.5, 0.9, 0.95):
        print(f"stable lr x curvature, momentum {mu}:", [_round(sgd_threshold(case, mu)) for case in CASES])
