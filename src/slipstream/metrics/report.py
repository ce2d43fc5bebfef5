"""Run folders -> one HTML page: curves, speed, memory, timeline, config, machine, data and samples.

Several runs are laid over one another in every chart; what belongs to one run only (timeline, delays,
config, samples) follows run by run. A run that is empty, crashed or still going gives a page that says
so.
"""

from __future__ import annotations

import json
import shlex
import statistics
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from slipstream.formats import parse_toml, si
from slipstream.metrics import goodput
from slipstream.metrics.events import Event, Run, number, read_run, values
from slipstream.metrics.events import columns as columns_of
from slipstream.metrics.report_columns import Columns, duration, labels, numbers, shape
from slipstream.metrics.report_page import Chart, Part, Section, Series, Table, Text, Tiles, page
from slipstream.metrics.report_timeline import delays, lanes

WHOLE_SAMPLES = 3
COMPLAINTS = 40  # shown in all, but a few of each run


def write_report(
    runs: Sequence[str | Path], out: str | Path | None = None, title: str = "", lead: Sequence[Section] = ()
) -> Path:
    """Read the run folders and write the page; returns its path. `lead`: what is said before the runs themselves."""
    found = [read_run(run) for run in runs]  # first: a mistyped run must not become a folder
    out = found[0].path / "report.html" if out is None else Path(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    # A log may hold what no encoding of text does.
    out.write_text(report(found, title, lead), encoding="utf-8", errors="backslashreplace")
    return out


def report(runs: Sequence[Run], title: str = "", lead: Sequence[Section] = ()) -> str:
    """The page about one or more runs."""
    names = labels(runs)
    title = title or (names[0] if len(runs) == 1 else f"{len(runs)} runs")
    subtitle = f"slipstream report, {time.strftime('%Y-%m-%d %H:%M')}"
    if len(runs) > 1:
        subtitle = f"{', '.join(names)} · {subtitle}"
    return page(title, [*lead, *sections(runs)], subtitle)


def sections(runs: Sequence[Run]) -> list[Section]:
    """The parts of the page; a section without parts is left out by the page."""
    names = labels(runs)
    columns = [
        Columns(run, name, len(runs) == 1, index)
        for index, (run, name) in enumerate(zip(runs, names, strict=True))
    ]
    in_use = [curve for column in columns for curve in column.stage_curves("memory_bytes", 1 / 2**20)]
    memory = Chart("Memory per stage", in_use, y_label="MiB", from_zero=True)
    return [
        Section(
            "Summary",
            [Tiles(headline(columns[0])) if len(runs) == 1 else _summary(columns), *_complaints(columns)],
        ),
        Section("Loss", _loss(columns)),
        Section("Speed", _speed(columns)),
        Section("Gradients", _gradients(columns)),
        Section("Memory", [chart for chart in (memory,) if chart.series]),
        Section("Timeline", _timelines(columns)),
        Section("Restarts", [part for column in columns for part in _restarts(column)]),
        Section("Samples", [part for column in columns for part in _samples(column)]),
        Section(
            "Settings", [*_differences(columns), *(part for column in columns for part in _settings(column))]
        ),
    ]


def _median(rows: Iterable[Event], key: str) -> float | None:
    """Median over the second half of the run: start-up and compilation are not its speed."""
    found = values(rows, key)
    return statistics.median(found[len(found) // 2 :]) if found else None


def headline(column: Columns) -> list[tuple[str, str, str]]:
    """(label, value, small print) of the numbers a run is judged by."""
    run, steps = column.run, column.steps
    last = steps[-1] if steps else {}
    finish = run.last("finish")
    final = _first_number(finish.get("validation_loss"), *(row.get("loss") for row in column.validation[-1:]))
    loss = number(last.get("loss"))
    busy = [
        statistics.fmean(values) for row in steps[len(steps) // 2 :] if (values := numbers(row.get("busy")))
    ]
    mfu = _median(steps, "mfu")
    skipped = sum(1 for row in steps if row.get("skipped"))
    seconds = max(column.clock.values(), default=None)
    start = column.start
    return [
        ("status", run.status, shape(start) or "no start recorded"),
        ("validation loss", "–" if final is None else f"{final:.4f}", _against(finish)),
        (
            "training loss",
            "–" if loss is None else f"{loss:.4f}",
            f"at step {last['step']}" if last else "no step yet",
        ),
        (
            "parameters",
            si(number(start.get("parameters"))),
            f"{start['microbatches']} microbatches an update" if "microbatches" in start else "",
        ),
        ("tokens", si(_first_number(finish.get("tokens"), last.get("tokens"))), f"in {duration(seconds)}"),
        ("tokens / s", si(_median(steps, "tokens_per_second")), "median of the second half"),
        ("busy", f"{statistics.median(busy):.1%}" if busy else "–", "mean over stages"),
        (
            "MFU",
            "–" if mfu is None else f"{mfu:.1%}",
            f"{skipped} skipped groups" if skipped else "no skipped groups",
        ),
    ]


def _first_number(*values: object) -> float | None:
    return next((found for value in values if (found := number(value)) is not None), None)


def _against(finish: Event) -> str:
    baseline = number(finish.get("unigram_entropy"))
    return "at the newest weights" if baseline is None else f"guessing by frequency: {baseline:.4f}"


def _summary(columns: Sequence[Columns]) -> Part:
    rows = [[column.name, *(value for _, value, _ in headline(column))] for column in columns]
    return Table(["run", *(label for label, _, _ in headline(columns[0]))], rows)


def _complaints(columns: Sequence[Columns]) -> list[Part]:
    """Of each run the newest of what it warned of, and before them how many there were."""
    parts: list[Part] = []
    most = max(3, COMPLAINTS // len(columns))
    for column in columns:
        told = [event for event in column.run.events if event["event"] in ("warning", "error")]
        if len(told) > most:
            text = f"{len(told) - most} earlier warnings are in events.jsonl; the last {most} follow."
            parts.append(Text(column.label(text), tone="warning"))
        for event in told[-most:]:
            text = f"step {event.get('step', '?')}: {event.get('message', '')}"
            parts.append(Text(column.label(text), tone=event["event"], preformatted=True))
        if column.run.unreadable:
            count = column.run.unreadable
            lines = "1 line" if count == 1 else f"{count} lines"
            text = f"{lines} of events.jsonl could not be read (cut off by a crash?)."
            parts.append(Text(column.label(text), tone="warning"))
        if not column.steps:
            parts.append(Text(column.label("This run has recorded no step yet."), tone="warning"))
    return parts


def _loss(columns: Sequence[Columns]) -> list[Part]:
    curves: list[Series] = []
    for column in columns:
        curves.append(column.curve(column.steps, "loss", "training", colour=column.colour))
        colour = column.colour + 1 if column.alone else column.colour
        curves.append(
            column.curve(column.validation, "loss", "validation", dashed=not column.alone, colour=colour)
        )
    if not any(curve.x for curve in curves):
        return []
    note = (
        "Training loss is that of the weights an update's batches read, which are one update old without a flush; "
        "validation loss that of the newest."
    )
    parts: list[Part] = [Chart("Loss by step", curves, y_label="loss", note=note, smooth=True, focus=True)]
    clocked, fed = [], []
    for column in columns:
        colour = 1 if column.alone else column.colour
        for target, place in ((clocked, column.seconds_at), (fed, lambda row: number(row.get("tokens")))):
            target.append(Series(column.name, *columns_of(column.validation, "loss", place), colour=colour))
    if any(len(curve.x) > 1 for curve in clocked):
        parts.append(Chart("Validation loss by wall clock", clocked, x_label="seconds", y_label="loss"))
    if len(columns) > 1 and any(len(curve.x) > 1 for curve in fed):
        parts.append(Chart("Validation loss by tokens", fed, x_label="tokens", y_label="loss"))
    rates = [column.curve(column.steps, "lr", "learning rate") for column in columns]
    if any(curve.x for curve in rates):
        parts.append(Chart("Learning rate", rates, y_label="learning rate", from_zero=True))
    return parts


def _speed(columns: Sequence[Columns]) -> list[Part]:
    speed = [column.curve(column.steps, "tokens_per_second", "tokens / s") for column in columns]
    mfu = [column.curve(column.steps, "mfu", "MFU", scale=100.0) for column in columns]
    busy = [curve for column in columns for curve in column.stage_curves("busy", 100.0)]
    charts = [
        Chart("Throughput", speed, y_label="tokens / s", from_zero=True, smooth=True),
        Chart("Utilisation: busy time", busy, y_label="% of wall clock", from_zero=True, smooth=True),
        Chart("Model FLOP utilisation", mfu, y_label="% of peak", from_zero=True, smooth=True),
    ]
    return [chart for chart in charts if any(curve.x for curve in chart.series)]


def _gradients(columns: Sequence[Columns]) -> list[Part]:
    curves: list[Series] = []
    skipped = 0
    for column in columns:
        norms = column.curve(column.steps, "grad_norm", "gradient norm")
        curves.append(norms)
        floor = min(norms.y, default=1.0)
        lost = [row["step"] for row in column.steps if row.get("skipped")]
        skipped += len(lost)
        if lost:
            name = column.label(f"skipped groups ({len(lost)})")
            curves.append(Series(name, lost[:2000], [floor] * min(len(lost), 2000), markers=True, colour=4))
    if not any(curve.x for curve in curves):
        return []
    told = (
        f"{skipped} groups had a non-finite gradient and were skipped."
        if skipped
        else "No group was skipped."
    )
    title = "Global gradient norm, before clipping"
    return [Chart(title, curves, y_label="norm", log_y=True, note=told, smooth=True)]


def _timelines(columns: Sequence[Columns]) -> list[Part]:
    parts: list[Part] = []
    for column in columns:
        event = column.run.last("timeline")
        if not event:
            continue
        start = column.run.before(event, "start")  # a run that goes on may have another number of stages
        drawn = lanes(event, start, title=column.label(f"Groups around step {event.get('step', '?')}"))
        parts.extend(
            part for part in (drawn, delays(event, title=column.label("Delay of every microbatch"))) if part
        )
    return parts


def _restarts(column: Columns) -> list[Part]:
    """What starting again cost this run, and what that means with a fault every so often."""
    found = goodput.measured(column.run.events)
    if found is None:
        return []
    every = found.checkpoint_every or goodput.USUAL_CHECKPOINT_SECONDS
    costs = goodput.Faults(60.0, every, found.restart, goodput.AWAY_SECONDS)
    times = "once" if found.count == 1 else f"{found.count} times"
    told = (
        f"Started again {times}: {duration(found.restart)} from the last word to the next update on average, "
        f"{found.lost_steps} updates done twice. {found.useful:.1%} of the time so far was useful."
    )
    note = (
        f"Simulated from these costs, with a checkpoint every {duration(every)} and a lost rank away for "
        f"{duration(costs.away)}. Restart from disk: the run waits for the rank. Elastic: it goes on with a stage less "
        "(pipeline.elastic)."
    )
    rows = [
        [f"{minutes:g} minutes", f"{plain:.1%}", f"{elastic:.1%}" if found.stages > 1 else "–"]
        for minutes, plain, elastic in goodput.table(costs, goodput.MINUTES, found.stages)
    ]
    header = ["a fault every", "restart from disk", "elastic"]
    return [Text(column.label(told)), Table(header, rows, title=column.label("Goodput"), note=note)]


def _samples(column: Columns) -> list[Part]:
    samples = column.run.of("sample")
    parts: list[Part] = []
    for index, event in enumerate(reversed(samples)):
        title = column.label(f"step {event.get('step', '?')}")
        text = f"{event.get('prompt', '')}▸{event.get('text', '')}"
        parts.append(Text(text, preformatted=True, title=title, folded=index >= WHOLE_SAMPLES))
    return parts[:30]


def _differences(columns: Sequence[Columns]) -> list[Part]:
    """The settings in which several runs differ."""
    if len(columns) < 2:
        return []
    flat = [_flatten(_toml(column.run.config)) for column in columns]
    keys = sorted(set().union(*flat))
    rows = [
        [key, *(settings.get(key, "–") for settings in flat)]
        for key in keys
        if len({settings.get(key) for settings in flat}) > 1
    ]
    header = ["setting", *(column.name for column in columns)]
    return [Table(header, rows, title="Where the runs differ")] if rows else []


def _settings(column: Columns) -> list[Part]:
    parts: list[Part] = []
    if column.run.config:
        title = column.label("config.toml")
        parts.append(Text(column.run.config, preformatted=True, title=title, folded=True))
    if column.run.environment:
        environment = dict(column.run.environment)
        command = environment.pop("command", "")
        if isinstance(command, list):  # as older runs have it
            command = shlex.join(map(str, command))
        if command:
            parts.insert(0, Text(str(command), preformatted=True, title=column.label("Command")))
        rows = [[key, value] for key, value in _flatten(environment).items()]
        parts.append(Table(["", ""], rows, title=column.label("Machine, versions and data fingerprint")))
    return parts


def _toml(text: str) -> dict[str, Any]:
    try:
        return parse_toml(text)
    except ValueError:
        return {}


def _flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, str]:
    flat: dict[str, str] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            flat.update(_flatten(value, f"{name}."))
        else:
            flat[name] = value if isinstance(value, str) else json.dumps(value, default=str)
    return flat
