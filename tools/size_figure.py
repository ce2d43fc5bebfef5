"""The picture of docs/results: Muon's gap against the size of the model, and token penalties by both readings.

Everything is read from the tables of docs/results, of which `slipstream study table` makes all but `published.csv`.
Gaps grow from a hundredth to a quarter, so the upper part of their axis is logarithmic: asinh(gap / 0.01).

    python tools/size_figure.py        draws docs/figures/gap-against-size.svg and prints the rows of net_gain.md
"""

from __future__ import annotations

import gzip
import json
import math
from dataclasses import asdict, dataclass

from size_fit import RESULTS, entry, penalties, row_of, table

FIGURE = RESULTS.parent / "figures" / "gap-against-size.svg"
# study, what picks its rows, name of the setting
OURS = (
    ("cpu-size", {"size": "0.5M"}, "0.46M"),
    ("cpu-size", {"size": "1M"}, "1.3M"),
    ("ladder", {"size": "2M"}, "2M"),
    ("ladder", {"size": "4M"}, "4M"),
    ("b-muon-adamw", {"optimizer": "muon"}, "8M (B)"),  # the ladder's 8M are three of these five seeds,
    ("ladder", {"size": "8M", "mode": "ef 1/3"}, "8M (B)"),  # and this
    ("ladder", {"size": "16M"}, "16M"),
    ("ladder-30m", {"length": "whole"}, "30M"),
    ("a-cutover", {"optimizer": "muon"}, "42M (A)"),
)
MODES = {"delay": "one update of delay", "ef": "with error feedback", "ef 1/3": "and only a third of it old"}
COLOURS = {"delay": "#c51b7d", "ef": "#2166ac", "ef 1/3": "#1b7837"}
WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 900, 440, 64, 78, 20, 66
SIZES, GAPS, KNEE = (3.6e5, 1.4e10), (-0.032, 0.35), 0.01
TICKS = (-0.03, -0.02, -0.01, 0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3)
NEAR_ANOTHER = "42M (A)"  # whose name would cover that of 30M
# Joined by a line: the same tokens per parameter, batch and text.
LADDER = ("2M", "4M", "8M (B)", "16M", "30M")


@dataclass(frozen=True)
class Dot:
    """A gap to synchronous training; without `low` and `high` it has no interval."""

    setting: str
    mode: str
    parameters: float
    tokens_per_parameter: float
    gap: float
    low: float | None
    high: float | None
    published: bool


def dots() -> list[Dot]:
    found = []
    for study, wanted, setting in OURS:
        size, tokens = _size(study, wanted)
        for row in table(study):
            if row["mode"] in MODES and all(row[axis] == label for axis, label in wanted.items()):
                around = (_number(row["gap_low"]), _number(row["gap_high"]))
                gap = float(row["gap"])
                found.append(Dot(setting, row["mode"], size, tokens / size, gap, *around, published=False))
    for row in table("published"):
        if row["gap"]:
            size, ratio = float(row["parameters"]), float(row["tokens_per_parameter"])
            gap = float(row["gap"])
            found.append(Dot(row["model"], row["mode"], size, ratio, gap, None, None, published=True))
    return found


def _size(study: str, wanted: dict[str, str]) -> tuple[float, float]:
    """Parameters and tokens of the whole runs that a setting's rows are made of."""
    named = {row["run"] for row in table(f"{study}-runs") if all(row[k] == v for k, v in wanted.items())}
    with gzip.open(RESULTS / f"{study}.jsonl.gz", "rt") as file:
        runs = [run for line in file if (run := json.loads(line))["run"] in named]
    longest = max(runs, key=lambda run: run["tokens"])
    return longest["parameters"], longest["tokens"]


def _number(text: str) -> float | None:
    return float(text) if text else None


def penalty_rows() -> list[str]:
    """Rows of net_gain.md: gap, token penalty by curve and by length, of Muon in both settings."""
    names = {"delay": "delay", "ef": "error feedback", "ef+start": "error feedback and a start of 10 %"}
    names |= {"ef+start20": "error feedback and a start of 20 %"}
    names |= {"ef 1/2": "error feedback, half of it old", "ef 1/3": "error feedback, a third of it old"}
    names |= {
        "ef 1/4": "error feedback, a quarter of it old",
        "1/2": "delay, half of it old",
        "1/3": "delay, a third of it old",
        "ef+fine20": "error feedback and a fine start of 20 %",
        "ef 1/2+fine20": "error feedback, half of it old, and a fine start of 20 %",
    }
    rows = []
    for setting, study, elsewhere in (
        ("8M, B", "b-muon-adamw", ()),
        ("8M, B", "b-cutover", ("ef",)),
        ("42M, A", "a-core", ("ef",)),
        ("42M, A", "a-cutover", ("delay",)),
        ("42M, A", "a-fine", ("delay", "ef", "ef+start20", "ef 1/2", "ef 1/4")),
    ):
        for row in table(study):
            if row.get("optimizer", "muon") != "muon" or row["mode"] not in names or row["mode"] in elsewhere:
                continue
            cells = [setting, names[row["mode"]], row["seeds"], entry(row, "gap", "+.3f"), *penalties(row)]
            rows.append(row_of(cells))
    return rows


