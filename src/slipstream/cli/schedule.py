"""`slipstream schedule`: draw a pipeline schedule, compare several, write them as files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from slipstream.errors import UserError
from slipstream.schedule import plot
from slipstream.schedule.actions import to_csv
from slipstream.schedule.cutover import default_cutover, free_cutover
from slipstream.schedule.generate import ALIASES, GENERATORS, build, canonical
from slipstream.schedule.simulate import Costs, simulate
from slipstream.schedule.steady import Steady, steady

_NAMES = ", ".join([*GENERATORS, *(f"{alias} (= {name})" for alias, name in ALIASES.items())])

MOST_FORWARDS = 50_000  # ten seconds of drawing


def schedule(
    name: Annotated[str, typer.Argument(metavar="NAME", help=f"One of: {_NAMES}.", show_default=False)],
    stages: Annotated[int, typer.Option(help="P, the number of pipeline stages (ranks).")] = 4,
    microbatches: Annotated[int, typer.Option(help="m, the microbatches of one update.")] = 8,
    groups: Annotated[int, typer.Option(help="Updates to draw.")] = 3,
    forward: Annotated[
        str, typer.Option(help="Time of a forward: one number, or one per stage: 1,1,2,1.")
    ] = "1",
    backward: Annotated[str, typer.Option(help="Time of a backward (both halves), like --forward.")] = "2",
    update: Annotated[str, typer.Option(help="Time of an optimizer step, like --forward.")] = "0",
    link: Annotated[str, typer.Option(help="Latency between stages: one number, or one per link.")] = "0",
    in_flight: Annotated[
        int | None, typer.Option(help="pipedream_2bw: microbatches in flight on stage 0, from P to m+1.")
    ] = None,
    cutover: Annotated[
        int | None,
        typer.Option(
            help="pipedream_2bw: microbatches of an update that read old weights, from 0 to m (all)."
        ),
    ] = None,
    chunks: Annotated[int | None, typer.Option(help="interleaved_1f1b: chunks per rank.")] = None,
    every: Annotated[int | None, typer.Option(help="paci: backwards per update (by default m).")] = None,
    compare: Annotated[str | None, typer.Option(help="More schedules, by commas: 1f1b,zbv.")] = None,
    plot_file: Annotated[
        Path | None, typer.Option("--plot", help="Write the picture: FILE.html or FILE.svg.")
    ] = None,
    csv_file: Annotated[
        Path | None, typer.Option("--csv", help="Write NAME's order of one group as torch's CSV.")
    ] = None,
    trace_file: Annotated[
        Path | None, typer.Option("--trace", help="Write a trace for ui.perfetto.dev.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the figures as JSON and nothing else.")
    ] = False,
) -> None:
    """Draw a pipeline schedule and its figures in the steady state."""
    names = _names(name, compare)
    costs = Costs(
        forward=_numbers("--forward", forward),
        backward=_numbers("--backward", backward),
        update=_numbers("--update", update),
        latency=_numbers("--link", link),
    )
    given = {"in_flight": in_flight, "cutover": cutover, "chunks": chunks, "every": every}
    options = _options_per_name(names, given)
    if stages * microbatches * groups > MOST_FORWARDS:
        raise UserError(
            f"{stages} stages x {microbatches} microbatches x {groups} updates are more than a picture shows "
            f"({MOST_FORWARDS:,} forwards). Lower --groups, --microbatches or --stages."
        )
    schedules = {full: build(full, stages, microbatches, groups, **options[full]) for full in names}
    figures = [steady(full, stages, microbatches, costs, **options[full]) for full in names]
    if csv_file is not None:
        plot.write_text(csv_file, to_csv(schedules[names[0]]))
    drawn = schedules if plot_file is not None or trace_file is not None or not as_json else {}
    timelines = {full: simulate(value, costs) for full, value in drawn.items()}
    if plot_file is not None:
        if plot_file.suffix.lower() not in (".html", ".svg"):
            raise UserError(f"--plot cannot write '{plot_file.name}': end the name in .html or .svg.")
        plot.save(plot_file, timelines)
    if trace_file is not None:
        plot.write_text(trace_file, plot.to_trace(timelines))
    if as_json:
        print(json.dumps([_record(entry) for entry in figures], indent=2))
        return
    console = Console(highlight=False)
    console.print(plot.terminal(timelines, console.width, colours=console.color_system is not None))
    console.print()
    console.print(_table(figures))
    console.print("Times are in the unit of --forward, --backward, --update and --link.", style="dim")
    if "pipedream_2bw" in names:
        free = free_cutover(stages, microbatches, in_flight)
        usual = default_cutover(stages, microbatches)
        on_host = default_cutover(stages, microbatches, on_host=True)
        console.print(
            "Where links take no time, and new weights are there within a microbatch of stage 0's last, no stage waits "
            f"from a cutover of {free} on at the latest; a run takes {usual}"
            + (f", on processors {on_host}." if on_host != usual else "."),
            style="dim",
        )
    for path in (plot_file, csv_file, trace_file):
        if path is not None:
            console.print(f"Wrote {path}", soft_wrap=True, markup=False)


def _names(first: str, others: str | None) -> list[str]:
    """The full names to draw, each once, in the order given."""
    words = [first, *(word.strip() for word in (others or "").split(","))]
    return list(dict.fromkeys(canonical(word) for word in words if word))


def _numbers(option: str, text: str) -> float | list[float]:
    try:
        values = [float(word) for word in text.split(",")]
    except ValueError:
        raise UserError(f"{option} takes a number or numbers separated by commas, not '{text}'.") from None
    return values[0] if len(values) == 1 else values


def _options_per_name(names: list[str], given: dict[str, int | None]) -> dict[str, dict[str, int | None]]:
    """Each schedule gets the options it knows; an option that none of them knows is an error."""
    options: dict[str, dict[str, int | None]] = {name: {} for name in names}
    for key, value in given.items():
        takers = [name for name in names if key in GENERATORS[name].options]
        if value is not None and not takers:
            owner = next(name for name, entry in GENERATORS.items() if key in entry.options)
            flag = key.replace("_", "-")
            raise UserError(
                f"--{flag} has no effect on {', '.join(names)}: it belongs to {owner}. Leave it out."
            )
        for name in takers:
            options[name][key] = value
    return options


def _record(figures: Steady) -> dict:
    return {
        "name": figures.name,
        "stages": figures.stages,
        "microbatches": figures.microbatches,
        "time_per_update": figures.time_per_update,
        "bubble_fraction": figures.bubble_fraction,
        "peak_activations": [_plain(value) for value in figures.peak_activations],
        "banks": list(figures.banks),
        "delay": list(figures.delay),
    }


def _table(figures: list[Steady]) -> Table:
    several = len(figures) > 1
    table = Table(title="Steady state", title_justify="left", title_style="bold")
    table.add_column("schedule", style="cyan", no_wrap=True)
    table.add_column("time per\nupdate", justify="right")
    table.add_column("\nbubble", justify="right", no_wrap=True)
    table.add_column("peak\nactivations", min_width=len("activations"))
    table.add_column("\nbanks")
    table.add_column("\ndelay")
    if several:
        table.add_column("\nspeed", justify="right")
    for entry in figures:
        cells = [
            entry.name,
            f"{entry.time_per_update:.4g}",
            f"{100 * entry.bubble_fraction:.2f} %",
            _short(entry.peak_activations),
            _short(entry.banks),
            _short(entry.delay),
        ]
        if several:
            ratio = figures[0].time_per_update / entry.time_per_update if entry.time_per_update else 1.0
            cells.append(f"{ratio:.3f}x")
        table.add_row(*cells)
    return table


def _short(values: tuple[float, ...]) -> str:
    """One number where all stages agree, else all of them, or both ends of a long row."""
    words = [f"{_plain(value):g}" for value in values]
    if len(set(words)) == 1:
        return words[0]
    return " ".join(words) if len(words) <= 7 else " ".join([*words[:4], "…", *words[-2:]])


def _plain(value: float) -> float | int:
    return int(value) if value == int(value) else value
