"""Jobs for worker processes: the cutover on real ranks, several cases in one visit."""

from importlib import import_module

import torch

from pipeline import jobs, tiny
from slipstream import UserError, cloned_state
from slipstream.optim import build
from slipstream.pipeline.versions import Versions

M, ROWS, GROUPS = 6, 12, 7


def muon(module):
    return build("muon", module, lr=3e-2)


def narrow_muon(module):
    return build("muon", module, lr=3e-2, state_dtype="bfloat16")


def swings(group):
    return (0, 5, 2, 6, 3, 1, 4)[group % 7]


OPTIMIZERS = {**tiny.OPTIMIZERS, "muon": muon}
CLIP = 0.1


def cases_at(stages):
    """Each optimizer, with error feedback and clipping and with neither: c = 0, 1, P-1, P+1, m-1, m and one that
    changes with the group. With one of the two, and with another look-ahead: one that changes."""
    fixed = sorted({0, 1, max(stages - 1, 0), min(stages + 1, M), M - 1, M})
    ways = [
        ({"correction": "error_feedback", "max_grad_norm": CLIP}, [*fixed, swings]),
        ({"correction": "none"}, [*fixed, swings]),
        ({"correction": "error_feedback"}, [swings]),
        ({"correction": "none", "max_grad_norm": CLIP}, [swings]),
    ]
    cases = [
        {"optimizer": optimizer, **way, "cutover": cutover}
        for optimizer in OPTIMIZERS.values()
        for way, cutovers in ways
        for cutover in cutovers
    ]
    ahead = {"optimizer": tiny.momentum, "correction": "momentum_prediction", "in_flight": 5}
    deep = [{**ahead, "cutover": cutover} for cutover in (2, swings)] if stages > 1 else []
    return [*cases, *deep]


def length(case):
    """A cutover that is always the same has used each of its three replicas twice by the fifth group."""
    return GROUPS if case["cutover"] is swings else 5


def many(world, cases):
    """The losses and weights of each case, in one process after another."""
    return [one(world, groups=range(length(case)), **case) for case in cases]


def one(world, groups=range(GROUPS), state=None, snapshot=None, poisoned=None, m=M, **options):
    schedule = jobs.build(world, m=m, **options)
    taken = []
    if snapshot is not None:
        schedule.after_update = lambda g: (
            taken.append(cloned_state(schedule.capture())) if g == snapshot else None
        )
    if state is not None:
        schedule.load_state_dict(state)
    plain, count = schedule.loss_fn, 0

    def bad(output, target):
        nonlocal count
        count += 1
        return plain(output, target) * (float("nan") if (count - 1) // m == poisoned else 1.0)

    schedule.loss_fn = bad if poisoned is not None else plain
    losses = [loss for group in groups for loss in jobs.step(world, schedule, group, rows=ROWS)]
    state = cloned_state(schedule.state_dict())
    result = {
        "losses": losses,
        "weights": jobs.weights(schedule),
        "evaluated": [],
        "state": state,
        "taken": taken[0] if taken else None,
        "skipped": schedule.skipped,
    }
    schedule.close()  # its groups would wake until they are collected, many cases later
    return result


def parked(world, cases):
    """As `many`; and the fewest replicas that held any memory."""
    least = 3

    def held(self):
        return sum(not replica.freed for replica in self.replicas)

    begun = Versions.park

    def watched(self, *args, **options):
        nonlocal least
        begun(self, *args, **options)
        least = min(least, held(self))

    Versions.park = watched
    try:
        return [(one(world, **case), least) for case in cases]
    finally:
        Versions.park = begun


def compact(world, cases):
    """As `many`, each with a master in halves and in many buckets."""
    module = import_module("slipstream.pipeline.compact")
    before = module.BUCKET_ELEMENTS, module.MOST_BUCKETS
    module.BUCKET_ELEMENTS, module.MOST_BUCKETS = 300, 1000
    try:
        return [one(world, groups=range(length(case)), compact_master=True, **case) for case in cases]
    finally:
        module.BUCKET_ELEMENTS, module.MOST_BUCKETS = before


class Copying:
    """A copy of the live state on another stream, as an event tells of it: done when `done` is set, or waited for."""

    done = False

    def query(self):
        return self.done

    def wait(self, *stream):
        self.done = True


def copied_late(world, **options):
    """Whether what was captured stays until its copy is done: for a whole group, but for the update."""
    schedule = jobs.build(world, m=M, cutover=2, **options)
    copying, kept = Copying(), []

    def capture(group):
        if group == 3:
            state = schedule.capture()
            kept.extend((bank[name], bank[name].clone()) for bank in state["banks"].values() for name in bank)
            schedule.hold(copying)

    def held():
        return all(t.untyped_storage().nbytes() and torch.equal(t, before) for t, before in kept)

    schedule.after_update = capture
    seen = []
    begun = Versions.park

    def watched(self, group, microbatch, completed, keep=False):
        begun(self, group, microbatch, completed, keep)
        if kept and not copying.done:
            seen.append(held())

    Versions.park = watched
    try:
        for group in range(6):
            jobs.step(world, schedule, group, rows=ROWS)
        schedule.drain()
    finally:
        Versions.park = begun
    return seen


def unread(world, **options):
    """What is said to those who look for the weights of a compact master in its module."""
    schedule = jobs.build(world, m=M, compact_master=True, **{**options, "cutover": 2})
    module = schedule._versions.module
    told = []
    for look in (lambda: schedule.master, module.state_dict):
        try:
            look()
        except UserError as error:
            told.append(str(error))
    with schedule.gathered_master() as master:
        assert all(p.isfinite().all() for p in master.state_dict().values())
    assert len(told) == 2
    return told


def default(world):
    """The cutover of a schedule that is given none, with as many microbatches as M."""
    schedule = jobs.build(world, m=M, cutover=None)
    return [schedule.cutover(group) for group in range(3)]


def order(world, cutover, in_flight=None, groups=4):
    schedule = jobs.build(world, m=M, tied=False, cutover=cutover, in_flight=in_flight)
    schedule.trace(True)
    for group in range(groups):
        jobs.step(world, schedule, group, rows=ROWS)
    schedule.drain()
    return [tuple(span.action) for span in schedule.take_trace()]


def lose(world, cutover):
    """Rank 1 dies while the others wait for the update at their cutover."""
    import os
    import signal

    schedule = jobs.build(world, m=M, cutover=cutover, timeout=4)
    for group in range(6):
        if world.rank == 1 and group == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        jobs.step(world, schedule, group, rows=ROWS)
    torch.distributed.barrier()


def closed(world, **options):
    """Whether the module that a closed schedule leaves holds the weights it had, and can be saved."""
    schedule = jobs.build(world, m=M, compact_master=True, **{**options, "cutover": 2})
    for group in range(3):
        jobs.step(world, schedule, group, rows=ROWS)
    expected, module = jobs.weights(schedule), schedule._versions.module
    schedule.close()
    assert all(p.untyped_storage().nbytes() for p in module.parameters()), "freed memory would be read"
    assert schedule.master is module
    found = module.state_dict()
    return all(torch.equal(found[name], weight) for name, weight in expected.items())


def reloaded(world, **options):
    """A capture of a compact master, loaded as it is, right where it was taken."""
    schedule = jobs.build(world, m=M, cutover=2, compact_master=True, **options)
    for group in range(3):
        jobs.step(world, schedule, group, rows=ROWS)
    schedule.drain()
    before = jobs.weights(schedule)
    schedule.load_state_dict(schedule.capture())
    after = jobs.weights(schedule)
    return all(torch.equal(after[name], weight) for name, weight in before.items())
