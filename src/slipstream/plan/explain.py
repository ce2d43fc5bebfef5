"""A plan in words: why the best is best, what limits it, when asynchrony does not pay, how to run it.

Lost time of a layout, in seconds per update (they add up to the predicted time):

    ideal       all devices busy with forwards and backwards, perfectly balanced
    imbalance   the busiest rank's excess over the mean
    recompute   activation checkpointing
    update      the optimizer's step on the rank
    runtime     what driving the stages takes of a rank (only a profile knows it)
    waiting     fill and drain, links, reductions that could not be hidden
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from itertools import pairwise
from math import inf
from typing import Any

from slipstream.errors import UserError
from slipstream.formats import si
from slipstream.models.sizes import PRESETS, ModelConfig, active_parameters
from slipstream.plan.layout import RUNNABLE, Layout, Plan, describe, why_not
from slipstream.plan.penalty import Penalty, find_penalty, penalty_at
from slipstream.plan.start import FINE_PARTS, split
from slipstream.plan.throughput import rank_pairs, rank_sums, with_cutover

LEVEL = 0.002  # a net gain or loss below it is none
_LARGEST, _STEPS = 1e4, 400  # how many times as large a batch is looked at, and at how many places
_MANY = 1000  # times as many microbatches: more than any cutover


def losses(layout: Layout) -> dict[str, float]:
    """Where the seconds of an update go."""
    shape, times, m = layout.shape, layout.times, layout.shape.microbatches
    pairs = rank_pairs(times, shape)
    updates = rank_sums(times.update, shape)
    recompute = m * sum(times.forward) / shape.stages if shape.checkpointing else 0.0
    work, update = m * sum(pairs) / shape.stages, sum(updates) / shape.stages
    busiest = max(m * pair + own for pair, own in zip(pairs, updates, strict=True))
    rest = max(0.0, layout.speed.seconds - busiest)
    runtime = min(rest, 2 * shape.chunks * m * times.runtime.action)
    return {
        "ideal": work - recompute,
        "imbalance": max(0.0, busiest - work - update),
        "recompute": recompute,
        "update": update,
        "runtime": runtime,
        "waiting": rest - runtime,
    }


def explain(plan: Plan) -> list[str]:
    """Sentences, most important first."""
    best, synchronous, asynchronous = plan.best, plan.best_synchronous, plan.best_asynchronous
    lines = [_verdict(plan)]
    spent = losses(best)
    shares = {name: value / best.speed.seconds for name, value in spent.items() if name != "ideal"}
    worst = max(shares, key=shares.__getitem__)
    listed = ", ".join(f"{name} {share:.1%}" for name, share in shares.items() if share >= 0.0005)
    lines.append(
        f"Of each update of {best.speed.seconds:.3f} s the best layout loses: {listed or 'nothing'}."
    )
    lines.append(f"What limits it: {LIMITS[worst]}")
    if asynchronous and split(plan.job.correction)[1]:
        lines.append(_start_sentence(asynchronous))
    lines.append(_memory_sentence(plan))
    if asynchronous and synchronous:
        lines.append(_break_even(plan, asynchronous, synchronous))
    if plan.penalty is not None:
        lines += _penalty_sentences(plan, plan.penalty)
    return lines


def _penalty_sentences(plan: Plan, used: Penalty) -> list[str]:
    """What was used and where it comes from; marked where it is from another size, with our own figure beside it."""
    job, size = plan.job, active_parameters(plan.job.config)
    lines = [
        f"Token penalty used: {used.penalty:g} where all of a group is old, less where a part is "
        f"({used.optimizer}, {used.correction}; {used.source})."
    ]
    far = [
        f"{si(theirs)} {what} instead of {si(ours)}"
        for what, theirs, ours in (
            ("active parameters", used.parameters, size),
            ("tokens a batch", used.batch_tokens, job.batch_tokens),
        )
        if not 1 / NEAR < theirs / ours < NEAR
    ]
    if far:
        lines.append(
            f"That penalty was not measured at this size: {', '.join(far)}. Treat the net gain as a guess."
        )
    own = [entry for entry in job.penalties if entry.source.startswith("study ")]
    if own and not used.source.startswith("study "):
        try:
            ours = find_penalty(own, job.optimizer, job.correction, job.batch_tokens, size)
        except UserError:  # never measured here
            return lines
        lines.append(f"Our own nearest figure is {ours.penalty:g} ({ours.source.split('; runs ')[0]}).")
    return lines


NEAR = 3.0  # beyond this factor in size a penalty is another experiment's
LIMITS = {
    "imbalance": "layers do not divide evenly over the ranks; another P, or thinner layers, would.",
    "recompute": "memory: without checkpointing it does not fit, or only in smaller microbatches.",
    "update": "the optimizer's step; shard it over data ranks, or use a larger batch.",
    "runtime": "the time it takes to drive a stage; larger microbatches help.",
    "waiting": "filling, draining, links and reductions that nothing hides; more microbatches help.",
}


def _verdict(plan: Plan) -> str:
    best, synchronous, asynchronous = plan.best, plan.best_synchronous, plan.best_asynchronous
    if synchronous is None:
        return f"Only asynchronous layouts were asked for: {describe(best.shape)}."
    if plan.penalty is None:
        return f"Only synchronous layouts were asked for: {describe(best.shape)}."
    if asynchronous is None:
        return f"No asynchronous layout fits or applies; the best is synchronous: {describe(best.shape)}."
    faster = asynchronous.tokens_per_second / synchronous.tokens_per_second
    net = asynchronous.score / synchronous.score
    compared = (
        f"2BW runs {faster:.3f}x the tokens/s of the fastest synchronous layout "
        f"({synchronous.shape.schedule}), net {net:.3f}x after the token penalty of {asynchronous.penalty:.4g}"
        f"{_old_part(asynchronous)}"
    )
    if abs(net - 1.0) < LEVEL:
        return f"Asynchrony makes no difference here: {compared}."
    return f"Asynchrony {'pays' if net > 1.0 else 'does not pay here'}: {compared}."


def _start_sentence(layout: Layout) -> str:
    """What the start of the best 2BW layout takes; counted in its tokens/s, as its penalty is."""
    start = layout.start
    if start is None:
        return (
            f"No fine start: microbatches of {layout.shape.microbatch_size} sequences on a device cannot be cut into "
            f"{FINE_PARTS}, so 2BW is ranked without one."
        )
    how = "flushed" if start.key == "optim.sync_start" else f"in microbatches of 1/{FINE_PARTS}"
    return (
        f"The first {start.share:.0%} of 2BW's updates, {how}, take {start.seconds:.3f} s each instead of "
        f"{layout.speed.seconds:.3f}; its tokens/s are those of the whole run."
    )


def _old_part(layout: Layout) -> str:
    """How much of each update is late, which is what the penalty is for."""
    shape = layout.shape
    if shape.cutover is None or shape.cutover == shape.microbatches:
        return " of gradients that are all one update old"
    return f" ({shape.cutover} of {shape.microbatches} microbatches are one update old)"


def _memory_sentence(plan: Plan) -> str:
    best = plan.best
    rank, memory = max(enumerate(best.memory), key=lambda entry: entry[1].total)
    room = plan.job.cluster.device.room_bytes
    parts = sorted(asdict(memory).items(), key=lambda entry: -entry[1])
    listed = ", ".join(f"{name} {gib(value)}" for name, value in parts if value > 0.005 * memory.total)
    return f"Memory: rank {rank} is the fullest with {gib(memory.total)} of {gib(room)} usable ({listed})."


def _break_even(plan: Plan, asynchronous: Layout, synchronous: Layout) -> str:
    """The penalty, and the batch, at which both halves of the trade cancel."""
    speed_up = asynchronous.tokens_per_second / synchronous.tokens_per_second
    if speed_up <= 1.0:
        return (
            "When it would pay: 2BW is not even faster here. Its second bank and its waiting gradients cost "
            "memory, and the synchronous bubble is already small. A smaller batch, more devices at this "
            "batch, or a model that needs many stages would change that."
        )
    text = f"Break-even: asynchrony pays as long as delay costs less than {speed_up - 1:.1%} more tokens."
    pays = paying_batches(asynchronous, synchronous, plan.job.batch_tokens, _penalty_by_old_part(plan))
    return f"{text} With these layouts, and less of each batch old the larger it is, it {_where(pays)}."


def _where(pays: Sequence[tuple[float, float]]) -> str:
    if not pays or pays == [(0.0, inf)]:
        return f"pays at {'every' if pays else 'no'} batch size"
    if len(pays) == 1 and pays[0][0] == 0:
        return f"stops paying at about {si(pays[0][1])} tokens a batch"
    return f"pays only {' and '.join(_stretch(*ends) for ends in pays)} tokens a batch"


def _stretch(low: float, high: float) -> str:
    if high == inf:
        return f"above about {si(low)}"
    return f"from about {si(low)} to about {si(high)}" if low else f"up to about {si(high)}"


def _penalty_by_old_part(plan: Plan) -> Callable[[float], float]:
    entry = plan.penalty
    assert entry is not None, "an asynchronous layout has one"
    return lambda old: penalty_at(plan.job.penalties, entry, old)


def paying_batches(
    asynchronous: Layout, synchronous: Layout, batch_tokens: float, penalty: Callable[[float], float]
) -> list[tuple[float, float]]:
    """Where penalty * (async) < sync: from which batch to which, 0 and infinity where no end of that was found.

    Seconds per update are a * batch + c (c: update and waiting). A larger batch has more microbatches of the same size,
    and as many of them old; `penalty` is that of an old share. No batch has fewer microbatches than stages.
    """

    def line(layout: Layout) -> tuple[float, float]:
        spent = losses(layout)
        constant = spent["update"] + spent["waiting"]
        longer = layout.mean_seconds / layout.speed.seconds  # by its start
        return longer * (sum(spent.values()) - constant), longer * constant

    (slope_a, constant_a), (slope_s, constant_s) = line(asynchronous), line(synchronous)
    shape = asynchronous.shape
    old = shape.old  # of a group that has any number of microbatches: as many as never wait
    if shape.cutover is not None:
        many = replace(shape, microbatches=_MANY * shape.microbatches)
        old = _MANY * with_cutover(asynchronous.times, many).old

    def lead(factor: float) -> float:
        """How much longer synchronous training takes where the batch is so many times as large."""
        share = min(1.0, old / factor) if shape.cutover is not None else old
        return slope_s * factor + constant_s - penalty(share) * (slope_a * factor + constant_a)

    least = min(1.0, shape.stages / shape.microbatches)
    steps = [least * (_LARGEST / least) ** (step / _STEPS) for step in range(_STEPS + 1)]
    steps = sorted({*steps, 1.0})  # 1: there the sentence must say what the verdict does
    edges = [0.0] if lead(least) > 0 else []
    for low, high in pairwise(steps):
        if (pays := lead(low) > 0) != (lead(high) > 0):
            for _ in range(60):
                middle = (low + high) / 2
                low, high = (middle, high) if (lead(middle) > 0) == pays else (low, middle)
            edges.append(low * batch_tokens)
    edges += [inf] if len(edges) % 2 else []
    return list(zip(edges[::2], edges[1::2], strict=True))


def to_toml(plan: Plan, layout: Layout, model_name: str) -> str | None:
    """The settings that run `layout`; None where `slipstream train` cannot."""
    shape, job = layout.shape, plan.job
    if why_not(job, shape):
        return None
    half = "bfloat16" if shape.asynchronous else "bfloat16_autocast"  # without banks weights stay in float32
    start = {layout.start.key: layout.start.share} if layout.start else {}
    chosen: dict[str, dict[str, Any]] = {
        "model": {"preset": model_name} if model_name in PRESETS else _shape(job.config),
        "data": {"sequence": job.sequence},
        "pipeline": {
            "schedule": RUNNABLE[shape.schedule],
            "stages": shape.stages,
            "data_ranks": shape.data_ranks,
            "microbatches": shape.microbatches,
            "microbatch_size": shape.microbatch_size * shape.data_ranks,
            "cutover": shape.cutover,
            "fine_start": start.get("pipeline.fine_start"),
            "boundaries": [layers.start for layers in layout.cut[1:]] or None,
            "in_flight": shape.in_flight,
            "shard_optimizer": shape.shard_optimizer or None,
        },
        "optim": {
            "name": job.optimizer,
            "correction": split(job.correction)[0] if shape.asynchronous else None,
            "sync_start": start.get("optim.sync_start"),
            "options.state_dtype": "bfloat16" if job.precision.momentum == 2 else None,
        },
        "train": {
            "dtype": half if job.precision.bank == 2 else "float32",
            "gradient_dtype": "bfloat16" if job.precision.gradient == 2 else None,
            "activation_checkpointing": shape.checkpointing or None,
        },
    }
    sections = []
    for section, values in chosen.items():
        lines = [f"{key} = {json.dumps(value)}" for key, value in values.items() if value is not None]
        sections.append("\n".join([f"[{section}]", *lines]))
    return "\n\n".join(sections) + "\n"


def _shape(config: ModelConfig) -> dict[str, Any]:
    """A model without a preset, key by key."""
    left_out = ("init_std", "document_mask", "end_of_document")
    return {key: value for key, value in asdict(config).items() if key not in left_out}


def to_json(plan: Plan, model_name: str) -> dict[str, Any]:
    """Everything, for programs."""
    job = plan.job
    return {
        "model": model_name,
        "devices": job.cluster.devices,
        "device": job.cluster.device.name,
        "batch_tokens": job.batch_tokens,
        "sequence": job.sequence,
        "optimizer": job.optimizer,
        "correction": job.correction,
        "considered": plan.considered,
        "fitting": plan.fitting,
        "penalty": asdict(plan.penalty) if plan.penalty else None,
        "explanation": explain(plan),
        "layouts": [_layout_json(plan, layout, model_name) for layout in plan.layouts],
    }


def _layout_json(plan: Plan, layout: Layout, model_name: str) -> dict[str, Any]:
    return {
        **asdict(layout.shape),
        "boundaries": [layers.start for layers in layout.cut[1:]],
        "delay": layout.delay,
        "net_gain": plan.net_gain(layout),
        "tokens_per_second": layout.tokens_per_second,
        "seconds_per_update": layout.speed.seconds,
        "start": _start_json(layout),
        "seconds_to_loss": plan.job.training_tokens / layout.score,
        "mfu": layout.mfu,
        "idle": layout.speed.idle,
        "losses": losses(layout),
        "memory_bytes": layout.memory_bytes,
        "memory": [{**asdict(rank), "total": rank.total} for rank in layout.memory],
        "toml": to_toml(plan, layout, model_name),
    }


def _start_json(layout: Layout) -> dict[str, Any] | None:
    start = layout.start
    if start is None:
        return None
    return {
        "key": start.key,
        "share": start.share,
        "microbatches": start.shape.microbatches,
        "seconds_per_update": start.seconds,
    }


def gib(value: float) -> str:
    return f"{value / 2**30:.1f} GiB"


def parse_count(text: str) -> int:
    """'4M' (of tokens: powers of two, 4 * 2**20), '200B' (decimal) or a plain number."""
    units = {"k": 2**10, "m": 2**20, "b": 10**9, "t": 10**12}
    body, unit = (text[:-1], units[text[-1].lower()]) if text and text[-1].lower() in units else (text, 1)
    try:
        value = float(body.replace("_", "").replace(",", "")) * unit
    except ValueError:
        value = -1.0
    if not 1 <= value < 1e18 or value != int(value):
        raise UserError(f"'{text}' is not a number of tokens. Write for example 4194304, 4M or 512k.")
    return int(value)
