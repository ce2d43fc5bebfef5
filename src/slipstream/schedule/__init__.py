"""Pipeline schedules as data: generate, check, simulate and draw them. Imports no torch."""

from slipstream.schedule.actions import Action, Kind, Schedule, Weights
from slipstream.schedule.generate import build
from slipstream.schedule.simulate import Costs, Span, Timeline, simulate
from slipstream.schedule.steady import Steady, steady
from slipstream.schedule.validate import ScheduleError, check

__all__ = [
    "Action",
    "Costs",
    "Kind",
    "Schedule",
    "ScheduleError",
    "Span",
    "Steady",
    "Timeline",
    "Weights",
    "build",
    "check",
    "simulate",
    "steady",
]
