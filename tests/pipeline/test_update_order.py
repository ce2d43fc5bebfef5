"""When the parts of an update run: in one order on all data ranks, and no step while the most are in flight."""

import torch

from pipeline import tiny
from slipstream.optim.corrections import build_correction
from slipstream.pipeline.peers import Peers, RunStatus
from slipstream.pipeline.update import Updater
from slipstream.pipeline.versions import Versions
from slipstream.schedule.cutover import Cutover, never

M, GROUPS = 4, 4


class Answer:
    """Of another rank: there, or not yet."""

    def __init__(self, here):
        self.here = here

    def is_completed(self):
        return self.here

    def wait(self):
        self.here = True


class Told(Peers):
    """A data rank that owns every second parameter. It notes what it queues; norms come when they are let in."""

    sharded = True

    def __init__(self, count, late):
        super().__init__(count)
        self.owned = list(range(0, count, 2))
        self.late, self.queued = late, []

    def reduce(self, grads):
        self.queued.append("reduce")
        yield Answer(True)

    def gather(self, weights):
        self.queued.append("gather")
        yield Answer(True)

    def exchange(self, group, squares, status):
        self.answer = Answer(not self.late)
        yield self.answer
        return RunStatus(squares.tolist(), False, *[[0.0]] * 6)


def queued(cutover, late):
    versions = Versions(tiny.Model(), Cutover(M, cutover, never), looks_ahead=True, parks=True)
    peers = Told(len(versions.names), late)
    versions.owned = peers.owned
    optimizer = torch.optim.SGD(versions.module.parameters(), lr=0.1)
    updater = Updater([versions], optimizer, build_correction("error_feedback"), None, peers)
    for group in range(GROUPS):
        updater.finish_bank(group - 2)  # as a stage does before it reads the bank
        updater.enter(group)
        if cutover(group) < M:
            updater.finish(group - 1)
        updater.begin(group, [torch.zeros_like(weight) for weight in versions.master.weights])
    updater.finish_all()
    return peers.queued


def test_a_late_norm_changes_no_order():
    for cutover in (lambda group: M, lambda group: 2, lambda group: (M, 2, 0)[group % 3]):
        found = queued(cutover, late=True)
        assert found == queued(cutover, late=False)
        assert found.count("reduce") == GROUPS
        assert "gather" in found


def test_no_step_is_made_while_the_most_are_in_flight():
    """The exchange goes on all the same, and whoever waits for the update gets it."""
    for finish in (lambda updater: updater.advance(), lambda updater: updater.finish(0)):
        versions = Versions(tiny.Model(), Cutover(M, lambda group: M, never), looks_ahead=False, parks=True)
        peers = Told(len(versions.names), late=True)
        peers.owned = list(range(len(versions.names)))
        optimizer = torch.optim.SGD(versions.module.parameters(), lr=0.1)
        updater = Updater([versions], optimizer, build_correction("none"), None, peers)
        updater.enter(0)
        updater.begin(0, [torch.ones_like(weight) for weight in versions.master.weights])
        peers.answer.here = True
        updater.advance(crowded=True)
        assert (list(updater.grad_norms), updater.completed) == ([0], 0)
        finish(updater)
        assert updater.completed == 1


def test_on_a_real_pipeline(pool):
    for sizes, warm_up in pool.run("pipeline.jobs:in_flight_at_steps", ranks=2):
        assert len(sizes) == 12
        assert max(sizes) <= warm_up
