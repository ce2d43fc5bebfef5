"""No circle among hosts, streams and communicators: the protocol of `in_stream.py` as a model.

Hosts run the real order of the schedule. A message is two kernels, one on each device, and they run when both have been
queued and everything queued before each of them, in its queue, is done. The adversary: after every action a host waits
until its device has done all there is (it allocates, say, or loads a kernel), and its attendant with it, which looks
after nobody meanwhile and is deaf to what the neighbours told just before (`beside`: on which ranks it goes on all the
same); and the hardware may put streams into one queue.
"""

from __future__ import annotations

from collections import defaultdict, deque
from types import SimpleNamespace

import pytest
from torch import nn

from slipstream.pipeline.versions import Versions
from slipstream.schedule.actions import Action, Kind
from slipstream.schedule.asynchronous import warm_up_2bw
from slipstream.schedule.cutover import Cutover
from slipstream.schedule.generate import build

# Kernels: S and r are the two halves of an activation's message, s and R those of a gradient's, D what the data ranks
# of a stage do together, T what the first and the last stage do with a tied weight.
NAMES = ("S", "r", "s", "R", "D", "T", "compute")
QUEUES = {
    "streams of their own": {name: name for name in NAMES},
    "one queue for messages": {**dict.fromkeys("SrsR", "messages"), "D": "D", "T": "T", "compute": "compute"},
    "one queue for everything": dict.fromkeys(NAMES, "all"),
}
OTHER_HALF = {"S": (1, "r"), "r": (-1, "S"), "R": (1, "s"), "s": (-1, "R")}


