"""`slipstream bench`: the engine against torch's schedules and the bound; `bench optim`: the optimizers;
`bench train`: the whole trainer on one device against transformers; `bench race`: time to loss."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from slipstream.errors import UserError

app = typer.Typer(add_completion=False)


@app.callback(invoke_without_command=True)
def pipeline(
    context: typer.Context,
    stages: Annotated[
        int | None, typer.Option(help="Pipeline stages P, one process each; default: 2.")
    ] = None,
    microbatches: Annotated[
        str | None, typer.Option(help="Microbatches per update, one run for each; default: P, 2P, 4P.")
    ] = None,
    work: Annotated[
        str | None,
        typer.Option(
            help="compute: blocks. sleep: timed waits, any P. empty: the runtime. language: a real model."
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, or cuda: all stages on one GPU.")] = "cpu",
    partitions: Annotated[
        int | None, typer.Option(help="Cut the GPU into so many parts, a stage on each (CUDA MPS).")
    ] = None,
    probe: Annotated[
        bool, typer.Option("--probe", help="Only measure what the partitions get, alone and together.")
    ] = False,
    model: Annotated[
        str | None, typer.Option(help="Preset of the language work; default: smollm2-135m.")
    ] = None,
    rows: Annotated[
        int | None, typer.Option(help="Sequences per microbatch; default: 2, of the language work 8.")
    ] = None,
    sequence: Annotated[
        int | None, typer.Option(help="Tokens per sequence; default: 64, of the language work 1024.")
    ] = None,
    compiled: Annotated[bool, typer.Option("--compile", help="Compile each layer of the model.")] = False,
    clip: Annotated[bool, typer.Option("--clip", help="Clip the global gradient norm.")] = False,
    correction: Annotated[str, typer.Option(help="Delay correction of our schedule.")] = "none",
    in_flight: Annotated[int | None, typer.Option(help="Microbatches in flight; default: chosen.")] = None,
    cutover: Annotated[
        int | None, typer.Option(help="Microbatches of an update that are old; default: as in a run.")
    ] = None,
    link_latency_ms: Annotated[float, typer.Option(help="Delay every message of ours by this.")] = 0.0,
    rivals: Annotated[str, typer.Option(help="all, none, or a list: 1f1b,gpipe,...")] = "all",
    rounds: Annotated[
        int | None, typer.Option(help="Samples of each contender, the median counts; default: 15, a GPU 5.")
    ] = None,
    updates: Annotated[
        int | None,
        typer.Option(
            help="Updates a sample; the first and the last do not count. Default: 64 microbatches, 8 updates or more."
        ),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw measured over predicted timeline: .html, .svg, .json.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write the JSON here, after each run.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON only.")] = False,
) -> None:
    """Time per update of torch's synchronous schedules, of ours, and of the bubble-free bound."""
    if context.invoked_subcommand is not None:
        return
    from slipstream.bench import command
    from slipstream.bench import probe as probing
    from slipstream.bench.work import Work

    if device not in ("cpu", "cuda"):
        raise UserError(f"--device {device}: choose cpu or cuda.")
    if device == "cpu" and (partitions is not None or probe):
        raise UserError("--partitions and --probe cut a GPU. Add --device cuda.")
    if partitions is not None and stages not in (None, partitions):
        raise UserError(f"--stages {stages} on --partitions {partitions}: a stage has a partition. Drop one.")
    if probe:
        probing.run(4 if partitions is None else partitions, as_json, out)
        return
    count = (partitions or 2) if stages is None else stages
    counts = [count, 2 * count, 4 * count]
    if microbatches is not None:
        counts = _numbers("--microbatches", microbatches, "2,4,8")
    kind = work or ("language" if device == "cuda" else "compute")
    if model is not None and kind != "language":
        raise UserError(
            f"--model {model} is read by the language work only. Add --work language, or drop it."
        )
    shape: dict[str, Any] = {"batch": 8, "tokens": 1024} if kind == "language" else {}
    shape |= {} if model is None else {"preset": model}
    if kind == "sleep" and (rows is not None or sequence is not None):
        raise UserError(
            "--rows and --sequence change nothing where stages sleep. Drop them, or --work sleep."
        )
    shape |= {name: value for name, value in (("batch", rows), ("tokens", sequence)) if value is not None}
    setting = Work(
        kind=kind,
        stages=count,
        microbatches=max(count, *counts),
        max_grad_norm=1.0 if clip else None,
        correction=correction,
        in_flight=in_flight,
        cutover=cutover,
        link_latency_seconds=link_latency_ms / 1e3,
        device=device,
        compile=compiled,
        **shape,
    )
    command.run(
        setting,
        counts,
        partitions=partitions,
        rivals=rivals,
        rounds=rounds,
        updates=updates,
        plot=plot,
        out=out,
        as_json=as_json,
    )


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
        str,
        typer.Option(
            help="Some of ours, ours_sync, hf_compiled, hf_eager, hf_bf16, titan_compiled; by commas.",
            show_default="all but the last two",
        ),
    ] = "ours,ours_sync,hf_compiled,hf_eager",
    rival_rows: Annotated[
        int | None, typer.Option(help="Sequences in a microbatch of a rival; default: --rows.")
    ] = None,
    profile: Annotated[
        int, typer.Option(help="Updates to record after the timed ones: shows where the time goes.")
    ] = 0,
    timeout: Annotated[float, typer.Option(help="Seconds a contender may take.")] = 300.0,
    out: Annotated[Path | None, typer.Option(help="Write the JSON here, after each contender.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON only.")] = False,
) -> None:
    """Tokens/s and MFU of the whole trainer on one device, with delay and without, beside other libraries."""
    from slipstream.bench.train import print_table, run
    from slipstream.bench.train_contenders import Setting

    if device not in ("cuda", "cpu"):
        raise UserError(f"--device is cuda or cpu, not '{device}'.")
    setting = Setting(
        model,
        sequence,
        microbatches,
        rows,
        device,
        compiled,
        steps,
        warmup,
        rival_rows,
        tuple(overrides or ()),
        profile,
    )
    console = Console(stderr=True, highlight=False)
    with console.status("starting") as status:
        say = status.update if console.is_terminal else lambda text: console.print(text, markup=False)
        names = [name.strip() for name in contenders.split(",") if name.strip()]
        result = run(setting, names, timeout, say, out)
    print(json.dumps(result)) if as_json else print_table(Console(highlight=False), result)
    if all("error" in row for row in result["contenders"].values()):
        raise typer.Exit(1)


