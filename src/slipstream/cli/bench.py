"""`slipstream bench`: the engine against torch's schedules and the bound; `bench optim`: the optimizers;
`bench train`: the whole trainer on one device against transformers."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from slipstream.errors import UserError

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.callback(invoke_without_command=True)
def pipeline(
    context: typer.Context,
    stages: Annotated[int, typer.Option(help="Pipeline stages P, one process each.")] = 2,
    microbatches: Annotated[str, typer.Option(help="Microbatches per update, one run for each.")] = "2,4,8",
    work: Annotated[str, typer.Option(help="compute: real blocks. sleep: timed waits, any P.")] = "compute",
    clip: Annotated[bool, typer.Option("--clip", help="Clip the global gradient norm.")] = False,
    correction: Annotated[str, typer.Option(help="Delay correction of our schedule.")] = "none",
    in_flight: Annotated[int | None, typer.Option(help="Microbatches in flight; default: chosen.")] = None,
    link_latency_ms: Annotated[float, typer.Option(help="Delay every message of ours by this.")] = 0.0,
    rivals: Annotated[str, typer.Option(help="all, none, or a list: 1f1b,gpipe,...")] = "all",
    rounds: Annotated[int, typer.Option(help="Samples of each contender; the median counts.")] = 5,
    updates: Annotated[int | None, typer.Option(help="Updates a sample; default: 64 microbatches.")] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw measured over predicted timeline: .html, .svg, .json.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON only.")] = False,
) -> None:
    """Time per update of torch's synchronous schedules, of ours, and of the bubble-free bound."""
    if context.invoked_subcommand is not None:
        return
    from slipstream.bench.measure import bench, parse_rivals
    from slipstream.bench.report import print_result, record
    from slipstream.bench.timeline import check_plottable, draw
    from slipstream.bench.work import Work
    from slipstream.distributed import RankPool

    if plot is not None:
        check_plottable(plot)

    setting = Work(
        kind=work,
        stages=stages,
        microbatches=stages,
        max_grad_norm=1.0 if clip else None,
        correction=correction,
        in_flight=in_flight,
        link_latency_seconds=link_latency_ms / 1e3,
    )
    works = [replace(setting, microbatches=count) for count in _counts(microbatches)]
    notes = Console(stderr=True, highlight=False)
    cores = os.cpu_count() or 1
    if work == "compute" and stages > cores:
        notes.print(f"note: {stages} computing stages on {cores} cores measure the cores, not the schedules.")
    console = Console(highlight=False)
    against = parse_rivals(rivals)
    records = []
    with RankPool(stages) as pool, notes.status("starting") as status:
        for result in bench(pool, works, against, rounds, updates, progress=status.update):
            records.append(record(result))
            if not as_json:
                print_result(console, result)
        if plot is not None:
            draw(pool, works[0], plot)
            notes.print(f"timeline: {plot}")
    if as_json:
        print(json.dumps(records, indent=2))


@app.command()
def optim(
    device: Annotated[str | None, typer.Option(help="cpu or cuda; default: a GPU if there is one.")] = None,
    preset: Annotated[str | None, typer.Option(help="Model whose matrices are stepped.")] = None,
    rounds: Annotated[int, typer.Option(help="Samples of each; the median counts.")] = 7,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON only.")] = False,
) -> None:
    """Time of one optimizer step and of the delay corrections."""
    from slipstream.bench import optim as optimizer_bench

    optimizer_bench.run(as_json=as_json, device=device, preset=preset, rounds=rounds)


@app.command()
def train(
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Config of our trainer.")
    ] = None,
    model: Annotated[str, typer.Option(help="Model preset.")] = "smollm2-360m",
    sequence: Annotated[int, typer.Option(help="Tokens per sequence.")] = 1024,
    microbatches: Annotated[int, typer.Option(help="Microbatches per update.")] = 4,
    rows: Annotated[int, typer.Option(help="Sequences per microbatch.")] = 32,
    device: Annotated[str, typer.Option(help="cuda or cpu.")] = "cuda",
    compiled: Annotated[bool, typer.Option("--compile/--no-compile", help="Compile our trainer.")] = True,
    steps: Annotated[int, typer.Option(help="Timed updates.")] = 10,
    warmup: Annotated[int, typer.Option(help="Updates before them.")] = 3,
    contenders: Annotated[
        str, typer.Option(help="Any of ours,ours_sync,hf_compiled,hf_eager.")
    ] = "ours,ours_sync,hf_compiled,hf_eager",
    timeout: Annotated[float, typer.Option(help="Seconds a contender may take.")] = 300.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON only.")] = False,
) -> None:
    """Tokens/s and MFU of the whole trainer on one device, with delay and without, beside transformers."""
    from slipstream.bench.train import Setting, run
    from slipstream.bench.train_report import print_table

    if device not in ("cuda", "cpu"):
        raise UserError(f"--device is cuda or cpu, not '{device}'.")
    setting = Setting(
        model, sequence, microbatches, rows, device, compiled, steps, warmup, tuple(overrides or ())
    )
    with Console(stderr=True, highlight=False).status("starting") as status:
        result = run(setting, [name for name in contenders.split(",") if name], timeout, status.update)
    print(json.dumps(result)) if as_json else print_table(Console(highlight=False), result)


def _counts(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise UserError(f"--microbatches is a list of numbers such as 2,4,8, not '{text}'.") from None
