"""The cutover of a run: decided when the run is made, kept with it, the same after a resume into another P.

A run of before there was a choice had all its microbatches old, and goes on so.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from slipstream.config import Change, Config, from_tree
from slipstream.config import changes as all_changes
from slipstream.errors import UserError
from slipstream.schedule.costs import Costs
from slipstream.schedule.cutover import FELT, default_cutover
from slipstream.schedule.steady import steady
from slipstream.train import fine
from slipstream.train.claim import has_checkpoints, last_started, newest_of, run_of
from slipstream.train.manifest import manifest
from slipstream.train.preflight import on_processors
from slipstream.train.starts import Starts

_FORWARD, _BACKWARD = 1.0, 2.0
_USUAL = Costs(forward=_FORWARD, backward=_BACKWARD, update=0.5, update_latency=0.1)  # no update is free


def with_cutover(config: Config, stored: Config | None) -> Config:
    """`config` with the cutover it asks for, else that of the run it goes on with, else the least that is free."""
    pipeline = config.pipeline
    if pipeline.cutover is not None or config.synchronous or pipeline.delay != 1:
        return config
    same = stored is not None and _cut(stored) == _cut(config)
    if stored is not None and same and not stored.synchronous and stored.pipeline.delay == 1:
        kept = stored.pipeline.cutover
        all_old = stored.pipeline.microbatches if pipeline.schedule == "2bw" else None
        return decided(config, all_old if kept is None else kept)
    if pipeline.schedule == "emulate":
        return config  # 2BW as it was published
    m = pipeline.microbatches
    # A correction of the gradient itself needs the whole group at one bank.
    apart = config.optim.correction == "delay_compensation"
    usual = default_cutover(config.stages, pipeline.most_microbatches, on_processors(config))
    return decided(config, m if apart else usual)


def _cut(config: Config) -> tuple[int, int]:
    return config.pipeline.microbatches, config.pipeline.most_microbatches


def expected(config: Config) -> Config:
    """`config` with the cutover and the starts that a start of it will find, as far as the folder of its run (or of the
    one that it is forked from) tells without torch. What the start itself decides is `folder.plan`'s."""
    source = folder = Path(config.run.dir)
    if not has_checkpoints(folder) and config.run.fork_from is not None:
        source = Path(config.run.fork_from)
        folder = run_of(source)
    config = with_cutover(config, last_started(folder) if has_checkpoints(folder) else None)
    with contextlib.suppress(UserError):  # it is told when the run begins
        if (newest := newest_of(source)) is not None:
            told = manifest(newest)
            stored = from_tree(told.says("config", dict))
            return Starts.had(told, stored).where_asked_alike(stored, config).kept(config)
    return config


def decided(config: Config, cutover: int | float | list[int] | None) -> Config:
    return config.changed(pipeline={"cutover": cutover})


def changes(stored: Config, asked: Config) -> list[Change]:
    """The keys that would change the trajectory; a cutover that is not named is of all microbatches."""
    return all_changes(_named(stored), _named(asked))


def _named(config: Config) -> Config:
    if not config.late or config.pipeline.cutover is not None:
        return config
    return decided(config, config.pipeline.microbatches)


def waits(config: Config, before: Config | None) -> list[str]:
    """A sentence where these stages have to wait at the cutover, with the figure of what that costs; nothing where the
    run has been started like this before (`before`: as it was started last)."""
    if before is not None and _layout(before) == _layout(config):
        return []
    start = fine.length(config)
    stretches = [fine.stretch(config, start), *([fine.stretch(config, 0)] if start else [])]
    return [text for stretch in stretches for text in _waits_of(stretch)]


def _waits_of(config: Config) -> list[str]:
    pipeline, cutover = config.pipeline, config.pipeline.cutover
    if pipeline.schedule != "2bw" or not isinstance(cutover, int) or pipeline.stages is None:
        return []
    usual = default_cutover(pipeline.stages, pipeline.microbatches)
    if cutover >= usual:
        return []
    waiting, free = (
        _time(pipeline.stages, pipeline.microbatches, old, pipeline.in_flight) for old in (cutover, usual)
    )
    ratio = waiting / free
    longer = f"{ratio:.2f} times as long" if ratio >= FELT else "less than 1 % longer"
    return [
        f"The cutover of this run is {cutover} of {pipeline.microbatches} microbatches; {pipeline.stages} stages need "
        f"{usual} not to wait at it. By the simulator, with quick links and updates, an update takes {longer}."
    ]


def _time(stages: int, microbatches: int, cutover: int, in_flight: int | None) -> float:
    """Of an update, by the simulator, which is given no more microbatches than it takes to tell.

    A rank fills its flight behind the cutover, and runs forward and backward in turn from there on. What it waits for
    another it has waited by the time that one flight is through. After that the ranks, which are equal, keep step: each
    further microbatch makes an update longer by its forward and backward.
    """
    enough = min(microbatches, cutover + 2 * (in_flight or stages))
    few = steady("2bw", stages, enough, _USUAL, cutover=cutover, in_flight=in_flight)
    return few.time_per_update + (microbatches - enough) * (_FORWARD + _BACKWARD)


def _layout(config: Config) -> tuple[object, ...]:
    pipeline = config.pipeline
    return pipeline.schedule, pipeline.stages, pipeline.microbatches, pipeline.cutover