@app.command()
def race(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[RUN.TOML] [KEY=VALUE]...", help="A run, as for `slipstream train`."),
    ] = None,
    schedules: Annotated[
        str, typer.Option(help="Schedules to train with, one after the other.")
    ] = "2bw,1f1b",
    target: Annotated[float | None, typer.Option(help="Loss to reach; default: what all reached.")] = None,
    longer: Annotated[
        float, typer.Option(help="2bw trains this many times the updates, to end at the loss of the others.")
    ] = 1.0,
    seeds: Annotated[
        str | None, typer.Option(help="Race once with each, such as 0,1,2; default: the run's own seed.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder of the runs, race.json and race.html.")] = Path(
        "runs/race"
    ),
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON only.")] = False,
) -> None:
    """Train the same run under several schedules: wall clock and tokens until one validation loss."""
    from slipstream.bench import race as racing
    from slipstream.bench.race_seeds import print_seeds, race_seeds
    from slipstream.cli.train import parse
    from slipstream.config import resolve

    names = list(dict.fromkeys(name.strip() for name in schedules.split(",") if name.strip()))
    if not 1.0 <= longer <= 100.0:
        raise UserError(f"--longer {longer:g}: 2bw trains at least as long as the others. Set 1.05, say.")
    updates = None if longer == 1.0 else math.ceil(longer * parse(arguments or []).train.steps)
    chosen = None if seeds is None else _numbers("--seeds", seeds, "0,1,2")
    for seed in [None] if chosen is None else chosen:
        given = [*(arguments or []), *([] if seed is None else [f"train.seed={seed}"])]
        for name in names:  # a mistake of the last contender is said before the first one trains
            resolve(parse(racing.arguments_of(given, name, out, updates)))
    show = racing.print_race if chosen is None else print_seeds
    if chosen is None:
        result = racing.race(arguments or [], names, out, target, updates)
    else:
        result = race_seeds(arguments or [], names, out, chosen, target, updates)
    print(json.dumps(result)) if as_json else show(Console(highlight=False), result)


def _numbers(option: str, text: str, such_as: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise UserError(f"{option} is a list of numbers such as {such_as}, not '{text}'.") from None
