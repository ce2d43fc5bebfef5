"""What `refuse.py` has to say of the schedule: how an update is cut, which of it is old, and who shares it."""

from __future__ import annotations

from collections.abc import Iterator

from slipstream.config.settings import Config, updates


def refused_schedule(config: Config) -> Iterator[str]:
    pipeline, stages = config.pipeline, config.stages
    m = pipeline.microbatches
    if pipeline.schedule == "emulate":
        if stages != 1 or pipeline.data_ranks != 1:
            yield (
                f"pipeline.schedule = 'emulate' runs in one process; pipeline.stages = {stages} and "
                f"pipeline.data_ranks = {pipeline.data_ranks} cannot take effect. Set both to 1."
            )
        delays = pipeline.delay if isinstance(pipeline.delay, list) else [pipeline.delay]
        if not delays or min(delays) < 0:
            yield f"pipeline.delay = {pipeline.delay} must not be negative or empty."
        elif pipeline.mismatch not in (0, [0]):
            yield from _mismatch(config, delays)
        if config.model.layers is not None and len(delays) > config.model.layers:
            yield (
                f"pipeline.delay = {pipeline.delay} names {len(delays)} stages, and {config.model.layers} layers "
                f"cannot fill them. List at most {config.model.layers} delays."
            )
    elif m < stages:
        yield (
            f"pipeline.microbatches = {m} is less than pipeline.stages = {stages}. Set "
            f"pipeline.microbatches to at least {stages}, or use fewer stages."
        )
    if pipeline.schedule != "emulate" and pipeline.delay != 1:
        yield (
            f"pipeline.delay = {pipeline.delay} cannot take effect: pipeline.schedule = '{pipeline.schedule}' has a "
            f"delay of {0 if config.synchronous else 1}. Set pipeline.schedule=emulate for other delays."
        )
    yield from _cutover(config)
    if pipeline.fine_start or pipeline.fine_microbatches is not None:
        yield from _fine_start(config)
    if pipeline.schedule != "emulate" and pipeline.mismatch != 0:
        yield (
            f"pipeline.mismatch = {pipeline.mismatch} cannot take effect: pipeline.schedule = "
            f"'{pipeline.schedule}' keeps a forward's weights for its backward. Set pipeline.schedule=emulate."
        )
    if pipeline.schedule != "2bw":
        if pipeline.in_flight is not None:
            yield "pipeline.in_flight takes effect with pipeline.schedule=2bw only. Drop it."
        if pipeline.shard_optimizer:
            yield "pipeline.shard_optimizer takes effect with pipeline.schedule=2bw only. Drop it."
    elif pipeline.in_flight is not None and not stages <= pipeline.in_flight <= m + 1:
        yield (
            f"pipeline.in_flight = {pipeline.in_flight} must lie between the stages ({stages}) and "
            f"microbatches + 1 ({m + 1})."
        )
    if config.chunks == 2 and m % stages:
        yield (
            f"pipeline.schedule = '{pipeline.schedule}' needs pipeline.microbatches ({m}) divisible by "
            f"pipeline.stages ({stages})."
        )
    if pipeline.schedule == "zbv" and config.data.mask_documents:
        yield "data.mask_documents does not work with pipeline.schedule=zbv. Use 2bw or 1f1b."
    if pipeline.schedule == "zbv" and config.model.experts:
        yield (
            f"model.experts = {config.model.experts} does not work with pipeline.schedule=zbv: torch cannot cut the "
            "backward of a routed layer in two. Use 2bw, 1f1b or interleaved_1f1b."
        )
    if pipeline.shard_optimizer and pipeline.data_ranks == 1:
        yield "pipeline.shard_optimizer needs pipeline.data_ranks of 2 or more to take effect."
    if pipeline.partitions and (pipeline.schedule == "emulate" or config.train.device == "cpu"):
        yield (
            f"pipeline.partitions cuts one GPU among the ranks; with pipeline.schedule = '{pipeline.schedule}' "
            f"and train.device = '{config.train.device}' it cannot take effect. Drop it."
        )
    if pipeline.microbatch_size % pipeline.data_ranks:
        yield (
            f"pipeline.microbatch_size = {pipeline.microbatch_size} cannot be shared by pipeline.data_ranks = "
            f"{pipeline.data_ranks}. Make it a multiple."
        )