class Model:
    """`patience`: whether what is to be sent is held back until its device is done with it. `held_to_the_end`: a kernel
    holds up its queue until it is done, not only until it has begun (when it has all it needs of its own device).
    `equals`: stages on both sides begin a message, as if it did no harm."""

    data_ranks = 1

    def __init__(
        self, stages, microbatches, queues, in_flight=None, cutover=None, patience=True, *, equals=False,
        held_to_the_end=True, groups=3, beside=lambda rank: False,
    ):  # fmt: skip
        self.beside = beside
        self.stages, self.queues, self.patience, self.equals = stages, QUEUES[queues], patience, equals
        self.ranks = self.data_ranks * stages  # data-major
        self.microbatches = microbatches
        self.cutover = microbatches if cutover is None else cutover
        self.schedule = build("2bw", stages, microbatches, groups, in_flight=in_flight, cutover=self.cutover)
        self.held_to_the_end = held_to_the_end
        self.last = defaultdict(dict)  # rank -> of each stream the kernel that was queued last
        self.queued = defaultdict(deque)  # (rank, queue) -> kernels that hold it up, in order
        self.begun, self.done = set(), set()  # of those that have begun, the ones that are not done
        self.needs = {}  # kernel -> kernels of its own device that must be done before
        self.notices = defaultdict(deque)  # (from, to) -> [when, what] was told and not heard, in order
        self.round = 0
        self.activations = defaultdict(deque)  # held back
        self.gradients = defaultdict(deque)  # not queued yet: [which, whether the stage before knows]
        self.told = defaultdict(set)  # group -> ranks that have told their norms

    def host(self, rank, actions):
        """What a host does; it yields what it waits for, and whether it looks after its neighbours meanwhile."""
        first, last = rank % self.stages == 0, rank % self.stages == self.stages - 1
        for kind, _, microbatch, group, _ in actions:
            at = (group, microbatch)
            if kind is Kind.FORWARD:
                if microbatch == 0 and group > 1:
                    yield from self.finish(rank, group - 2, bank=True)
                if microbatch == self.cutover and group > 0:  # the weights of the update before
                    yield from self.finish(rank, group - 1)
                if not first:
                    yield lambda at=at: (rank, "r", at) in self.needs, True
                self.queue(rank, "compute", ("F", *at), *([] if first else [(rank, "r", at)]))
                if not last:
                    self.activations[rank].append(at)
            elif kind is Kind.BACKWARD:
                if not last:
                    yield lambda at=at: (rank, "R", at) in self.needs, True
                if microbatch == 0:
                    self.settle(rank)
                self.queue(rank, "compute", ("B", *at), *([] if last else [(rank, "R", at)]))
                if not first:
                    self.gradients[rank].append([at, False])
                self.passed(rank, group, microbatch)
            else:
                self.update(rank, group)
            self.offer(rank)
            yield lambda: self.done.issuperset(self.last[rank].values()), False
        yield from self.drain(rank)

    # What an update does, on one data rank: it tells its norms as soon as it begins.

    def update(self, rank, group):
        self.told[group].add(rank)

    def finish(self, rank, group, bank=False):
        yield lambda: len(self.told[group]) == self.ranks, True

    def settle(self, rank):
        pass

    def passed(self, rank, group, microbatch):
        pass

    def drain(self, rank):
        yield from ()

    # The protocol of `in_stream.py`.

    def attend(self, rank):
        """Whether there was anything to do."""
        heard = [notice for other in (rank - 1, rank + 1) for notice in self.take_notices(other, rank)]
        for notice in heard:
            self.hear(rank, *notice)
        return self.offer(rank) or bool(heard)

    def take_notices(self, sender, rank):
        """Those that have had a round to travel."""
        box = self.notices[sender, rank]
        while box and box[0][0] < self.round:
            yield box.popleft()[1:]

    def tell(self, rank, other, notice, at):
        self.notices[rank, other].append((self.round, notice, at))

    def offer(self, rank):
        """Put on its way what has been computed; whether there was anything."""
        moved = False
        while self.activations[rank] and self.is_computed(rank, "F", self.activations[rank][0]):
            self.send(rank)
            moved = True
        for entry in list(self.gradients[rank]):
            if not entry[1] and self.is_computed(rank, "B", entry[0]):
                self.announce(rank, entry)
                moved = True
        return moved

    def is_computed(self, rank, what, at):
        return not self.patience or (rank, "compute", (what, *at)) in self.done

    def send(self, rank):
        at = self.activations[rank].popleft()
        self.queue(rank, "S", at, (rank, "compute", ("F", *at)))
        self.tell(rank, rank + 1, "sent", at)

    def announce(self, rank, entry):
        entry[1] = True
        if self.equals:
            self.send_gradient(rank)
        self.tell(rank, rank - 1, "coming", entry[0])

    def send_gradient(self, rank):
        at, _ = self.gradients[rank].popleft()
        self.queue(rank, "s", at, (rank, "compute", ("B", *at)))

    def hear(self, rank, notice, at):
        if notice == "sent":
            self.queue(rank, "r", at)
        elif notice == "coming":
            self.queue(rank, "R", at)
            self.tell(rank, rank + 1, "ready", at)
        elif not self.equals:
            assert self.gradients[rank][0] == [at, True]
            self.send_gradient(rank)

    def queue(self, rank, name, at, *needs):
        kernel = (rank, name, at)
        last = self.last[rank].get(name)
        self.needs[kernel] = needs if last is None else (*needs, last)
        self.last[rank][name] = kernel
        self.queued[rank, self.queues[name]].append(kernel)
        return kernel

    def together(self, kernel):
        """The kernels that run with this one, itself among them."""
        rank, name, at = kernel
        if name == "D":
            return [(other, name, at) for other in range(rank % self.stages, self.ranks, self.stages)]
        if name == "T":
            return [(0, name, at), (self.stages - 1, name, at)]
        if name == "compute":
            return [kernel]
        place, other = OTHER_HALF[name]
        return [kernel, (rank + place, other, at)]

    def device(self):
        """Do what can be done; whether anything was."""
        moved = False
        for line in list(self.queued.values()):
            while line and line[0] not in self.begun and self.done.issuperset(self.needs[line[0]]):
                self.begun.add(line[0])
                if not self.held_to_the_end:
                    line.popleft()
                moved = True
        for kernel in self.begun:  # in any order: each is done if all that run with it have begun
            if kernel not in self.done and self.begun.issuperset(self.together(kernel)):
                self.done.update(self.together(kernel))
                moved = True
        for line in self.queued.values():
            while line and line[0] in self.done:
                line.popleft()
        self.begun -= self.done
        return moved

    def ends(self):
        """Whether every host gets through its program and every kernel runs."""
        hosts = {rank: self.host(rank, self.schedule.ranks[rank % self.stages]) for rank in range(self.ranks)}
        waits = {rank: next(host) for rank, host in hosts.items()}
        moved = True
        while moved:
            self.round += 1
            moved = self.device() | any(box and box[-1][0] == self.round - 1 for box in self.notices.values())
            for rank in range(self.ranks):
                arrived, attentive = waits.get(rank, (lambda: True, True))  # a drain is attentive
                if attentive or self.beside(rank) or arrived():
                    moved |= self.attend(rank)
                if rank in waits and arrived():
                    moved = True
                    if (following := next(hosts[rank], None)) is None:
                        del waits[rank]
                    else:
                        waits[rank] = following
        left = (self.queued, self.activations, self.gradients, self.notices)
        return not waits and not self.begun and not any(any(each.values()) for each in left)


