"""No circle among hosts, streams and communicators: the protocol of `in_stream.py` as a model.

Hosts run the real order of the schedule. A message is two kernels, one on each device, and they run when both have been
queued and everything queued before each of them, in its queue, is done. The adversary: after every action a host waits
until its device has done all there is (it allocates, say, or loads a kernel), looking after nobody meanwhile; and the
hardware may put streams into one queue. What is possible stays possible, so if this run ends, every run does.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque

import pytest

from slipstream.schedule.actions import Kind
from slipstream.schedule.asynchronous import warm_up_2bw
from slipstream.schedule.generate import build

# Kernels: S and r are the two halves of an activation's message, s and R those of a gradient's.
QUEUES = {
    "streams of their own": {name: name for name in ("S", "r", "s", "R", "compute")},
    "one queue for messages": {**dict.fromkeys("SrsR", "messages"), "compute": "compute"},
    "one queue for everything": dict.fromkeys(("S", "r", "s", "R", "compute"), "all"),
}
OTHER_HALF = {"S": (1, "r"), "r": (-1, "S"), "R": (1, "s"), "s": (-1, "R")}


class Model:
    """`early`: receives of gradients are queued with the sends of their activations, as if it did no harm."""

    def __init__(self, stages, microbatches, queues, in_flight=None, cutover=None, early=False, groups=3):
        self.stages, self.queues, self.early = stages, QUEUES[queues], early
        self.warm_up = warm_up_2bw(stages, microbatches, in_flight)
        self.cutover = microbatches if cutover is None else cutover
        self.schedule = build("2bw", stages, microbatches, groups, in_flight=in_flight, cutover=self.cutover)
        self.queued = defaultdict(deque)  # (stage, queue) -> kernels that are not done, in order
        self.done = set()
        self.needs = {}  # kernel -> kernels of its own device that must be done before
        self.sent, self.ready = (
            Counter(),
            Counter(),
        )  # notices of the stage before, by the stage that hears them
        self.held = defaultdict(deque)  # gradients that are not queued yet
        self.told = defaultdict(set)  # group -> stages that have told their norms

    def host(self, stage, actions):
        """What a host does; it yields what it waits for, and whether it looks after its neighbours meanwhile."""
        last = stage == self.stages - 1
        awaited, received = deque(), 0
        for kind, _, microbatch, group, _ in actions:
            at = (group, microbatch)
            if kind is Kind.FORWARD:
                if microbatch == 0 and group > 1:
                    yield lambda group=group: len(self.told[group - 2]) == self.stages, True
                if microbatch == self.cutover and group > 0:  # the weights of the update before
                    yield lambda group=group: len(self.told[group - 1]) == self.stages, True
                if stage > 0:
                    yield lambda received=received: self.sent[stage] > received, True
                    received += 1
                    self.queue(stage, "r", at)
                self.queue(stage, "compute", ("F", *at), *([(stage, "r", at)] if stage > 0 else []))
                if not last:
                    self.queue(stage, "S", at, (stage, "compute", ("F", *at)))
                    self.sent[stage + 1] += 1
                    awaited.append(at)
                    while len(awaited) > (0 if self.early else self.warm_up[stage + 1]):
                        self.post(stage, awaited.popleft())
            elif kind is Kind.BACKWARD:
                if not last and at in awaited:
                    self.post(stage, awaited.popleft())
                self.queue(stage, "compute", ("B", *at), *([] if last else [(stage, "R", at)]))
                if stage > 0:
                    self.held[stage].append(at)
                    self.attend(stage)
            else:
                self.told[group].add(stage)
            yield lambda: not any(self.queued[stage, queue] for queue in set(self.queues.values())), False

    def post(self, stage, at):
        self.queue(stage, "R", at)
        self.ready[stage + 1] += 1

    def attend(self, stage):
        while self.held[stage] and self.ready[stage] > 0:
            self.ready[stage] -= 1
            at = self.held[stage].popleft()
            self.queue(stage, "s", at, (stage, "compute", ("B", *at)))

    def queue(self, stage, name, at, *needs):
        kernel = (stage, name, at)
        self.needs[kernel] = needs
        self.queued[stage, self.queues[name]].append(kernel)

    def runs(self, kernel):
        """Whether a kernel is at the head of its queue with all it needs."""
        stage, name, _ = kernel
        line = self.queued[stage, self.queues[name]]
        return bool(line) and line[0] == kernel and self.done.issuperset(self.needs[kernel])

    def device(self):
        """Do what can be done; whether anything was."""
        any_done = False
        for line in list(self.queued.values()):
            while line and self.runs(line[0]):
                kernel = line[0]
                together = [kernel]
                if kernel[1] != "compute":
                    place, other = OTHER_HALF[kernel[1]]
                    together.append((kernel[0] + place, other, kernel[2]))
                    if not self.runs(together[1]):
                        break
                for each in together:
                    self.queued[each[0], self.queues[each[1]]].popleft()
                    self.done.add(each)
                any_done = True
        return any_done

    def ends(self):
        """Whether every host gets through its program and every kernel runs."""
        hosts = {stage: self.host(stage, actions) for stage, actions in enumerate(self.schedule.ranks)}
        waits = {stage: next(host) for stage, host in hosts.items()}
        moved = True
        while moved:
            moved = self.device()
            for stage in range(self.stages):
                arrived, attentive = waits.get(stage, (lambda: True, True))  # a drain is attentive
                if attentive or arrived():
                    moved |= bool(self.held[stage] and self.ready[stage])
                    self.attend(stage)
                if stage in waits and arrived():
                    moved = True
                    if (following := next(hosts[stage], None)) is None:
                        del waits[stage]
                    else:
                        waits[stage] = following
        return not waits and not any(self.queued.values()) and not any(self.held.values())


@pytest.mark.parametrize("queues", QUEUES)
@pytest.mark.parametrize("stages", [2, 3, 4, 6, 8])
def test_every_host_and_every_kernel_gets_to_its_end(stages, queues):
    for microbatches in (stages, stages + 1, 2 * stages, 3 * stages):
        for in_flight in {None, stages + 1, microbatches, microbatches + 1}:
            if in_flight is None or in_flight >= stages:
                assert Model(stages, microbatches, queues, in_flight).ends(), (microbatches, in_flight)


@pytest.mark.parametrize("queues", QUEUES)
@pytest.mark.parametrize("stages", [2, 3, 4])
def test_whatever_the_cutover(stages, queues):
    for microbatches in (stages, stages + 1, 2 * stages):
        for cutover in range(microbatches + 1):
            for in_flight in (None, microbatches + 1):
                model = Model(stages, microbatches, queues, in_flight, cutover)
                assert model.ends(), (microbatches, cutover, in_flight)


def test_the_model_sees_a_circle_where_there_is_one():
    """Receives of gradients that are queued too early: a host waits for its device, which waits for that host."""
    assert not Model(3, 4, "streams of their own", early=True).ends()
    assert not Model(3, 4, "one queue for messages", early=True).ends()
