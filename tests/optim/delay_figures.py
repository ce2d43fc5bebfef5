"""What delay does, measured in the emulator on two small problems; the figures of docs/convergence.md.

    python tests/optim/delay_figures.py        writes docs/figures/delay-*.svg, their numbers inside

*Noisy matrix problem.* Minimise f(W) = 1/2 sum_ij l_i r_j (W - W*)_ij^2 over W [24, 16], with l and r spread
evenly on a log scale over [0.1, 1]; the optimizer sees grad f + noise, Gaussian of deviation 0.3 per entry.
The quality of a run is the nuclear norm of grad f, which Muon's analysis bounds, averaged over the run.

*Quadratic.* f(w) = w^2 / 2, whose curvature is 1, so that lr is lr times curvature; see `quadratic.py`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from optim import quadratic
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
Curves = dict[str, list[tuple[float, float]]]


class NoisyMatrix(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.layer = nn.Linear(16, 24, bias=False, dtype=torch.float64)
        nn.init.zeros_(self.layer.weight)
        self.target = torch.randn(24, 16, generator=generator, dtype=torch.float64)
        rows, columns = (torch.logspace(0, -1, n, dtype=torch.float64) for n in (24, 16))
        self.curvature = rows[:, None] * columns

    def forward(self, noise: Tensor) -> Tensor:
        error = self.layer.weight - self.target
        return 0.5 * (self.curvature * error * error).sum() + (noise[0] * self.layer.weight).sum()

    def gradient_norm(self) -> float:
        gradient = self.curvature * (self.layer.weight.detach() - self.target)
        return float(torch.linalg.matrix_norm(gradient, "nuc"))


def muon_run(case: str, updates: int, lr: float, momentum: float) -> list[float]:
    """The nuclear norm of the true gradient at the master before each update."""
    correction, delay = CASES[case]
    options = {"lr": lr, "momentum": momentum, "weight_decay": 0.0, "scale": "original"}
    emulator = Emulator(
        NoisyMatrix(), 1, lambda f, _: f, lambda m: build("muon", m, **options), correction, delay=delay
    )
    generator = torch.Generator().manual_seed(1)
    norms = []
    for _ in range(updates):
        norms.append(emulator.master.gradient_norm())
        noise = 0.3 * torch.randn(1, 24, 16, generator=generator, dtype=torch.float64)
        emulator.step(noise, torch.zeros(1))
    return norms


def rate_of_convergence(lengths: Sequence[int] = (64, 256, 1024)) -> Curves:
    """Mean gradient norm of runs of T updates with lr = 2 T^(-3/4) and 1 - momentum = T^(-1/2)."""
    curves: Curves = {case: [] for case in CASES}
    for case in CASES:
        for length in lengths:
            norms = muon_run(case, length, 2 * length**-0.75, 1 - length**-0.5)
            curves[case].append((length, sum(norms) / length))
    return curves


def level_at_rate(rates: Sequence[float] = (0.05, 0.1, 0.2, 0.4), updates: int = 200) -> Curves:
    """The level a run at a constant rate settles at: mean gradient norm over its second half."""
    curves: Curves = {case: [] for case in CASES}
    for case in CASES:
        for lr in rates:
            tail = muon_run(case, updates, lr, 0.95)[updates // 2 :]
            curves[case].append((lr, sum(tail) / len(tail)))
    return curves


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
        "delay-muon-rate": ("mean gradient norm of a run of T updates, Muon", rate_of_convergence()),
        "delay-muon-level": ("gradient norm that Muon settles at, by learning rate", level_at_rate()),
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
LEFT, TOP, WIDTH, HEIGHT = 60, 34, 420, 230


def svg(title: str, curves: Mapping[str, Sequence[tuple[float, float]]], logarithmic: bool) -> str:
    """A line chart as text, its numbers in <metadata> for the test to compare."""
    scale: Callable[[float], float] = math.log10 if logarithmic else float
    xs = sorted({x for points in curves.values() for x, _ in points})
    ys = [y for points in curves.values() for _, y in points]
    x_low, x_high, y_low, y_high = scale(xs[0]), scale(xs[-1]), scale(min(ys)), scale(max(ys))

    def place(x: float, y: float) -> tuple[float, float]:
        across = (scale(x) - x_low) / (x_high - x_low)
        up = (scale(y) - y_low) / (y_high - y_low)
        return LEFT + WIDTH * across, TOP + HEIGHT * (1 - up)

    numbers = {name: [[_round(x), _round(y)] for x, y in points] for name, points in curves.items()}
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{LEFT + WIDTH + 30}" height="{TOP + HEIGHT + 96}" '
        'font-family="sans-serif" font-size="12">',
        f"<metadata>{json.dumps(numbers)}</metadata>",
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="{LEFT}" y="20" font-size="13">{title}</text>',
        f'<rect x="{LEFT}" y="{TOP}" width="{WIDTH}" height="{HEIGHT}" fill="none" stroke="#999"/>',
    ]
    x_ticks = xs if len(xs) <= 6 else [xs[round(k * (len(xs) - 1) / 6)] for k in range(7)]
    for x in x_ticks:
        middle = f'x="{place(x, max(ys))[0]:.1f}" text-anchor="middle"'
        parts.append(f'<text {middle} y="{TOP + HEIGHT + 16}">{_round(x):g}</text>')
    unscale = (lambda v: 10**v) if logarithmic else float
    for value in (unscale(y_low + k * (y_high - y_low) / 4) for k in range(5)):
        y = place(xs[0], value)[1]
        parts.append(f'<line x1="{LEFT}" x2="{LEFT + WIDTH}" y1="{y:.1f}" y2="{y:.1f}" stroke="#eee"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value:.3g}</text>')
    for number, (name, points) in enumerate(curves.items()):
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in points))
        dash = ' stroke-dasharray="6 4"' if "feedback" in name else ""
        line = f'fill="none" stroke="{COLOURS[name]}" stroke-width="2"{dash}'
        y = TOP + HEIGHT + 36 + 18 * number
        parts.append(f'<polyline points="{path}" {line}/>')
        parts.append(f'<line x1="{LEFT}" x2="{LEFT + 30}" y1="{y}" y2="{y}" {line}/>')
        parts.append(f'<text x="{LEFT + 38}" y="{y + 4}">{name}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _round(value: float) -> float:
    return float(f"{value:.4g}")


def read_numbers(path: Path) -> Curves:
    text = path.read_text()
    data = json.loads(text[text.index("<metadata>") + 10 : text.index("</metadata>")])
    return {name: [(x, y) for x, y in points] for name, points in data.items()}


if __name__ == "__main__":
    FIGURES.mkdir(parents=True, exist_ok=True)
    for figure, (heading, data) in figures().items():
        (FIGURES / f"{figure}.svg").write_text(svg(heading, data, figure.startswith("delay-muon")))
        print(
            figure, json.dumps({case: [(_round(x), _round(y)) for x, y in data[case]][:6] for case in data})
        )
    for mu in (0.0, 0.5, 0.9, 0.95):
        print(f"stable lr x curvature, momentum {mu}:", [_round(sgd_threshold(case, mu)) for case in CASES])