class Sharded(Model):
    """Two data ranks and a sharded optimizer: an update reduces, tells its norms, steps and gathers.

    The first data rank goes on with its updates whenever it can, the second only where it must. A gather that is put
    off begins at one place of the program on both, when its room has become free. `unordered`: not before the next
    reduction, if that place comes later. `late_room`: on the second data rank the room is free some time later.
    """

    data_ranks = 2

    def __init__(self, *args, unordered=False, late_room=False, **kwargs):
        super().__init__(*args, **kwargs)
        self.unordered, self.late_room = unordered, late_room
        self.spent = defaultdict(lambda: -1)  # the last group whose bank nobody reads any more
        self.pending = defaultdict(deque)  # [group, its steps, what they wait for]
        self.late = defaultdict(deque)  # [group, its kernel once it is queued]: banks that are gathered later
        self.reduced = defaultdict(lambda: -1)
        self.before = defaultdict(list)  # kernels that the next one of the compute stream waits for

    def queue(self, rank, name, at, *needs):
        if name == "compute":
            needs, self.before[rank] = (*needs, *self.before[rank]), []
        return super().queue(rank, name, at, *needs)

    def steps(self, rank, group):
        """An update; it yields (whether that is done, whether only the stream waits)."""
        if not self.unordered:
            for late in self.late[rank]:
                self.start(rank, late)
        last = (rank, "compute", ("B", group, self.microbatches - 1))
        kernel = self.queue(rank, "D", ("reduce", group), last)
        yield lambda: kernel in self.done, True
        self.before[rank].append(kernel)
        self.reduced[rank] = group
        norms = self.queue(rank, "compute", ("norms", group))
        yield lambda: norms in self.done, False
        self.told[group].add(rank)
        yield lambda: len(self.told[group]) == self.ranks, False
        step = self.queue(rank, "compute", ("step", group))
        gathered = self.queue(rank, "D", ("gather", group), step)
        yield lambda: gathered in self.done, True
        self.before[rank].append(gathered)
        if 0 < self.cutover < self.microbatches:  # what was gathered is z; the bank comes when there is room
            self.late[rank].append([group, None])

    def start(self, rank, late):
        group, kernel = late
        late[1] = kernel or self.queue(rank, "D", ("bank", group), (rank, "compute", ("step", group)))

    def go_on(self, rank, force=False):
        """One step of the oldest update, if it need not wait; `force`: the stream may. Whether there was one."""
        pending = self.pending[rank]
        if not pending:
            return False
        arrived, in_stream = pending[0][2] or (lambda: True, True)
        if not (arrived() or (force and in_stream)):
            return False
        pending[0][2] = next(pending[0][1], None)
        if pending[0][2] is None:
            pending.popleft()
        return True

    def update(self, rank, group):
        self.pending[rank].append([group, self.steps(rank, group), None])
        if len(self.pending[rank]) == 1:
            self.go_on(rank)
        self.look(rank)

    def look(self, rank):
        while self.eager(rank) and self.go_on(rank):
            pass
        self.use_room(rank)

    def eager(self, rank):
        return rank < self.stages

    def settle(self, rank):
        while self.pending[rank] and self.reduced[rank] < self.pending[rank][0][0]:
            assert self.go_on(rank, force=True)

    def passed(self, rank, group, microbatch):
        published = all(pending[0] >= group for pending in self.pending[rank])
        if microbatch >= self.cutover - 1 and published and not (self.late_room and rank >= self.stages):
            self.spent[rank] = group
        self.look(rank)

    def use_room(self, rank):
        for late in self.late[rank]:
            if late[0] < self.spent[rank]:
                self.start(rank, late)

    def finish(self, rank, group, bank=False):
        while self.pending[rank] and self.pending[rank][0][0] <= group:
            if not self.go_on(rank, force=True):
                yield self.pending[rank][0][2][0], True
        self.use_room(rank)
        while bank and self.late[rank] and self.late[rank][0][0] <= group:
            late = self.late[rank].popleft()
            self.start(rank, late)
            self.before[rank].append(late[1])

    def drain(self, rank):
        yield from self.finish(rank, len(self.schedule.ranks[0]), bank=True)


