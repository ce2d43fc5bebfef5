"""The outcome as JSON records and as a table."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from slipstream.bench.contenders import BASELINE, BOUND, ENGINE, ENGINE_2BW, LABELS, RIVALS
from slipstream.bench.measure import NO_LATENCY, NOT_APPLICABLE, Result
from slipstream.bench.work import Work

FAILED = "[red]failed[/]"
EXPLAINED = (
    "of bound: time per update without any waiting (every stage busy all the time) over the time taken; 1 is a "
    "pipeline without a bubble, and a little above 1 is noise or work that overlaps. speed-up: over torch's 1F1B. "
    "cpu ms, peak MB: of each rank."
)


def record(result: Result) -> dict[str, Any]:
    """One JSON object per number of microbatches; times in milliseconds per update, null where not run."""
    ours, bound, baseline = (result.milliseconds(name) for name in (ENGINE, BOUND, BASELINE))
    rivals = {name: result.milliseconds(name) for name in RIVALS}
    ran = {name: time for name, time in rivals.items() if time is not None}
    best = min(ran, key=ran.__getitem__, default=None)
    best_ms = ran[best] if best else None
    samples = result.samples
    return {
        "microbatches": result.work.microbatches,
        "stages": result.work.stages,
        "work": result.work.kind,
        "rows": result.work.batch,
        "sequence": result.work.tokens,
        "clip": result.work.max_grad_norm is not None,
        "correction": result.work.correction,
        "cutover": result.work.old,
        "in_flight": in_flight(result),
        "device": result.work.device,
        "carrier": result.carrier,
        "link_latency_ms": result.work.link_latency_seconds * 1e3,
        "bound_ms": bound,
        **{f"{name}_ms": time for name, time in rivals.items()},
        "slipstream_ms": ours,
        "slipstream_2bw_ms": result.milliseconds(ENGINE_2BW),
        "speedup_over_1f1b": _ratio(baseline, ours),
        "best_sync": best,
        "best_sync_ms": best_ms,
        "speedup_over_best_sync": _ratio(best_ms, ours),
        "fraction_of_bound": _ratio(bound, ours),
        "fill_ms": _median_ms([sample.fill_seconds for sample in samples.get(ENGINE, ())]),
        "drain_ms": _median_ms([sample.drain_seconds for sample in samples.get(ENGINE, ())]),
        "least_ms": {name: min(s.period_seconds for s in taken) * 1e3 for name, taken in samples.items()},
        "rounds_ms": {name: [s.period_seconds * 1e3 for s in taken] for name, taken in samples.items()},
        "cpu_ms": {name: cpu_time(result, name) for name in samples},
        "peak_memory_bytes": {name: list(found) for name, found in result.peak_memory_bytes.items()},
        "errors": result.errors,
        **(_language(result.work) if result.work.kind == "language" else {}),
    }


def _language(work: Work) -> dict[str, Any]:
    """What a language model was cut into."""
    return {
        "preset": work.preset,
        "compile": work.compile,
        "head_layers": work.head_layers,
        "layers": [len(layers) for layers in work.layers(range(work.stages))],
    }


def in_flight(result: Result) -> dict[str, int]:
    """Microbatches on the first stage, of the contenders that choose it; of their last sample."""
    last = {name: samples[-1].in_flight for name, samples in result.samples.items() if samples}
    return {name: count for name, count in last.items() if count is not None}


def cpu_time(result: Result, name: str) -> list[float]:
    """Least processor time of each rank per update, all threads: what a contender costs beyond the bound."""
    by_rank = zip(*(sample.cpu_seconds for sample in result.samples[name]), strict=True)
    return [min(values) * 1e3 for values in by_rank]


def print_result(console: Console, result: Result) -> None:
    """One table: time per update, share of the bound, speed-up over torch 1F1B, memory."""
    row = record(result)
    work = result.work
    clip = f", clipped at {work.max_grad_norm:g}" if work.max_grad_norm is not None else ""
    title = f"{work.stages} stages, {work.microbatches} microbatches, {work.kind}{clip}: ms per update"
    table = Table(title=title, box=SIMPLE_HEAD)
    table.add_column(no_wrap=True)
    for heading in ("median", "least", "of bound", "speed-up", "cpu ms", "peak MB"):
        table.add_column(heading, justify="right", min_width=max(map(len, heading.split())))
    for name in (BOUND, *RIVALS, ENGINE, ENGINE_2BW):
        label = LABELS[name]
        time = result.milliseconds(name)
        if time is None:
            if name in result.errors:
                table.add_row(label, _state(result.errors[name]))
            continue
        table.add_row(
            f"[bold]{label}[/]" if name == ENGINE else label,
            f"{time:.1f}",
            f"{row['least_ms'][name]:.1f}",
            _fixed(_ratio(row["bound_ms"], time)),
            _fixed(_ratio(row["torch_1f1b_ms"], time)),
            " ".join(f"{milliseconds:.0f}" for milliseconds in row["cpu_ms"][name]),
            " ".join(f"{size / 2**20:.0f}" for size in row["peak_memory_bytes"][name]),
        )
    console.print(table)
    if deep := row["in_flight"]:
        rest = f"; all old, {deep[ENGINE_2BW]} in flight" if ENGINE_2BW in deep else ""
        console.print(
            f"slipstream: {work.old} of {work.microbatches} old, {deep.get(ENGINE)} in flight{rest}"
        )
    if row["fill_ms"] is not None:
        fill, drain = (max(0.0, row[name]) for name in ("fill_ms", "drain_ms"))  # below 0: lost in the noise
        console.print(f"slipstream once per run: fill {fill:.1f} ms, drain {drain:.1f} ms")
    console.print(EXPLAINED, style="dim")
    for name, error in result.errors.items():
        style = "red" if _state(error) == FAILED else "dim"
        console.print(f"{LABELS[name]}: {error}", style=style, markup=False)


def _state(error: str) -> str:
    if error == NO_LATENCY:
        return "not run"
    return "not applicable" if error.startswith(NOT_APPLICABLE) else FAILED


def _ratio(over: float | None, under: float | None) -> float | None:
    return over / under if over is not None and under is not None else None


def _median_ms(seconds: Sequence[float]) -> float | None:
    return median(seconds) * 1e3 if seconds else None


def _fixed(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
