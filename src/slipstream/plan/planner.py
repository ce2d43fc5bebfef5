"""The search: every layout that fits, ranked by predicted time to loss.

    score = tokens per second / token penalty        (penalty 1 for every synchronous schedule, and for 2BW that of
                                                      the share of microbatches its layout cannot but have old;
                                                      a start of another kind is part of both)

Closed forms rank all shapes; the best few of every schedule are then simulated, so that the figures shown
are the simulator's. Invariant: a layout in a plan fits in memory on every rank, cuts the layers without rest
and keeps the batch exactly.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import chain, combinations
from math import log
from typing import Any, NamedTuple

from slipstream.errors import UserError
from slipstream.models.sizes import active_parameters, flops_per_token, parameters
from slipstream.plan.candidates import MICROBATCH_SIZES, MOST_MICROBATCHES, Cut, Fitter, shapes
from slipstream.plan.layout import Job, Layout, Plan, describe, why_not
from slipstream.plan.memory import StageMemory, state_bytes
from slipstream.plan.price import Price, find_price
from slipstream.plan.start import Start, mean_seconds, split, start_shape
from slipstream.plan.throughput import Shape, StageTimes, estimate, simulated, with_cutover
from slipstream.schedule.generate import GENERATORS, canonical

SIMULATED_PER_SCHEDULE = 3


def plan(job: Job) -> Plan:
    """Search, rank, simulate. Raises `UserError` with the nearest layout that works when there is none."""
    price = _price_for(job)
    considered, fitting = _fits(job, price)
    if not fitting:
        raise UserError(nothing_works(job))
    layouts: list[Layout] = []
    for name in dict.fromkeys(entry.shape.schedule for entry in fitting):
        layouts += _simulated(job, [entry for entry in fitting if entry.shape.schedule == name])
    layouts.sort(key=lambda layout: -layout.score)
    return Plan(job, tuple(layouts), price, considered, len(fitting))


def check(job: Job) -> None:
    """Refuse what no device's figures could make a plan of."""
    _price_for(job)
    if next(shapes(job), None) is None:
        raise UserError(nothing_works(job))


def _price_for(job: Job) -> Price | None:
    state_bytes(job.optimizer)  # a name that nobody knows is no matter of penalties
    if job.schedule is not None and GENERATORS[canonical(job.schedule)].synchronous:  # nothing is delayed
        return None
    size = active_parameters(job.config)
    return find_price(job.penalties, job.optimizer, job.correction, job.batch_tokens, size)


def _fits(job: Job, price: Price | None) -> tuple[int, list[_Fitting]]:
    """How many shapes there are, and those that fit, the best by closed form first."""
    room = job.cluster.device.room_bytes
    fitter = Fitter(job)
    considered, fitting, unpriced = 0, [], False
    for shape in shapes(job):
        considered += 1
        found = _fit(job, fitter, shape, room)
        if found is not None:
            shape, cut, memory, times = found
            start = _start(job, fitter, shape, cut, times)
            tokens = price.at(shape.old, start is not None) if price and shape.asynchronous else 1.0
            if tokens is None:  # it cannot have the start, and nobody knows what delay costs without
                unpriced = True
                continue
            seconds = mean_seconds(start, estimate(times, shape))
            fitting.append(_Fitting(tokens * seconds, tokens, shape, cut, memory, times, start))
    if unpriced and not fitting:
        always, start = split(job.correction)
        raise UserError(
            f"No layout can have a {start.replace('_', ' ')}, and the penalty table has no entry for {job.optimizer} "
            f"with correction {always} alone. Add one to it, or give larger microbatches with --microbatch-size."
        )
    fitting.sort(key=lambda entry: entry.seconds)
    return considered, fitting


def _fit(
    job: Job, fitter: Fitter, shape: Shape, room: float
) -> tuple[Shape, Cut, tuple[StageMemory, ...], StageTimes] | None:
    """The shape with its cutover, which depends on the times that its cut gives, and how it fits."""
    found = fitter.fit(shape, room)
    if found is None or fitter.all_old:
        return found and (shape, *found)
    late = with_cutover(found[2], shape)
    if late.old == 1 and fitter.usual_cutover(shape) < shape.microbatches:
        # The master is whole where all is old (`pipeline/compact.py`), which takes more than the first look assumed.
        found = fitter.fit(late, room)
    return found and (late, *found)


class _Fitting(NamedTuple):
    """A shape that fits, cut."""

    seconds: float  # by closed form, of an update, times what its tokens count less
    penalty: float
    shape: Shape
    cut: Cut
    memory: tuple[StageMemory, ...]
    times: StageTimes
    start: Start | None  # by closed form too


def _start(job: Job, fitter: Fitter, shape: Shape, cut: Cut, times: StageTimes) -> Start | None:
    found = start_shape(shape, split(job.correction)[1], times)
    if found is None:
        return None
    key, share, first = found
    if first.asynchronous:  # else its actions are those of the rest, and so is what drives them
        times = fitter.times(first, cut)
    return Start(key, share, first, times, estimate(times, first))


def _simulated(job: Job, entries: Sequence[_Fitting]) -> list[Layout]:
    """The best few of a schedule, and the best of those that `slipstream train` runs, where it is none of them."""
    known: dict[Shape, Layout] = {}
    best = _best_few(job, entries, known)
    runnable = [entry for entry in entries if not why_not(job, entry.shape)]
    if few := _best_few(job, runnable, known):
        layout = max(few, key=lambda layout: layout.score)
        if all(why_not(job, other.shape) or other.score < layout.score for other in best):
            best.append(layout)
    return best