class Tied(Sharded):
    """The first and the last stage add up the gradient of a tied weight. The last one's attendant queues its half when
    the first has told that its own is queued. `at_once`: without being told. `by_the_host`: where that goes on with its
    update. `lazy`: ranks that go on with their updates only where they must; the last does so after
    every action."""

    data_ranks = 1

    def __init__(self, *args, at_once=False, by_the_host=False, lazy=(), **kwargs):
        super().__init__(*args, **kwargs)
        self.at_once, self.by_the_host, self.lazy = at_once, by_the_host, lazy
        self.tied_at = {}  # group -> when the first stage told
        self.joins = deque()  # groups whose half is to be queued on the last stage

    def eager(self, rank):
        return rank not in self.lazy

    def settle(self, rank):
        pass  # sums are handed over to the update: the next group's are others

    def steps(self, rank, group):
        half = (rank, "T", group)
        if rank == 0:
            self.tie(rank, group)
            self.tied_at[group] = self.round
        elif rank == self.stages - 1:
            self.joins.append(group)
            if self.at_once:
                self.join()
            elif self.by_the_host:
                yield self.is_told, False
                self.join()
            yield lambda: half in self.needs, False
        if rank in (0, self.stages - 1):
            yield lambda: half in self.done, True
            self.before[rank].append(half)
        norms = self.queue(rank, "compute", ("norms", group))
        yield lambda: norms in self.done, False
        self.told[group].add(rank)
        yield lambda: len(self.told[group]) == self.ranks, False
        self.queue(rank, "compute", ("step", group))

    def tie(self, rank, group):
        self.queue(rank, "T", group, (rank, "compute", ("B", group, self.microbatches - 1)))

    def is_told(self):
        return bool(self.joins) and self.tied_at.get(self.joins[0], self.round) < self.round

    def join(self):
        self.tie(self.stages - 1, self.joins.popleft())

    def attend(self, rank):
        moved = super().attend(rank)
        if rank == self.stages - 1 and not self.by_the_host and self.is_told():
            self.join()
            moved = True
        return moved


@pytest.mark.parametrize("patience", [True, False])
@pytest.mark.parametrize("queues", QUEUES)
@pytest.mark.parametrize("stages", [2, 3, 4, 8])
def test_every_host_and_every_kernel_gets_to_its_end(stages, queues, patience):
    for microbatches in (stages, stages + 1, 2 * stages):
        for in_flight in {None, stages + 1, microbatches, microbatches + 1}:
            if in_flight is None or in_flight >= stages:
                model = Model(stages, microbatches, queues, in_flight, patience=patience)
                assert model.ends(), (microbatches, in_flight)


@pytest.mark.parametrize("patience", [True, False])
@pytest.mark.parametrize("queues", QUEUES)
@pytest.mark.parametrize("stages", [2, 3, 4])
def test_whatever_the_cutover(stages, queues, patience):
    for microbatches in (stages, stages + 1, 2 * stages):
        for cutover in range(microbatches + 1):
            for in_flight in (None, microbatches + 1):
                model = Model(stages, microbatches, queues, in_flight, cutover, patience)
                assert model.ends(), (microbatches, cutover, in_flight)


def order_of(stage, stages, microbatches, depths, cutover):
    """The actions of a stage whose depth is another in every group (`depth_trial.py`): what it has no room for lands
    first."""
    waiting, actions = deque(), []

    def backward():
        group, microbatch = waiting.popleft()
        actions.append(Action(Kind.BACKWARD, stage, microbatch, group, None))
        if microbatch + 1 == microbatches:
            actions.append(Action(Kind.UPDATE, stage, None, group, None))

    for group, depth in enumerate(depths):
        room = warm_up_2bw(stages, microbatches, depth)[stage]
        for microbatch in range(microbatches):
            while len(waiting) > room or (microbatch == cutover and waiting and waiting[0][0] < group):
                backward()
            actions.append(Action(Kind.FORWARD, stage, microbatch, group, None))
            waiting.append((group, microbatch))
            if len(waiting) > room:
                backward()
    while waiting:
        backward()
    return actions


@pytest.mark.parametrize("kind", [Model, Sharded])
@pytest.mark.parametrize("queues", ["streams of their own", "one queue for messages"])
@pytest.mark.parametrize("stages", [2, 3, 4])
def test_however_the_depth_changes_from_group_to_group(stages, queues, kind):
    m = 2 * stages
    for cutover in (1, stages + 1, m):
        for depths in ((stages, m + 1, stages, 2 * stages - 1), (m + 1, stages + 1, m, stages)):
            model = kind(stages, m, queues, cutover=cutover, groups=len(depths))
            orders = [order_of(stage, stages, m, depths, cutover) for stage in range(stages)]
            model.schedule = SimpleNamespace(ranks=orders)
            assert model.ends(), (cutover, depths)


