"""The cutover of a run: decided when the run is made, kept with it, the same after a resume into another P.

A run of before there was a choice had all its microbatches old, and goes on so.
"""

from __future__ import annotations

from pathlib import Path

from slipstream.config import Change, Config
from slipstream.config import changes as all_changes
from slipstream.schedule.costs import Costs
from slipstream.schedule.cutover import default_cutover
from slipstream.schedule.steady import steady
from slipstream.train.claim import has_checkpoints, last_started, run_of

_FELT = 1.01  # an update that takes this many times as long is worth a figure
_USUAL = Costs(forward=1.0, backward=2.0, update=0.5, update_latency=0.1)  # an update is never free


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
    return decided(config, m if apart else default_cutover(config.stages, pipeline.most_microbatches))


def expected(config: Config) -> Config:
    """`config` with the cutover that a start will find, as far as the folder of its run (or of the one that it is
    forked from) tells without torch. What the start itself decides is `folder.plan`'s."""
    folder = Path(config.run.dir)
    if not has_checkpoints(folder) and config.run.fork_from is not None:
        folder = run_of(Path(config.run.fork_from))
    return with_cutover(config, last_started(folder) if has_checkpoints(folder) else None)


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
    pipeline, cutover = config.pipeline, config.pipeline.cutover
    if pipeline.schedule != "2bw" or not isinstance(cutover, int) or pipeline.stages is None:
        return []
    usual = default_cutover(pipeline.stages, pipeline.microbatches)
    if cutover >= usual or (before is not None and _layout(before) == _layout(config)):
        return []
    times = [
        steady(
            "2bw", pipeline.stages, pipeline.microbatches, _USUAL, cutover=old, in_flight=pipeline.in_flight
        )
        for old in (cutover, usual)
    ]
    ratio = times[0].time_per_update / times[1].time_per_update
    longer = f"{ratio:.2f} times as long" if ratio >= _FELT else "less than 1 % longer"
    return [
        f"The cutover of this run is {cutover} of {pipeline.microbatches} microbatches; {pipeline.stages} stages need "
        f"{usual} not to wait at it. By the simulator, with quick links and updates, an update takes {longer}."
    ]


def _layout(config: Config) -> tuple[object, ...]:
    return config.pipeline.schedule, config.pipeline.stages, config.pipeline.microbatches
