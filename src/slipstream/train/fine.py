"""A fine start: in a run's first updates each microbatch is cut finer, so that a smaller part of an update is old.

The cutover is a number of microbatches, c, which the pipeline's depth asks for. Cut into more of them an update is old
in a smaller part, c / m, without a flush; smaller microbatches keep a device less busy, so it is done where delay costs
most. A run with a fine start is two stretches of one trajectory: they differ in how an update is cut and in nothing
else (but that a balance loss of experts is taken over a microbatch), and between them the run goes on from a
checkpoint, as it would after an interruption.
"""

from __future__ import annotations

from slipstream.config import Config
from slipstream.config.settings import updates


def length(config: Config) -> int:
    """Updates of the fine start; 0: there is none."""
    return updates(config.pipeline.fine_start, config.train.steps)


def end_of_stretch(config: Config, step: int) -> int:
    """The step at which the stretch ends that goes on from `step`."""
    return min(length(config), config.train.steps) if step < length(config) else config.train.steps


def stretch(config: Config, step: int) -> Config:
    """The run as it is from `step` to the end of that stretch."""
    pipeline, cutover = config.pipeline, config.pipeline.cutover
    m = pipeline.microbatches
    if step < length(config):
        assert pipeline.fine_microbatches is not None
        m = pipeline.fine_microbatches
    old = min(cutover, m) if isinstance(cutover, int) else cutover
    rows = pipeline.microbatches * pipeline.microbatch_size
    return config.changed(pipeline={"microbatches": m, "microbatch_size": rows // m, "cutover": old})
