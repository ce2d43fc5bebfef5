"""Optimizers that tolerate delay, corrections for it, and learning-rate schedules.

build(name, module, **options)    -> torch optimizer over a stage's parameters      build.py
build_correction(name, **options) -> what is done about delay                       corrections.py
schedule(name, peak, total, ...)  -> learning-rate multiplier of update g           lr.py
"""

from slipstream.optim.build import RECIPES, build
from slipstream.optim.corrections import (
    CORRECTIONS,
    Correction,
    Publication,
    build_correction,
    synchronous_groups,
)
from slipstream.optim.lr import SCHEDULES, schedule

__all__ = [
    "CORRECTIONS",
    "RECIPES",
    "SCHEDULES",
    "Correction",
    "Publication",
    "build",
    "build_correction",
    "schedule",
    "synchronous_groups",
]