def _best_few(job: Job, entries: Sequence[_Fitting], known: dict[Shape, Layout]) -> list[Layout]:
    """No two of the same P and microbatch: variants of one layout would crowd out the rest.

    How many are in flight decides how much is old, and which of the two counts for more the simulator knows: so of each
    P and microbatch the best with every depth is simulated, once (`known`).
    """
    kept: dict[tuple[int, int], dict[int | None, _Fitting]] = {}
    for entry in entries:
        variants = kept.setdefault((entry.shape.stages, entry.shape.microbatch_size), {})
        variants.setdefault(entry.shape.in_flight, entry)
    chosen = [list(variants.values()) for variants in list(kept.values())[:SIMULATED_PER_SCHEDULE]]
    for entry in chain.from_iterable(chosen):
        if entry.shape not in known:
            known[entry.shape] = _layout(job, entry)
    return [max((known[entry.shape] for entry in few), key=lambda layout: layout.score) for few in chosen]


def _layout(job: Job, entry: _Fitting) -> Layout:
    _, penalty, shape, cut, memory, times, start = entry
    speed, jitter = simulated(times, shape, job.cluster.jitter), job.cluster.jitter
    if start:
        start = replace(start, seconds=simulated(start.times, start.shape, jitter).seconds)
    rate = job.batch_tokens / mean_seconds(start, speed.seconds)
    peak = job.cluster.devices * job.cluster.device.peak_flops
    return Layout(
        shape=shape,
        cut=cut,
        memory=memory,
        times=times,
        speed=speed,
        tokens_per_second=rate,
        mfu=rate * flops_per_token(job.config, job.sequence) / peak,
        penalty=penalty,
        start=start,
    )


def nothing_works(job: Job) -> str:
    """Why there is no layout, and the nearest one there is."""
    forced = {
        name: value
        for name in ("schedule", "stages", "microbatches", "microbatch_size")
        if (value := getattr(job, name)) is not None
    }
    if forced:
        words = ", ".join(f"{name.replace('_', '-')} {value}" for name, value in forced.items())
        why = _law(job) or f"With {words}, no layout of {job.cluster.devices} devices works"
        return f"{why}. {_nearest(job, forced)}"
    fitter = Fitter(job)
    needs = [
        (max(rank.total for rank in fitter.memory(shape, cut)), shape)
        for shape in shapes(job)
        if (cut := fitter.cut(shape))
    ]
    if not needs:
        per_device = max(1, round(job.sequences / job.cluster.devices))
        if job.sequences == job.cluster.devices * per_device:
            most = MOST_MICROBATCHES * max(MICROBATCH_SIZES) * job.cluster.devices
            return (
                f"{job.sequences} sequences of {job.sequence} tokens are more than {MOST_MICROBATCHES} microbatches in "
                f"every layout of {job.cluster.devices} devices. Take --batch-tokens {job.sequence * most} or less, or "
                "name --microbatches or --microbatch-size."
            )
        return (
            f"{job.sequences} sequences of {job.sequence} tokens cannot be shared by "
            f"{job.cluster.devices} devices and {job.config.layers} layers. The nearest batch that works is "
            f"--batch-tokens {job.sequence * job.cluster.devices * per_device}."
        )
    room = job.cluster.device.room_bytes
    least, shape = min(needs, key=lambda entry: entry[0])
    return (
        f"{parameters(job.config) / 1e9:.3g}B parameters do not fit on {job.cluster.devices} x "
        f"{job.cluster.device.name}: the leanest layout ({describe(shape)}) needs {least / 2**30:.1f} GiB "
        f"per device and {room / 2**30:.1f} GiB can be used. {_more_devices(job)}"
    )


def _law(job: Job) -> str:
    """A rule that the forced values break by themselves."""
    if job.stages and job.cluster.devices % job.stages:
        return f"{job.stages} stages do not divide {job.cluster.devices} devices"
    if job.stages and job.stages > job.config.layers:
        return f"{job.config.layers} layers cannot form {job.stages} stages"
    if job.stages and job.microbatches and job.microbatches < job.stages:
        return f"{job.microbatches} microbatches cannot fill {job.stages} stages: m must be at least P"
    return ""


def _nearest(job: Job, forced: dict[str, Any]) -> str:
    """Free the forced values, as few as will do, and name the layout closest to what was asked for."""
    for count in range(1, len(forced) + 1):
        found = []
        for freed in combinations(forced, count):
            relaxed = _free(job, freed)
            try:
                _, fitting = _fits(relaxed, _price_for(relaxed))
            except UserError:  # another schedule would need a token penalty that no one has measured
                continue
            found += fitting
        if found:
            best = min(found, key=lambda entry: (_distance(entry.shape, forced), entry.seconds)).shape
            size = f" (--microbatch-size {best.microbatch_size * best.data_ranks})"
            return f"The nearest layout that works: {describe(best)}{size if 'microbatch_size' in forced else ''}."
    return nothing_works(_free(job, forced))


def _distance(shape: Shape, forced: dict[str, Any]) -> float:
    """How far a shape is from the numbers that were forced, by their ratios."""
    has = {
        "stages": shape.stages,
        "microbatches": shape.microbatches,
        "microbatch_size": shape.microbatch_size * shape.data_ranks,
    }
    return sum(abs(log(value / forced[name])) for name, value in has.items() if name in forced)


def _free(job: Job, names: Iterable[str]) -> Job:
    unset: dict[str, Any] = dict.fromkeys(names)
    return replace(job, **unset)


def _more_devices(job: Job) -> str:
    for factor in (2, 4, 8, 16, 32):
        larger = replace(job, cluster=replace(job.cluster, devices=job.cluster.devices * factor))
        _, fitting = _fits(larger, _price_for(larger))
        if fitting:
            return f"The nearest that works: {larger.cluster.devices} devices ({describe(fitting[0].shape)})."
    return "Nor on 32 times as many: use devices with more memory, or a shorter sequence."