def _cutover(config: Config) -> Iterator[str]:
    pipeline, optim = config.pipeline, config.optim
    cutover, m = pipeline.cutover, pipeline.microbatches
    if cutover is None:
        return
    if config.synchronous:
        yield (
            f"pipeline.cutover = {cutover} cannot take effect: pipeline.schedule = '{pipeline.schedule}' reads the "
            "newest weights only. Drop it, or set pipeline.schedule=2bw."
        )
        return
    if pipeline.delay != 1 or pipeline.mismatch not in (0, [0]):
        yield (
            f"pipeline.cutover = {cutover} is of 2BW, where every stage is one update late: it does not go with "
            f"pipeline.delay = {pipeline.delay} and pipeline.mismatch = {pipeline.mismatch}. Drop it, or those."
        )
    if isinstance(cutover, list) and pipeline.schedule == "2bw":
        yield (
            f"pipeline.cutover = {cutover}: the stages of a pipeline share one, so that a microbatch reads one version "
            "all the way. Give one number, or set pipeline.schedule=emulate."
        )
    elif isinstance(cutover, list):
        layers = config.model.layers
        if not cutover or min(cutover) < 0 or max(cutover) > m:
            yield f"pipeline.cutover = {cutover} must lie between 0 and the microbatches ({m})."
        elif layers is not None and len(cutover) > layers:
            yield (
                f"pipeline.cutover = {cutover} names {len(cutover)} stages, and {layers} layers cannot fill them."
            )
    if optim.correction == "delay_compensation" and cutover not in (0, m):
        yield (
            f"pipeline.cutover = {cutover} does not go with optim.correction=delay_compensation, which changes a "
            "gradient taken at one bank. Set optim.correction=error_feedback or none, or drop it."
        )


def _fine_start(config: Config) -> Iterator[str]:
    pipeline, steps = config.pipeline, config.train.steps
    m, fine, rows = pipeline.microbatches, pipeline.fine_microbatches, pipeline.microbatch_size
    start = f"pipeline.fine_start = {pipeline.fine_start:g}"
    if not pipeline.fine_start:
        yield f"pipeline.fine_microbatches = {fine} takes effect with pipeline.fine_start only. Set that, or drop it."
        return
    if config.optim.correction == "delay_compensation":
        yield f"{start} does not go with optim.correction=delay_compensation, which needs whole updates old. Drop it."
    elif not config.late or pipeline.delay != 1 or isinstance(pipeline.cutover, list):
        yield (
            f"{start} makes a smaller part of an update old, where all stages are late by one update. Drop it, or set "
            "pipeline.schedule=2bw."
        )
    elif pipeline.cutover is None and pipeline.schedule == "emulate":
        yield f"{start} changes nothing where all of an update is old. Set pipeline.cutover."
    elif pipeline.cutover is not None and pipeline.cutover in (0, fine):
        yield f"{start} changes nothing with pipeline.cutover = {pipeline.cutover} of {fine}. Drop one of them."
    length, flushed = updates(pipeline.fine_start, steps), config.optim.sync_start
    if length < 2:
        yield (
            f"{start} is {length} of train.steps = {steps} updates, and changes nothing: the first one reads the "
            "initial weights. Set it to a share of the run, as 0.2, or to 2 updates or more."
        )
    elif (pipeline.fine_start < 1) == (flushed < 1) and length <= updates(flushed, steps) + 1:
        yield (
            f"{start} changes nothing: optim.sync_start = {flushed:g} flushes its updates. Drop one of "
            "them, or make the fine start longer."
        )
    if length >= steps:
        yield (
            f"{start} is the whole run of train.steps = {steps}. Lower it, or set pipeline.microbatches to what all "
            "updates should have."
        )
    if fine is None:
        return
    if fine <= m or m * rows % fine:
        yield (
            f"pipeline.fine_microbatches = {fine} must be more than pipeline.microbatches = {m} and cut the {m * rows} "
            "sequences of an update evenly. Name another number, or none."
        )
    elif m * rows // fine % pipeline.data_ranks:
        yield (
            f"pipeline.fine_microbatches = {fine} leaves {m * rows // fine} sequences to a microbatch, which "
            f"pipeline.data_ranks = {pipeline.data_ranks} cannot share. Name fewer, or make pipeline.microbatch_size "
            "larger."
        )


def _mismatch(config: Config, delays: list[int]) -> Iterator[str]:
    """A backward can only see newer weights where its forward's own are the ones autograd kept."""
    mismatch, train, optim = config.pipeline.mismatch, config.train, config.optim
    lags = mismatch if isinstance(mismatch, list) else [mismatch] * len(delays)
    if len(lags) != len(delays) or any(not 0 <= lag <= late for lag, late in zip(lags, delays, strict=False)):
        yield (
            f"pipeline.mismatch = {mismatch} must give one number for each stage of pipeline.delay = "
            f"{config.pipeline.delay}, none negative or above that stage's delay."
        )
    if train.dtype == "bfloat16_autocast" or train.compile:
        yield (
            "pipeline.mismatch cannot take effect under train.dtype=bfloat16_autocast or train.compile, where the "
            "backward may read a copy of the weights. Set train.dtype=bfloat16 (or float32) and train.compile=false."
        )
    if optim.sync_start or optim.sync_finish:
        yield (
            f"pipeline.mismatch = {mismatch} does not go with optim.sync_start and optim.sync_finish: a flushed "
            "update has no mismatch. Set them to 0."
        )
