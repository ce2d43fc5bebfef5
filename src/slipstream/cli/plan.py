"""`slipstream plan`: choose a layout for a model and a cluster."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from slipstream.cli.plan_model import find_model
from slipstream.errors import UserError
from slipstream.models.sizes import ModelConfig
from slipstream.optimizers import default_correction
from slipstream.plan.devices import GIB, Cluster, Device, device_called, find_device
from slipstream.plan.explain import parse_count
from slipstream.plan.layout import Job, ModelSettings, Plan, why_not
from slipstream.plan.memory import BF16, FP32, NARROW, Precision
from slipstream.plan.penalty import load_penalties
from slipstream.plan.planner import check
from slipstream.plan.planner import plan as search
from slipstream.plan.profile import Measured, Profile
from slipstream.plan.show import show
from slipstream.plan.written import to_json, to_toml


def plan(
    model: Annotated[
        str,
        typer.Option(
            help="A preset, a Hugging Face folder or config.json, or the .toml of a run (its model)."
        ),
    ] = "moe-10b",
    devices: Annotated[int, typer.Option(help="How many devices.")] = 64,
    device: Annotated[
        str | None,
        typer.Option(
            help="A device preset, or a .toml file with its figures. Default: h100, or what a profile is of."
        ),
    ] = None,
    batch_tokens: Annotated[str, typer.Option(help="Tokens per update, for example 4M.")] = "4M",
    sequence: Annotated[int, typer.Option(help="Tokens per sequence.")] = 4096,
    optimizer: Annotated[str, typer.Option(help="Decides state, update time and token penalty.")] = "muon",
    correction: Annotated[
        str | None,
        typer.Option(
            help="none, error_feedback, error_feedback+sync_start, error_feedback+fine_start. "
            "Default: what train takes."
        ),
    ] = None,
    tokens: Annotated[
        str | None, typer.Option(help="Training budget. Default: 20 per active parameter.")
    ] = None,
    schedule: Annotated[str | None, typer.Option(help="Only this schedule.")] = None,
    stages: Annotated[int | None, typer.Option(help="Only this many stages.")] = None,
    microbatches: Annotated[int | None, typer.Option(help="Only this many microbatches.")] = None,
    microbatch_size: Annotated[
        int | None, typer.Option(help="Sequences per microbatch, over all data ranks.")
    ] = None,
    memory: Annotated[float | None, typer.Option(help="GiB per device, instead of the preset's.")] = None,
    efficiency: Annotated[float | None, typer.Option(help="Share of peak that is reached, 0 to 1.")] = None,
    per_node: Annotated[int | None, typer.Option(help="Devices per node.")] = None,
    latency: Annotated[float | None, typer.Option(help="Microseconds between nodes.")] = None,
    bandwidth: Annotated[float | None, typer.Option(help="GB/s per device between nodes.")] = None,
    jitter: Annotated[float, typer.Option(help="Relative standard deviation of every duration.")] = 0.0,
    float32: Annotated[bool, typer.Option(help="Banks and activations in fp32.")] = False,
    narrow: Annotated[bool, typer.Option(help="Sums of gradients and Muon's momentum in bf16.")] = False,
    penalty: Annotated[Path | None, typer.Option(help="Your own token penalty table (JSON).")] = None,
    profile: Annotated[bool, typer.Option(help="Time this machine's device and link first.")] = False,
    profile_file: Annotated[
        Path | None, typer.Option(help="Where --profile writes; without --profile: use it.")
    ] = None,
    top: Annotated[int, typer.Option(help="Rows of the table.")] = 12,
    toml: Annotated[
        Path | None, typer.Option(help="Also write the TOML of the best layout that runs.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON only.")] = False,
) -> None:
    """Rank layouts by predicted time to loss and say whether asynchrony pays."""
    _check_ranges(
        {"--sequence": sequence, "--top": top, "--stages": stages, "--microbatches": microbatches,
         "--microbatch-size": microbatch_size},
        {"--jitter": jitter, "--latency": latency},
        {"--memory": memory, "--bandwidth": bandwidth},
    )  # fmt: skip
    config, settings = find_model(model)
    given: dict[str, Any] = {
        "memory_bytes": None if memory is None else memory * GIB,
        "efficiency": efficiency,
        "per_node": per_node,
        "inter_latency": None if latency is None else latency * 1e-6,
        "inter_bandwidth": None if bandwidth is None else bandwidth * 1e9,
    }
    given = {name: value for name, value in given.items() if value is not None}
    if profile and device is None:
        from slipstream.cli.profile import device_title

        base = device_called(device_title())
    else:
        base = find_device(device or "h100")
    chosen = replace(base, **given)
    job = Job(
        config=config,
        cluster=Cluster(chosen, devices, jitter),
        batch_tokens=parse_count(batch_tokens),
        sequence=sequence,
        optimizer=optimizer,
        correction=correction or default_correction(optimizer),
        precision=_precision(float32, narrow, optimizer, chosen),
        tokens=None if tokens is None else parse_count(tokens),
        schedule=schedule,
        stages=stages,
        microbatches=microbatches,
        microbatch_size=microbatch_size,
        penalties=load_penalties(penalty),
        model=settings or ModelSettings(),
    )
    if profile or profile_file is not None:
        if profile:  # measuring takes its time, so what no figure changes is refused before
            from slipstream.bench.checks import make_room

            check(job)
            make_room(toml)
        measured = _profile(config, sequence, optimizer, profile, profile_file)
        base = device_called(measured.device) if device is None else find_device(device)
        # A ping-pong on one machine cannot know the network, so what is given goes before it.
        chosen = replace(base, **(measured.device_changes() | given))
        precision = _precision(float32, narrow, optimizer, chosen)
        job = replace(
            job, cluster=Cluster(chosen, devices, jitter), precision=precision, timings=measured.timings
        )
    result = search(job)
    if toml is not None:
        text = next((found for one in result.layouts if (found := to_toml(result, one, model))), None)
        if text is None:
            raise UserError(_none_runs(result))
        try:
            toml.parent.mkdir(parents=True, exist_ok=True)
            toml.write_text(text, encoding="utf-8")
        except OSError as error:
            raise UserError(f"{toml} cannot be written: {error.strerror}.") from None
    if as_json:
        print(json.dumps(to_json(result, model), indent=2))
    else:
        show(result, Console(), model, top)


def _precision(float32: bool, narrow: bool, optimizer: str, device: Device) -> Precision:
    if not narrow:
        return FP32 if float32 or device.processor else BF16  # a run on processors is in float32
    if float32 or optimizer != "muon" or device.processor:
        given = ["--float32"] * float32 + [f"--optimizer {optimizer}"] * (optimizer != "muon")
        given += [f"--device {device.name}"] * device.processor
        raise UserError(
            f"--narrow is for Muon with banks in bf16, on GPUs. Drop it, or drop {' and '.join(given)}."
        )
    return NARROW


def _none_runs(plan: Plan) -> str:
    reasons = dict.fromkeys(why_not(plan.job, layout.shape) for layout in plan.layouts)
    return f"None of the ranked layouts is one that `slipstream train` runs: {'; '.join(reasons)}."


def _check_ranges(
    counts: dict[str, int | None], amounts: dict[str, float | None], sizes: dict[str, float | None]
) -> None:
    for name, value in counts.items():
        if value is not None and value < 1:
            raise UserError(f"{name} must be 1 or more, not {value}.")
    for name, amount in amounts.items():
        if amount is not None and not amount >= 0:  # nan neither
            raise UserError(f"{name} must be 0 or more, not {amount:g}.")
    for name, size in sizes.items():
        if size is not None and not size > 0:
            raise UserError(f"{name} must be above 0, not {size:g}.")


def _profile(config: ModelConfig, sequence: int, optimizer: str, measure: bool, path: Path | None) -> Profile:
    """Read a profile, or time this machine: one layer, the embedding, the head, and a link of two ranks."""
    if not measure:
        assert path is not None
        return Profile.read(path, Measured.of(config, sequence, optimizer))
    from slipstream.bench.checks import make_room
    from slipstream.cli.profile import measure_profile

    make_room(path)
    found = measure_profile(config, sequence, optimizer)
    if path is not None:
        found.write(path)
    return found
