"""A recorder for stages that runs Python again, at fixed addresses, and forgets what CUDA graphs would forget."""

import torch

from pipeline import tiny
from pipeline.jobs import build, train
from slipstream.pipeline.stage_graphs import StageGraphs


class Slot:
    """Like CUDA graphs of one pool: recording computes nothing, a replay writes where the recording said, and lies over
    what the others of this slot computed."""

    def __init__(self, made):
        self.made, self.others = made, []
        made.slots += 1

    def record(self, forward, backward):
        backward(forward())
        self.made.recorded += 1
        kept, left = [output.detach().clone() for output in forward()], []
        self.others.append((kept, left))

        def replay_forward():
            self.made.forwards += 1
            for outputs, graph in self.others:
                graph.clear()
                for output in outputs:
                    output.fill_(torch.nan if output.is_floating_point() else -1)
            self.made.replaying = True
            with torch.enable_grad():
                left.extend(forward())
            self.made.replaying = False
            for output, value in zip(kept, left, strict=True):
                output.copy_(value.detach())

        def replay_backward():
            self.made.backwards += 1
            backward([left.pop(0) for _ in kept])

        return kept, replay_forward, replay_backward


class Made:
    """What the recorders of a rank have done."""

    def __init__(self):
        self.slots = self.recorded = self.forwards = self.backwards = 0
        self.replaying = False  # a forward
        self.graphs = StageGraphs(lambda: Slot(self))

    def prepare(self, module):
        return self.graphs.wrap(module, module)


def train_both(world, groups, **options):
    """A run of the engine plainly and recorded: both results, and what was recorded."""
    made = Made()
    found = train(world, groups, prepare=made.prepare, **options)
    return train(world, groups, **options), found, (made.slots, made.recorded, made.forwards, made.backwards)


def outputs_of_both(world, groups):
    """What `step` returned for each group, of a recorded run and of a plain one, once all of it has run."""
    found = []
    for prepare in (Made().prepare, None):
        schedule = build(world, tied=False, prepare=prepare)
        kept = []
        for group in groups:
            x, y = tiny.batch(group)
            last = world.rank == world.size - 1
            kept.append(schedule.step(*((x,) if world.rank == 0 else ()), **({"target": y} if last else {})))
        schedule.drain()
        found.append(kept)
    return found