def test_stages_that_disagree_on_a_depth_wait_for_each_other_for_ever():
    """So the model can tell: one stage of three is late with a smaller one."""
    depths, late = (7, 7, 3, 3), (7, 7, 7, 7)
    orders = [order_of(stage, 3, 6, late if stage == 1 else depths, 1) for stage in range(3)]
    model = Model(3, 6, "streams of their own", cutover=1, groups=4)
    model.schedule = SimpleNamespace(ranks=orders)
    assert not model.ends()


@pytest.mark.parametrize(
    "beside", [lambda rank: True, lambda rank: rank % 2 == 1, lambda rank: rank % 2 == 0]
)
@pytest.mark.parametrize("queues", QUEUES)
def test_wherever_an_attendant_goes_on_while_its_host_waits(queues, beside):
    for stages in (2, 3, 4):
        for microbatches in (stages, stages + 1, 2 * stages):
            for cutover in (1, stages, microbatches):
                for in_flight in (None, microbatches + 1):
                    model = Model(stages, microbatches, queues, in_flight, cutover, beside=beside)
                    assert model.ends(), (stages, microbatches, cutover, in_flight)
                    sharded = Sharded(
                        stages, microbatches, queues, in_flight, cutover, beside=beside,
                        held_to_the_end=queues != "one queue for everything",
                    )  # fmt: skip
                    assert sharded.ends(), (stages, microbatches, cutover, in_flight)


def test_the_model_sees_a_circle_where_there_is_one():
    """Gradients that their stage sends of its own accord: two hosts wait for their devices, each of which waits for the
    other's host."""
    assert not Model(2, 3, "streams of their own", equals=True).ends()
    assert not Model(2, 3, "one queue for messages", equals=True).ends()


@pytest.mark.parametrize("queues", QUEUES)
@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_a_sharded_optimizer_closes_no_circle(stages, queues):
    """A kernel that has begun does not hold up its queue; if it did, one queue for everything would not do."""
    for microbatches in (stages, stages + 1, 2 * stages):
        for cutover in range(microbatches + 1):
            for in_flight in (None, microbatches + 1):
                for patience in (True, False):
                    model = Sharded(
                        stages, microbatches, queues, in_flight, cutover, patience,
                        held_to_the_end=queues != "one queue for everything",
                    )  # fmt: skip
                    assert model.ends(), (microbatches, cutover, in_flight, patience)


@pytest.mark.parametrize("queues", QUEUES)
@pytest.mark.parametrize("stages", [2, 3, 4])
def test_a_tied_weight_closes_no_circle(stages, queues):
    for microbatches in (stages, stages + 1, 2 * stages):
        for cutover in range(microbatches + 1):
            for in_flight in (None, microbatches + 1):
                for lazy in ((), range(stages - 1)):
                    model = Tied(
                        stages, microbatches, queues, in_flight, cutover, lazy=lazy,
                        held_to_the_end=queues != "one queue for everything",
                    )  # fmt: skip
                    assert model.ends(), (microbatches, cutover, in_flight, lazy)


def test_the_model_sees_a_tied_weight_that_closes_one():
    """Queued on the last stage without being told, its kernel waits for the first stage's host, which waits for
    gradients of the last, which waits for its device. Left to the last stage's host, it is not queued while that waits
    for activations of the first, which waits for its device."""
    assert not Tied(4, 8, "streams of their own", at_once=True).ends()
    assert not Tied(2, 4, "streams of their own", cutover=2, by_the_host=True).ends()


def test_the_model_sees_gathers_that_are_out_of_place():
    """After a reduction that they belong before; and on one data rank earlier in its program than on another, which
    waits for a neighbour that waits for the first one."""
    assert not Sharded(2, 4, "streams of their own", cutover=3, late_room=True, unordered=True).ends()
    assert Sharded(2, 4, "streams of their own", cutover=3, late_room=True).ends()
    assert not Sharded(3, 4, "streams of their own", cutover=1, late_room=True).ends()


def test_a_copy_under_way_does_not_change_when_a_bank_counts_as_read():
    """One data rank may be copying a checkpoint and the other not: the gather that waits for room begins at one place
    of their programs all the same."""
    for copying in (False, True):
        versions = Versions(nn.Linear(4, 4), Cutover(4, 2, lambda group: False), parks=True)
        versions.release(0)
        versions.targets(1)
        versions.park(1, 0, completed=1, keep=copying)
        assert not versions.is_spent(1)
        versions.park(1, 1, completed=1, keep=copying)
        assert versions.is_spent(1), copying
        assert bool(versions.replica(1).freed) != copying, "what is being copied keeps its memory"
