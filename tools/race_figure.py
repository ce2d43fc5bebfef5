"""The picture of the README: loss against time of 2BW and 1F1B, three seeds each, from docs/results/one-gpu-race.html.

python tools/race_figure.py
"""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path
from statistics import fmean

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs/results/one-gpu-race.html"
WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 720, 330, 56, 52, 24, 44
SECONDS, LOSSES = (0, 75), (3.6, 5.2)
COLOURS = {"2bw": "#d95f02", "1f1b": "#4c6ebd"}
LABELS = {"2bw": "2BW (slipstream)", "1f1b": "1F1B (torch), the fastest synchronous schedule measured there"}

Curve = list[tuple[float, float]]
Curves = dict[str, dict[str, Curve]]  # schedule -> seed -> (seconds of training, validation loss)


def curves(page: Path) -> Curves:
    found = re.search(
        r'<script type="application/json" id="charts">(.*?)</script>', page.read_text(), re.DOTALL
    )
    assert found is not None
    chart = next(c for c in json.loads(found[1]) if c["title"] == "Validation loss by training time")
    lines: Curves = {schedule: {} for schedule in COLOURS}
    for series in chart["series"]:
        schedule, seed = series["name"].split(", seed ")
        lines[schedule][seed] = list(zip(series["x"], series["y"], strict=True))
    return lines


def reached(curve: Curve, loss: float) -> float:
    """When a curve first is at `loss`, on straight lines between its points."""
    for (before, high), (after, low) in pairwise(curve):
        if high >= loss >= low:
            return before + (high - loss) / (high - low) * (after - before)
    raise ValueError(f"the curve ends at {curve[-1][1]}, above {loss}")


def targets(lines: Curves) -> dict[str, float]:
    """By seed, the worst of the final losses."""
    seeds = next(iter(lines.values()))
    return {seed: max(by_seed[seed][-1][1] for by_seed in lines.values()) for seed in seeds}


def draw(lines: Curves) -> str:
    """An SVG with all curves, the moments at which they reach their seed's target, and the means of those."""
    goal = targets(lines)
    level = fmean(goal.values())
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        'font-size="12" role="img" aria-label="Validation loss against seconds of training">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
        _text(LEFT, 20, "Loss against time: 42M parameters, four stages on one H200, three seeds", size=14),
    ]
    for number, name in enumerate(lines):
        x = LEFT + 190 * number
        parts += [
            f'<path d="M{x} 36h22" stroke="{COLOURS[name]}" stroke-width="3"/>',
            _text(x + 28, 40, LABELS[name]),
        ]
    for second in range(0, SECONDS[1] + 1, 15):
        parts.append(_grid(_x(second), TOP, _x(second), HEIGHT - BOTTOM))
        parts.append(_text(_x(second), HEIGHT - BOTTOM + 16, str(second), anchor="middle"))
    for tenths in range(36, 53, 4):
        parts.append(_grid(LEFT, _y(tenths / 10), WIDTH - RIGHT, _y(tenths / 10)))
        parts.append(_text(LEFT - 8, _y(tenths / 10) + 4, f"{tenths / 10:.1f}", anchor="end"))
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 8, "seconds of training", anchor="middle"))
    parts.append(
        f'<path d="M{LEFT} {_y(level):.1f}H{WIDTH - RIGHT}" stroke="#555" stroke-dasharray="4 4" fill="none"/>'
    )
    for name, by_seed in lines.items():
        for curve in by_seed.values():
            points = " ".join(f"{_x(x):.1f},{_y(y):.1f}" for x, y in curve if y <= LOSSES[1])
            parts.append(
                f'<polyline points="{points}" fill="none" stroke="{COLOURS[name]}" stroke-width="1.8"/>'
            )
    for (name, by_seed), (shift, anchor) in zip(lines.items(), ((-6, "end"), (6, "start")), strict=True):
        seconds = {seed: reached(curve, goal[seed]) for seed, curve in by_seed.items()}
        for seed, second in seconds.items():
            parts.append(
                f'<circle cx="{_x(second):.1f}" cy="{_y(goal[seed]):.1f}" r="3.5" fill="{COLOURS[name]}"/>'
            )
        mean = fmean(seconds.values())
        parts.append(
            _text(_x(mean) + shift, _y(level) - 12 if shift > 0 else _y(level) + 20, f"{mean:.1f} s",
                  anchor=anchor, colour=COLOURS[name])
        )  # fmt: skip
    parts.append(
        _text(LEFT + 6, _y(level) + 15, f"the worse of the final losses, {level:.3f}", colour="#555")
    )
    return "\n".join([*parts, "</svg>", ""])


def _x(second: float) -> float:
    return LEFT + (second - SECONDS[0]) / (SECONDS[1] - SECONDS[0]) * (WIDTH - LEFT - RIGHT)


def _y(loss: float) -> float:
    return TOP + (LOSSES[1] - loss) / (LOSSES[1] - LOSSES[0]) * (HEIGHT - TOP - BOTTOM)


def _grid(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<path d="M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}" stroke="#e4e4e4"/>'


def _text(
    x: float, y: float, text: str, *, anchor: str = "start", colour: str = "#222", size: int = 12
) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}" font-size="{size}">{text}</text>'


if __name__ == "__main__":
    (ROOT / "docs/figures/loss-against-time.svg").write_text(draw(curves(PAGE)))
