"""The cutover of a run: decided when the run is made, kept with it, the same after a resume into another P.

A run of before there was a choice had all its microbatches old, and goes on so.
"""

from __future__ import annotations

from slipstream.config import Change, Config
from slipstream.config import changes as all_changes
from slipstream.schedule.cutover import default_cutover, free_cutover
from slipstream.schedule.steady import steady

_FELT = 1.005  # an update that takes this many times as long is worth a word


def with_cutover(config: Config, stored: Config | None) -> Config:
    """`config` with the cutover it asks for, else that of the run it goes on with, else the least that is free."""
    pipeline = config.pipeline
    if pipeline.cutover is not None or config.synchronous or pipeline.delay != 1:
        return config
    same = stored is not None and stored.pipeline.microbatches == pipeline.microbatches
    if stored is not None and same and not stored.synchronous and stored.pipeline.delay == 1:
        kept = stored.pipeline.cutover
        all_old = stored.pipeline.microbatches if pipeline.schedule == "2bw" else None
        return decided(config, all_old if kept is None else kept)
    if pipeline.schedule == "emulate":
        return config  # 2BW as it was published
    m = pipeline.microbatches
    # A correction of the gradient itself needs the whole group at one bank.
    apart = config.optim.correction == "delay_compensation"
    return decided(config, m if apart else default_cutover(config.stages, m))


def decided(config: Config, cutover: int | float | list[int] | None) -> Config:
    return config.changed(pipeline={"cutover": cutover})


def changes(stored: Config, asked: Config) -> list[Change]:
    """The keys that would change the trajectory; a cutover that is not named is of all microbatches."""
    return all_changes(_named(stored), _named(asked))


def _named(config: Config) -> Config:
    if not config.late or config.pipeline.cutover is not None:
        return config
    return decided(config, config.pipeline.microbatches)


def waits(config: Config) -> list[str]:
    """A sentence where these stages have to wait at the cutover, with the figure of what that costs."""
    pipeline, cutover = config.pipeline, config.pipeline.cutover
    if pipeline.schedule != "2bw" or not isinstance(cutover, int) or pipeline.stages is None:
        return []
    free = free_cutover(pipeline.stages, pipeline.microbatches)
    if cutover >= free:
        return []
    times = [
        steady("2bw", pipeline.stages, pipeline.microbatches, cutover=old, in_flight=pipeline.in_flight)
        for old in (cutover, free)
    ]
    ratio = times[0].time_per_update / times[1].time_per_update
    if ratio < _FELT:
        return []
    return [
        f"The cutover of this run is {cutover} of {pipeline.microbatches} microbatches and is kept; {pipeline.stages} "
        f"stages need {free} not to wait at it. By the simulator an update takes {ratio:.2f} times as long as without "
        "the wait."
    ]