def draw(found: list[Dot]) -> str:
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        'font-size="12" role="img" aria-label="Gap in validation loss against parameters of the model">',
        f"<metadata>{json.dumps([asdict(dot) for dot in found])}</metadata>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
        text_at(LEFT, 22, "Muon: how much higher the final validation loss is than without delay", size=14),
    ]
    for number, (mode, label) in enumerate(MODES.items()):
        parts += [_mark(LEFT + 8 + 180 * number, 44, COLOURS[mode])]
        parts += [text_at(LEFT + 20 + 180 * number, 48, label)]
    parts += [_mark(LEFT + 8 + 545, 44, "#555", published=True), text_at(LEFT + 565, 48, "published")]
    bars = "Bars: 95 % intervals over three paired seeds (up to five at 8M and 42M; 30M is one seed). "
    bars += "Lines: equal batch and text."
    parts += [text_at(LEFT, 66, bars, colour="#555", size=11)]
    for tick in TICKS:
        y, colour = _y(tick), "#e4e4e4" if tick else "#888"
        parts.append(f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="{colour}"/>')
        parts.append(text_at(LEFT - 8, y + 4, f"{tick:+.2f}" if tick else "0", anchor="end"))
    for setting in dict.fromkeys(dot.setting for dot in found):
        one = next(dot for dot in found if dot.setting == setting)
        near = setting == NEAR_ANOTHER
        x, anchor = _x(one.parameters) - 5 * near, "start" if near else "middle"
        parts.append(text_at(x, HEIGHT - BOTTOM + 18, setting, anchor=anchor))
        ratio = f"{one.tokens_per_parameter:.2g}"
        parts.append(text_at(_x(one.parameters), HEIGHT - BOTTOM + 34, ratio, anchor="middle", colour="#555"))
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(
        text_at(middle, HEIGHT - 10, "parameters; below them, tokens per parameter", anchor="middle")
    )
    for mode in MODES:
        joined = [dot for dot in found if dot.mode == mode and dot.setting in LADDER]
        corners = "L".join(f"{_place(dot):.1f} {_y(dot.gap):.1f}" for dot in joined)
        parts.append(f'<path d="M{corners}" fill="none" stroke="{COLOURS[mode]}" stroke-opacity="0.4"/>')
    for dot in found:
        x = _place(dot)
        if dot.low is not None and dot.high is not None:
            ends = f"M{x:.1f} {_y(dot.low):.1f}V{_y(dot.high):.1f}"
            parts.append(f'<path d="{ends}" stroke="{COLOURS[dot.mode]}" stroke-width="2"/>')
        parts.append(_mark(x, _y(dot.gap), COLOURS[dot.mode], dot.published))
    return "\n".join([*parts, "</svg>", ""])


def _mark(x: float, y: float, colour: str, published: bool = False) -> str:
    if published:
        shape = f"M{x:.1f} {y - 6:.1f}l6 6l-6 6l-6 -6z"
        return f'<path d="{shape}" fill="#fff" stroke="{colour}" stroke-width="2"/>'
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4.5" fill="{colour}"/>'


def _place(dot: Dot) -> float:
    """Its x; the modes of one size stand beside each other."""
    return _x(dot.parameters) + 10 * (list(MODES).index(dot.mode) - 1)


def _x(parameters: float) -> float:
    low, high = (math.log(size) for size in SIZES)
    return LEFT + (math.log(parameters) - low) / (high - low) * (WIDTH - LEFT - RIGHT)


def _y(gap: float) -> float:
    low, high, here = (math.asinh(value / KNEE) for value in (*GAPS, gap))
    return TOP + (high - here) / (high - low) * (HEIGHT - TOP - BOTTOM)


def text_at(
    x: float, y: float, text: str, *, anchor: str = "start", colour: str = "#222", size: int = 12
) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}" font-size="{size}">{text}</text>'


if __name__ == "__main__":
    FIGURE.write_text(draw(dots()))
    print("\n".join(penalty_rows()))
