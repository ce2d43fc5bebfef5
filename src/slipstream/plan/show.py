"""A plan in the terminal: the ranked table, the reasons, the winning schedule's picture, the TOML."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from slipstream.formats import si
from slipstream.models.sizes import active_parameters, parameters
from slipstream.plan.explain import explain, gib
from slipstream.plan.layout import Layout, Plan, why_not
from slipstream.plan.start import FINE_PARTS, FINE_START
from slipstream.plan.throughput import costs, schedule_of
from slipstream.plan.written import to_toml
from slipstream.schedule.plot.terminal import terminal
from slipstream.schedule.simulate import simulate

MOST_DRAWN_STAGES = 16
NAMES = {"pipedream_2bw": "2bw", "interleaved_1f1b": "interleaved"}  # short forms that `--schedule` takes too
LEGEND = (
    "net: time to loss of the best synchronous layout over this one's. size: sequences per microbatch and "
    "device (pipeline.microbatch_size is D times that). ckpt: activation checkpointing. shard: optimizer "
    "sharded over data ranks. spread: nodes hold data "
    "ranks of one stage, not stages of one pipeline. K: microbatches in flight. c: microbatches of an update that "
    "2bw has one update old, all where no c stands. {fine}idle: device time without "
    "computation. time: to train on {tokens} tokens' worth of loss."
)


def show(plan: Plan, console: Console, model_name: str, top: int) -> None:
    """Print everything."""
    job = plan.job
    size, active = parameters(job.config), active_parameters(job.config)
    device = job.cluster.device
    console.print(
        f"[bold]{escape(model_name)}[/]: {si(size)} parameters, {si(active)} active, on {job.cluster.devices} "
        f"x {escape(device.name)} ({gib(device.room_bytes)} usable each); batch {si(job.batch_tokens)} tokens, "
        f"sequence {job.sequence}. {plan.fitting} of {plan.considered} layouts fit.\n",
        highlight=False,
    )
    console.print(ranking(plan, top), crop=False)  # in a narrow terminal a row wraps; no figure is cut off
    fine = f"fine: the first {FINE_START:.0%} of the updates in {FINE_PARTS} times as many microbatches. "
    starts = any(layout.start and layout.start.key == "pipeline.fine_start" for layout in plan.layouts)
    legend = LEGEND.format(tokens=si(job.training_tokens), fine=fine if starts else "")
    console.print(Text(legend, "dim"))
    console.print()
    for line in explain(plan):
        console.print(Text(f"• {line}"))
    console.print()
    draw(plan.best, console)
    best_runnable = next((one for one in plan.layouts if to_toml(plan, one, model_name)), None)
    if best_runnable is not None:
        place = rank(plan, best_runnable)
        note = "" if place == 1 else f" (the best that `slipstream train` runs: #{place})"
        if place > 1:
            console.print(Text(f"• {unrunnable(plan, place)}"))
            console.print()
        console.print(
            f"[bold]To run it[/]{note}: slipstream train FILE data.path=FOLDER train.steps=N, with this in FILE "
            "(--toml FILE writes it):",
            highlight=False,
        )
        console.print(Text(to_toml(plan, best_runnable, model_name) or ""), soft_wrap=True)  # to be copied


def unrunnable(plan: Plan, place: int) -> str:
    """Why the layouts above the best that runs are only ranked."""
    reasons: dict[str, list[str]] = {}
    for number, layout in enumerate(plan.layouts[: place - 1], start=1):
        reasons.setdefault(why_not(plan.job, layout.shape), []).append(f"#{number}")
    told = "; ".join(f"{', '.join(numbers)}: {reason}" for reason, numbers in reasons.items())
    return f"Not run by `slipstream train` yet, and ranked for comparison: {told}."


def rank(plan: Plan, layout: Layout) -> int:
    return plan.layouts.index(layout) + 1


def ranking(plan: Plan, top: int) -> Table:
    """The best layouts, and always the best of each kind so that both stand side by side."""
    table = Table(box=None, header_style="dim", padding=(0, 1, 0, 0), pad_edge=False)
    shown = list(plan.layouts[:top])
    for kind in (plan.best_synchronous, plan.best_asynchronous):
        if kind is not None and kind not in shown:
            shown.append(kind)
    rows = [_row(plan, layout) for layout in shown]
    for name in rows[0]:
        justify = "left" if name in ("schedule", "options") else "right"
        widest = max(len(cell) for cell in (name, *(row[name] for row in rows)))
        table.add_column(name, justify=justify, no_wrap=True, min_width=widest)
    for layout, row in zip(shown, rows, strict=True):
        style = "bold green" if layout is plan.best else "cyan" if layout.shape.asynchronous else ""
        table.add_row(*row.values(), style=style)
    return table


def _row(plan: Plan, layout: Layout) -> dict[str, str]:
    """Cells by the heading of their column."""
    shape, gain = layout.shape, plan.net_gain(layout)
    options = [
        word
        for word, on in (
            ("ckpt", shape.checkpointing),
            ("shard", shape.shard_optimizer),
            ("spread", not shape.pipeline_inside),
            (f"K{shape.in_flight}", shape.in_flight),
            (f"c{shape.cutover}", shape.asynchronous and shape.old < 1),
            ("fine", layout.start and layout.start.key == "pipeline.fine_start"),
        )
        if on
    ]
    return {
        "#": str(rank(plan, layout)),
        "schedule": NAMES.get(shape.schedule, shape.schedule),
        "PxD": f"{shape.stages}x{shape.data_ranks}",
        "mxsize": f"{shape.microbatches}x{shape.microbatch_size}",
        "options": " ".join(options),
        "net": "–" if gain is None else f"{gain:.3f}",
        "tok/s": si(layout.tokens_per_second),
        "MFU%": f"{100 * layout.mfu:.1f}",
        "GiB": f"{layout.memory_bytes / 2**30:.1f}",
        "idle%": f"{100 * layout.speed.idle:.1f}",
        "delay": str(layout.delay),
        "time": days(plan.job.training_tokens / layout.score),
    }


def days(seconds: float) -> str:
    """Days, hours, minutes or seconds; years past counting in powers of ten."""
    value, unit = next(
        (
            (seconds / size, unit)
            for size, unit in ((86400, "d"), (3600, "h"), (60, "min"))
            if seconds >= 2 * size
        ),
        (seconds, "s"),
    )
    return f"{value:.1f} {unit}" if value < 1e6 else f"{value:.1e} {unit}"


def draw(layout: Layout, console: Console) -> None:
    """The winner's first groups, in the terminal."""
    shape = layout.shape
    if shape.stages == 1:  # nothing waits for anything
        return
    if shape.stages > MOST_DRAWN_STAGES:
        console.print(f"[dim]A picture of {shape.stages} stages is left out.[/]\n")
        return
    microbatches = min(shape.microbatches, max(2 * shape.stages, 8))
    if shape.schedule == "interleaved_1f1b":
        microbatches -= microbatches % shape.stages
    schedule = schedule_of(shape, microbatches, groups=2)
    title = f"{shape.schedule}, P={shape.stages}"
    if microbatches < shape.microbatches:
        title += f", drawn with {microbatches} of {shape.microbatches} microbatches"
    picture = {title: simulate(schedule, costs(layout.times, shape))}
    console.print(terminal(picture, console.width, console.color_system is not None, unit="s"))
    console.print()
