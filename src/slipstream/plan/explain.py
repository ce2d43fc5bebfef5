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

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from itertools import pairwise
from math import inf

from slipstream.errors import UserError
from slipstream.formats import si
from slipstream.models.sizes import active_parameters
from slipstream.plan.layout import Layout, Plan, describe
from slipstream.plan.penalty import Penalty, find_penalty
from slipstream.plan.price import Price
from slipstream.plan.start import FINE_PARTS, mean_of, split
from slipstream.plan.throughput import Shape, StageTimes, rank_pairs, rank_sums, with_cutover

LEVEL = 0.002  # a net gain or loss below it is none
_LARGEST, _STEPS = 1e4, 400  # how many times as large a batch is looked at, and at how many places
_MANY = 1000  # times as many microbatches: more than any cutover


def losses(layout: Layout) -> dict[str, float]:
    """Where the seconds of an update go, after the start."""
    return _spent(layout.shape, layout.times, layout.speed.seconds)


def _spent(shape: Shape, times: StageTimes, seconds: float) -> dict[str, float]:
    m = shape.microbatches
    pairs = rank_pairs(times, shape)
    updates = rank_sums(times.update, shape)
    recompute = m * sum(times.forward) / shape.stages if shape.checkpointing else 0.0
    work, update = m * sum(pairs) / shape.stages, sum(updates) / shape.stages
    busiest = max(m * pair + own for pair, own in zip(pairs, updates, strict=True))
    rest = max(0.0, seconds - busiest)
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
    if plan.price is not None:
        # Without a layout that is late, what one would be ranked with.
        start = bool(asynchronous.start if asynchronous else plan.price.started)
        lines += _penalty_sentences(plan, plan.price, start)
    return lines


def _penalty_sentences(plan: Plan, price: Price, start: bool) -> list[str]:
    """What was used and where it comes from; marked where it is from another size, with our own figure beside it."""
    job, size = plan.job, active_parameters(plan.job.config)
    used, *more = price.entries(start)
    name = job.correction if start else split(job.correction)[0]
    leaves = "".join(
        f"; of what it adds the start leaves {price.left():.2f}, by {_told(entry)}" for entry in more
    )
    lines = [
        f"Token penalty used: {price.at(1.0, start):.5g} where all of a group is old, less where a part is "
        f"({job.optimizer}, {name}; {used.source}{leaves})."
    ]
    for which, entry in zip(("That penalty", "What the start leaves"), (used, *more), strict=False):
        far = [
            f"{si(theirs)} {what} instead of {si(ours)}"
            for what, theirs, ours in (
                ("active parameters", entry.parameters, size),
                ("tokens a batch", entry.batch_tokens, job.batch_tokens),
            )
            if not 1 / NEAR < theirs / ours < NEAR
        ]
        if far:
            lines.append(
                f"{which} was not measured at this size: {', '.join(far)}. Treat the net gain as a guess."
            )
    own = [entry for entry in job.penalties if entry.source.startswith("study ")]
    if own and not used.source.startswith("study "):
        try:
            ours = find_penalty(own, job.optimizer, name, job.batch_tokens, size)
        except UserError:  # never measured here
            return lines
        lines.append(f"Our own nearest figure is {ours.penalty:g} ({_told(ours)}).")
    return lines


def _told(entry: Penalty) -> str:
    """Where it comes from, without the names of its runs."""
    return entry.source.split("; runs ")[0]


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
    if plan.price is None:
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
    start, size = layout.start, layout.shape.microbatch_size
    if start is None:
        return (
            f"Best without a fine start: what one is worth was measured for quarters of microbatches, and {size} "
            f"sequence{'s' if size > 1 else ''} on a device cannot be cut so."
        )
    how = "flushed" if start.key == "optim.sync_start" else f"in microbatches of 1/{FINE_PARTS}"
    return (
        f"The first {start.share:.0%} of 2BW's updates, {how}, take {start.seconds:.3f} s each instead of "
        f"{layout.speed.seconds:.3f}. Its tokens/s above are the mean of the whole run, what is idle or lost is after "
        "the start."
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
    pays = paying_batches(
        asynchronous, synchronous, plan.job.batch_tokens, _penalty_by_old_part(plan, asynchronous)
    )
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


def _penalty_by_old_part(plan: Plan, layout: Layout) -> Callable[[float], float]:
    def penalty(old: float) -> float:
        found = plan.price.at(old, layout.start is not None) if plan.price else None
        assert found is not None, "a layout that is late was ranked by it"
        return found

    return penalty


def paying_batches(
    asynchronous: Layout, synchronous: Layout, batch_tokens: float, penalty: Callable[[float], float]
) -> list[tuple[float, float]]:
    """Where penalty * (async) < sync: from which batch to which, 0 and infinity where no end of that was found.

    Seconds per update are a * batch + c (c: update and waiting). A larger batch has more microbatches of the same size,
    and as many of them old; `penalty` is that of an old share. No batch has fewer microbatches than stages.
    """

    def line(spent: dict[str, float]) -> tuple[float, float]:
        constant = spent["update"] + spent["waiting"]
        return sum(spent.values()) - constant, constant

    (slope_a, constant_a), (slope_s, constant_s) = line(losses(asynchronous)), line(losses(synchronous))
    if start := asynchronous.start:
        slope, constant = line(_spent(start.shape, start.times, start.seconds))
        slope_a, constant_a = mean_of(start, slope, slope_a), mean_of(start, constant, constant_a)
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
