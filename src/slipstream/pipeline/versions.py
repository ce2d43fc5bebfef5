"""Replicas and a master: which weights each microbatch reads, and where the next ones are written.

The master is the user's module; the optimizer owns it and no forward of training ever reads it. Replicas are
real copies of the module, so that a forward and its backward see one set of tensors and nothing is swapped under
autograd. A microbatch reads what `schedule.staleness.reads` says: z_g through a replica that holds a copy of the
master, or a bank. Invariant: a replica is written only when every group that reads it has finished its last
backward, so `delay + 1` replicas are enough, and one more where a group has an old part and a fresh one and banks are
not the master (b_{g-1}, z_g and b_g are then alive at once).

With `compact` the master has no memory between updates: its upper half is the replica that holds z_g, which is kept for
it whoever reads it (`compact.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from slipstream.lists import copy_, round_into
from slipstream.pipeline.checks import refuse_changed_buffers
from slipstream.pipeline.compact import Compact
from slipstream.pipeline.replica import (
    Part,
    Prepare,
    Replica,
    blank_like,
    caches,
    check_replicas,
    copied,
    copy_fixed,
    make_replica,
)
from slipstream.schedule.cutover import Cutover
from slipstream.schedule.staleness import Read, reads
from slipstream.torch_late import is_dtensor

THE_MASTER: Part = (-1, True)  # reads the replica that is its upper half


@dataclass(frozen=True)
class Target:
    """A replica to write when z_index is ready, and whether it takes the master or the (corrected) bank."""

    replica: Replica
    read: Read


class Versions:
    """The weights of one stage: `master`, and a replica for each part of a group that is under way.

    `looks_ahead`: the correction writes something else than the master into a bank. `parks`: a replica that nothing
    reads any more gives its memory back until it is written again. Three replicas are then no more than two: when the
    third is written the gradients of the update that wrote it are spent and gone, and as large.
    """

    def __init__(
        self,
        master: nn.Module,
        cutover: Cutover,
        *,
        delay: int = 1,
        looks_ahead: bool = True,
        bank_dtype: torch.dtype | None = None,
        prepare: Prepare | None = None,
        ready: Sequence[nn.Module] | None = None,
        parks: bool = False,
    ) -> None:
        """`ready`: the replicas themselves, laid out as the master is; else they are copies of it, each prepared before
        the next is made, so that one that is to be sharded is never whole beside another."""
        self.module = master
        self.delay = delay
        self.cutover = cutover
        self._one_kind = cutover.mixed and not looks_ahead  # a bank is the master: they share a replica
        self.names = [name for name, p in master.named_parameters() if p.requires_grad]
        self.prefix = ""  # of names in a state: where stages call different weights by one name
        not_saved = caches(master)  # here, under their own names: `prepare` may wrap layers
        without_values = ready is not None or any(p.is_meta for p in master.parameters())
        count = delay + 2 if cutover.mixed and looks_ahead else delay + 1
        self.replicas = (
            [make_replica(copied(master), bank_dtype, prepare) for _ in range(count)]
            if ready is None
            else [make_replica(module, None, None) for module in ready]
        )
        self.master = make_replica(master, None, prepare)
        check_replicas(self.master, self.replicas, count, bank_dtype if ready is not None else None)
        if without_values:
            for replica in self.replicas:
                copy_fixed(self.master.module, replica.module)
        self.owned = list(range(len(self.names)))  # fewer where the optimizer is sharded
        self.compact: Compact | None = None
        self.partial = False  # the master holds what is owned, and nothing for the rest
        self.lost = False  # nor that any more
        self._reading: dict[Part, Replica] = {}
        self.buffers = [name for name, _ in master.named_buffers() if name not in not_saved]
        self._unchecked = [name for name in self.buffers if name not in caches(master)]
        # FSDP2 keeps views of its shards' memory; those are small.
        cut = any(is_dtensor(p) for p in self.master.parameters)
        alone = all(replica.owns_memory for replica in self.replicas)
        self.parks = parks and len(self.replicas) > delay + 1 and not cut and alone
        self.targets(0)
        self.spread()

    def spread(self) -> None:
        """Before the first group: every replica that is read as the master is."""
        for replica in self.replicas:
            if self.parks and not replica.readers:
                replica.free()
            else:
                replica.allocate()
                round_into(replica.weights, self.master.weights)

    def reads(self, group: int, microbatch: int) -> Read:
        """What a microbatch reads: the master or the bank of an index."""
        return reads(group, microbatch, self.cutover, self.delay)

    def parts(self, group: int) -> list[tuple[Part, Read]]:
        """The parts of a group that have a microbatch, and what each reads; banks that are the master go as it."""
        old, count = self.cutover(group), self.cutover.microbatches
        firsts = [
            (fresh, first) for fresh, first, end in ((False, 0, old), (True, old, count)) if first < end
        ]
        return [((group, fresh), self._kind(self.reads(group, first))) for fresh, first in firsts]

    def _kind(self, read: Read) -> Read:
        # b_0 is z_0, so the readers of both share a replica.
        return Read("master", read.index) if read.index == 0 or self._one_kind else read

    def replica(self, group: int, microbatch: int = 0) -> Replica:
        """The replica that a microbatch of `group` reads; it has been published."""
        return self._reading[group, microbatch >= self.cutover(group)]

    def release(self, group: int) -> None:
        """The last backward of `group` is done: nothing of it reads its replicas any more."""
        for part in ((group, False), (group, True)):
            replica = self._let_go(part)
            if replica is not None:
                refuse_changed_buffers(self._unchecked, self.module, replica.module)
        self._unchecked = []  # the first group tells

    def _let_go(self, part: Part) -> Replica | None:
        replica = self._reading.pop(part, None)
        if replica is not None:
            replica.readers.discard(part)
        return replica

    def make_compact(self) -> None:
        """Before the first group: the master gives its memory back."""
        holds_z = next(iter(self._reading.values()))  # they all do
        self.compact = Compact(self.master, self.owned, holds_z)
        self._reading[THE_MASTER] = holds_z
        holds_z.readers.add(THE_MASTER)
        self.partial = True

    def targets(self, index: int) -> list[Target]:
        """Where z_index and b_index go, and note their readers. Called once for each index, in order. A replica that
        was freed has yet to be allocated: whoever writes it knows when."""
        wanted: dict[Read, list[Part]] = {}
        if self.compact is not None:
            self._let_go(THE_MASTER)
            wanted[Read("master", index)] = [THE_MASTER]
        for group in range(index, index + self.delay + 1):
            for part, read in self.parts(group):
                if read.index == index:
                    wanted.setdefault(read, []).append(part)
        return [self._assign(read, parts) for read, parts in wanted.items()]

    def _assign(
        self,
        read: Read,
        parts: Sequence[Part],
        replica: Replica | None = None,
        taken: Sequence[Replica] = (),
    ) -> Target:
        """`replica`: the one to take; else one that has no readers and is not among `taken`."""
        # Banks from the front and masters from the back: each kind keeps its replicas, and what is recorded of them.
        order = self.replicas if read.kind == "bank" else reversed(self.replicas)
        if replica is None:
            replica = next(r for r in order if not r.readers and not any(r is other for other in taken))
        replica.readers.update(parts)
        replica.spent = False
        for part in parts:
            self._reading[part] = replica
        return Target(replica, read)

    def park(self, group: int, microbatch: int, completed: int, keep: bool = False) -> None:
        """The backward of a microbatch is done: free the replicas that no later one reads.

        A group's bank stays until the update before it is `completed`: a state captured then has to have it; and while
        such a state is being copied (`keep`), though it is spent: that is the same on all data ranks, at any speed.
        """
        if not self.parks:
            return
        for replica in self.replicas:
            if replica.readers and all(
                self._is_done(part, group, microbatch) and completed >= part[0] for part in replica.readers
            ):
                replica.spent = True
                if not keep:
                    replica.free()

    def is_spent(self, group: int) -> bool:
        """Whether nothing reads the bank of a group any more."""
        replica = self._reading.get((group, False))
        return replica is None or replica.spent

    def _is_done(self, part: Part, group: int, microbatch: int) -> bool:
        if part == THE_MASTER:
            return False
        last = self.cutover.microbatches if part[1] else self.cutover(part[0])
        return (part[0], last - 1) <= (group, microbatch)

    def banks(self) -> dict[int, Replica]:
        """The replica of each group that has its weights and is not finished; of two parts the old one's.

        What the fresh part of such a group reads is the master.
        """
        reading = {part: replica for part, replica in self._reading.items() if part != THE_MASTER}
        found = {group: replica for (group, fresh), replica in reading.items() if fresh}
        return found | {group: replica for (group, fresh), replica in reading.items() if not fresh}

    def in_use(self) -> list[Replica]:
        """The replicas that are read, in the order of what they hold: the same order on all data ranks."""
        return list({id(replica): replica for replica in self._reading.values()}.values())

    def apart(self, boundary: int) -> dict[int, Replica]:
        """A replica for each group from `boundary` on, shared with no other; what is not published yet has one too.

        Only at rest: a group in flight must not change its replica.
        """
        found: dict[int, Replica] = {}
        for group in range(boundary, boundary + self.delay + 1):
            replica = self.banks().get(group)
            taken = [id(other) for other in found.values()]
            if replica is None or id(replica) in taken:
                free = next((r for r in self.replicas if not r.readers and id(r) not in taken), None)
                if free is None:  # its two parts read them all; what is published later has no place yet
                    assert replica is None, f"group {group} has no replica of its own"
                    free = blank_like(self.replicas[0])
                free.allocate()
                if replica is not None:
                    copy_(free.weights, replica.weights)
                    self._move(group, replica, free)
                replica = free
            found[group] = replica
        return found

    def _move(self, group: int, source: Replica, target: Replica) -> None:
        for part in ((group, False), (group, True)):
            if self._reading.get(part) is source:
                source.readers.discard(part)
                target.readers.add(part)
                target.spent = False
                self._reading[part] = target

    def restore(self, weights: dict[Part, dict[int, Tensor]]) -> None:
        """Take saved weights (parameter -> tensor), by the part that reads them; parts that share them share a replica.

        They may be a replica's own memory, loaded in place: they stay where they are.
        """
        for replica in self.replicas:
            replica.readers.clear()
        self._reading = {}
        shared: dict[int, list[Part]] = {}
        for part, tensors in weights.items():
            shared.setdefault(id(tensors), []).append(part)
        own = {
            parts[0]: replica
            for parts in shared.values()
            for replica in self.replicas
            if _same_memory(replica.weights, weights[parts[0]])
        }
        for parts in shared.values():
            kind = "master" if all(fresh for _, fresh in parts) else "bank"
            others = [replica for part, replica in own.items() if part != parts[0]]
            replica = self._assign(Read(kind, 0), parts, own.get(parts[0]), others).replica
            replica.allocate()
            tensors = weights[parts[0]]
            round_into([replica.weights[i] for i in tensors], list(tensors.values()))
        if self.compact is not None:
            self.compact.take(weights[THE_MASTER], self._reading[THE_MASTER])
        for replica in self.replicas if self.parks else ():
            if not replica.readers:
                replica.free()


def _same_memory(weights: Sequence[Tensor], bank: dict[int, Tensor]) -> bool:
    pairs = [(weights[i], tensor) for i, tensor in bank.items() if tensor.numel()]
    return bool(pairs) and all(own.data_ptr() == tensor.data_ptr() for own, tensor in pairs)
