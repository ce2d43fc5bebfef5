"""A race with several seeds: a race of its own for each, in a folder of its own, and the mean of their verdicts.

Seed by seed, so that what an interruption leaves is made of whole races. An interval needs three of them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from slipstream.bench.checks import make_room
from slipstream.bench.race import OURS, curve, print_table, race
from slipstream.errors import UserError
from slipstream.metrics.events import read_run
from slipstream.metrics.report_page import Chart, Section, Series, Table, Text, page
from slipstream.study.statistics import interval

FIGURES = ("speedup_in_time_to_target", "speedup_in_tokens_per_second", "token_penalty")


def folder(out: Path, seed: int) -> Path:
    return out / f"seed-{seed}"


def race_seeds(
    arguments: Sequence[str],
    schedules: Sequence[str],
    out: Path,
    seeds: Sequence[int],
    target: float | None = None,
    updates: int | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Run what is missing, and write race.json and race.html into `out` after each seed."""
    if not seeds or len(set(seeds)) < len(seeds):
        raise UserError(f"--seeds {','.join(map(str, seeds))}: name each seed once, such as 0,1,2.")
    make_room(out / "race.json")
    races: dict[int, dict[str, Any]] = {}
    result: dict[str, Any] = {}
    for seed in seeds:
        progress(f"seed {seed}")
        given = [*arguments, f"train.seed={seed}"]
        races[seed] = race(given, schedules, folder(out, seed), target, updates, progress)
        result = write(races, schedules, out, complete=len(races) == len(seeds))
    return result


def write(
    races: dict[int, dict[str, Any]], schedules: Sequence[str], out: Path, complete: bool
) -> dict[str, Any]:
    result: dict[str, Any] = {"races": [{"seed": seed} | found for seed, found in races.items()]}
    decided = [found for found in races.values() if "best_sync" in found]
    if decided:
        result["best_sync"] = sorted({found["best_sync"] for found in decided})
    for figure in FIGURES if decided else ():
        mean = interval([found[figure] for found in decided])
        result[figure] = {"mean": mean.value, "interval": mean.interval, "seeds": mean.n}
    result |= {"complete": complete, "page": str(out / "race.html")}
    parts = [
        *([] if complete else [Text("The race is not over: these are the figures so far.", tone="warning")]),
        _table(result),
        *(Text(said) for said in (_sentence(result),) if said),
        _chart(list(races), schedules, out),
    ]
    lead = Section("Time to loss", parts)
    (out / "race.html").write_text(page("Race", [lead], f"seeds {', '.join(map(str, races))}"))
    (out / "race.json").write_text(json.dumps(result, indent=2) + "\n")
    return result


def _table(result: dict[str, Any]) -> Table:
    rows = []
    for found in result["races"]:
        laps = {lap["schedule"]: lap["seconds_to_target"] for lap in found["laps"]}
        decided = "best_sync" in found
        rows.append(
            [
                str(found["seed"]),
                f"{found['target_loss']:.4f}",
                f"{laps[OURS]:.1f} s" if decided else "",
                f"{laps[found['best_sync']]:.1f} s, {found['best_sync']}" if decided else "",
                *(f"{found[figure]:.3f}" if decided else "" for figure in FIGURES),
            ]
        )
    return Table(
        ("seed", "loss", OURS, "best other", "faster", "tokens/s", "tokens"),
        rows,
        title="Time to one validation loss, by seed",
        note="Seconds of training: without start-up, compilation and validations. Faster, tokens/s and tokens: how "
        f"many times as fast {OURS} was, at how many times the tokens per second, with how many times the tokens.",
    )


def _sentence(result: dict[str, Any]) -> str:
    if "best_sync" not in result:
        return ""
    fast, speed, tokens = (_said(result[figure]) for figure in FIGURES)
    decided, raced = result[FIGURES[0]]["seeds"], len(result["races"])
    counted = (
        f"{decided} seeds" if decided == raced else f"the {decided} of {raced} seeds in which both got there"
    )
    return (
        f"{OURS} reaches it {fast} times as fast as {' or '.join(result['best_sync'])}: {speed} times the tokens per "
        f"second, {tokens} times the tokens (means of {counted})."
    )


def _said(figure: dict[str, Any]) -> str:
    if figure["interval"] is None:
        return f"{figure['mean']:.3f}"
    low, high = figure["interval"]
    return f"{figure['mean']:.3f} [{low:.3f}, {high:.3f}]"


def _chart(seeds: Sequence[int], schedules: Sequence[str], out: Path) -> Chart:
    series = []
    for seed in seeds:
        for index, schedule in enumerate(schedules):
            points = curve(read_run(folder(out, seed) / schedule))
            x, y = [point.seconds for point in points], [point.loss for point in points]
            series.append(Series(f"{schedule}, seed {seed}", x, y, colour=index))
    return Chart("Validation loss by training time", series, x_label="seconds", y_label="nats", focus=True)


def print_seeds(console: Console, result: dict[str, Any]) -> None:
    print_table(console, _table(result))
    if said := _sentence(result):
        console.print(said)
    console.print(f"Curves: {result['page']}")
