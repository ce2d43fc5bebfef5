"""The picture of length_and_batch.md in docs/results: Muon's gap against the number of updates.

Both axes are logarithmic, so that a power is a straight line.

    python tools/updates_figure.py        draws docs/figures/gap-against-updates.svg
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from size_figure import COLOURS, MODES, text_at
from size_fit import RESULTS, table
from updates_fit import UPDATES, Run, fitted, last_power, rung, runs, setting_a, size_name

from slipstream.study.statistics import interval

FIGURE = RESULTS.parent / "figures" / "gap-against-updates.svg"
WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 900, 440, 64, 84, 20, 50
ACROSS, UP = (400.0, 110_000.0), (0.0012, 0.5)
X_TICKS = (500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
Y_TICKS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
SHAPES = {8: "8k", 16: "16k", 32: "32k", 128: "128k"}  # tokens of a batch


def draw() -> str:
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        'font-size="12" role="img" aria-label="Gap in validation loss against the number of updates">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
        text_at(LEFT, 22, "Muon: the gap against the number of updates", size=14),
        *legend(),
    ]
    for tick in Y_TICKS:
        parts.append(f'<path d="M{LEFT} {_y(tick):.1f}H{WIDTH - RIGHT}" stroke="#e4e4e4"/>')
        parts.append(text_at(LEFT - 8, _y(tick) + 4, f"+{tick:g}", anchor="end"))
    for tick in X_TICKS:
        parts.append(text_at(_x(tick), HEIGHT - BOTTOM + 18, f"{tick:,}", anchor="middle"))
    parts.append(text_at((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 10, "updates", anchor="middle"))
    for mode in ("delay", "ef"):
        parts += [*line(mode), *published(mode)]
    parts += [part for group in grouped() for part in point(group)]
    return "\n".join([*parts, "</svg>", ""])


def legend() -> Iterator[str]:
    for number, mode in enumerate(("delay", "ef")):
        yield f'<circle cx="{LEFT + 8 + 180 * number}" cy="44" r="4.5" fill="{COLOURS[mode]}"/>'
        yield text_at(LEFT + 20 + 180 * number, 48, MODES[mode])
    for number, (batch, name) in enumerate(SHAPES.items()):
        yield _mark(LEFT + 390 + 70 * number, 44, batch, "#555")
        yield text_at(LEFT + 402 + 70 * number, 48, name)
    yield text_at(LEFT + 680, 48, "tokens a batch")
    words = (
        "Bars: 95 % intervals of three paired seeds (30M: one). Lines: powers of the updates, without 30M and 42M; "
        "bands: 95 % of new settings. Dots: 4M's last power."
    )
    yield text_at(LEFT, 68, words, colour="#555", size=11)


def grouped() -> Iterator[list[Run]]:
    found: dict[tuple[str, int, int, int], list[Run]] = {}
    for run in [*runs(), *setting_a(), *rung()]:
        if run.mode in ("delay", "ef"):
            found.setdefault((run.mode, run.updates, run.batch, run.parameters), []).append(run)
    yield from found.values()


def point(group: list[Run]) -> Iterator[str]:
    one, gap = group[0], interval([run.gap for run in group])
    x, colour = _x(one.updates) + {8: -5, 16: 6, 128: 6}.get(one.batch // 1024, 0), COLOURS[one.mode]
    if gap.interval is not None:
        low, high = (_y(max(end, UP[0])) for end in gap.interval)
        yield f'<path d="M{x:.1f} {low:.1f}V{high:.1f}" stroke="{colour}" stroke-width="2"/>'
    yield _mark(x, _y(gap.value), one.batch // 1024, colour)
    left = one.batch // 1024 in (8, 32) and one.updates < 10_000
    anchor, name = "end" if left else "start", size_name(one.parameters)
    yield text_at(x + (-9 if left else 9), _y(gap.value) + 4, name, anchor=anchor, size=11)


def line(mode: str) -> Iterator[str]:
    found, colour = fitted(mode, [UPDATES]), COLOURS[mode]
    places = [ACROSS[1] * (500 / ACROSS[1]) ** (step / 60) for step in range(61)]
    inside = [updates for updates in places if found.value((updates,)) >= UP[0]]
    ends = [f"{_x(updates):.1f} {_y(found.value((updates,))):.1f}" for updates in (inside[0], inside[-1])]
    yield f'<path d="M{"L".join(ends)}" stroke="{colour}" stroke-opacity="0.5"/>'
    around = [(updates, found.setting((updates,)).interval or UP) for updates in places]
    edge = [(updates, low) for updates, (low, _) in around]
    edge += [(updates, high) for updates, (_, high) in reversed(around)]
    corners = "L".join(f"{_x(a):.1f} {_y(min(max(b, UP[0]), UP[1])):.1f}" for a, b in edge)
    yield f'<path d="M{corners}z" fill="{colour}" fill-opacity="0.10"/>'
    tail = [f"{_x(updates):.1f} {_y(last_power(mode, updates)):.1f}" for updates in (9520.0, ACROSS[1])]
    yield f'<path d="M{"L".join(tail)}" stroke="{colour}" stroke-dasharray="1 4"/>'


def published(mode: str) -> Iterator[str]:
    """The gap at 360M. It is a level: how many updates made it is not known to us."""
    row = next(row for row in table("published") if (row["model"], row["mode"]) == ("360M", mode))
    y = _y(float(row["gap"]))
    yield f'<path d="M{_x(12_000):.1f} {y:.1f}H{WIDTH - RIGHT}" stroke="{COLOURS[mode]}" stroke-dasharray="5 4"/>'
    words = f"published, 360M: {float(row['gap']):+g}"
    yield text_at(WIDTH - RIGHT, y - 5, words, anchor="end", size=11)


def _mark(x: float, y: float, batch: int, colour: str) -> str:
    shapes = {8: "m0 -6l6 10h-12z", 16: "m0 -6l6 6l-6 6l-6 -6z", 128: "m-5 -5h10v10h-10z"}
    if batch in shapes:
        return f'<path d="M{x:.1f} {y:.1f}{shapes[batch]}" fill="{colour}"/>'
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4.5" fill="{colour}"/>'


def _x(updates: float) -> float:
    low, high = (math.log(end) for end in ACROSS)
    return LEFT + (math.log(updates) - low) / (high - low) * (WIDTH - LEFT - RIGHT)


def _y(gap: float) -> float:
    low, high = (math.log(end) for end in UP)
    return TOP + (high - math.log(gap)) / (high - low) * (HEIGHT - TOP - BOTTOM)


if __name__ == "__main__":
    FIGURE.write_text(draw())
