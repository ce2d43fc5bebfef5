"""Jobs for worker processes: depths that are tried as on a GPU, with updates that take as long as a test says."""

from typing import ClassVar
from unittest import mock

from pipeline.jobs import build, step, weights
from pipeline.recorded import Made
from slipstream.pipeline import depth, runtime


class Trying(depth.Depth):
    """Its stages have jitter that asks for as many in flight as there can be; `seconds`: an update, by depth."""

    seconds: ClassVar[dict[int, float]] = {}

    def __init__(self, stage, stages, m, in_flight, on_host, cutover):
        super().__init__(stage, stages, m, in_flight, False, cutover)
        self.updates = 0

    def measure(self, status, pair_seconds, last_update):
        seconds = self.seconds.get(self.warm_up + 1, 1.0)  # the first stage's is the one that counts
        super().measure(status, lambda: (1.0, 20.0), lambda: (self.updates - 1, seconds))
        self.updates += 1


def tried(world, seconds, groups, drains=(), recorded=False, drained=(0, 1, 2, 3), **options):
    """A run in which depths are tried: losses, weights, the depth and the most in flight by group, slots at the end.
    `drained`: the stages that take part in the drains."""
    made = Made()
    if recorded:
        options["prepare"] = made.prepare
    Trying.seconds = seconds
    with mock.patch.object(runtime, "Depth", Trying):
        schedule = build(world, tied=False, **options)
    losses, had, most = [], [], []
    forward = schedule._flight.forward

    def counted(*args):
        found = forward(*args)
        most[-1] = max(most[-1], len(schedule._flight))
        return found

    schedule._flight.forward = counted
    for group in range(groups):
        most.append(0)
        losses += step(world, schedule, group, outputs=False)
        had.append(schedule.in_flight)
        if group in drains and world.rank in drained:
            schedule.drain()
    schedule.drain()
    return losses, weights(schedule), had, most, len(made.graphs._slots)
