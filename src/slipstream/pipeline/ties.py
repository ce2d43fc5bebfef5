"""The gradient of a tied weight, added up by the stages that hold it.

Where devices wait, the kernel of a later stage would stand there until the first stage has made its gradient, for P-1
microbatches: it is queued when the first holder has told that its own is. From then on the first one's device waits for
the later one's host, which must not wait for the first one's in turn, for its next activation say. So the later one's
attendant queues it (`attendant.py`; `in_stream.py` says why, `tests/pipeline/test_waits.py` shows the circle). An
update after which a stage owes nobody anything, as in a synchronous run, can close no circle and needs no attendant.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from slipstream.distributed import wires
from slipstream.distributed.groups import Group, Groups, Wait
from slipstream.pipeline.attendant import Attendant
from slipstream.pipeline.host_sum import PeerLost
from slipstream.pipeline.peers import Steps, waiting

TIE_BLOCKS = 4  # a communicator takes memory for each; the sum is not in a hurry
_LOOK_SECONDS = 0.0005


class TieGroup:
    """`ranks`: of one pipeline, those that hold a tied weight, by stage."""

    def __init__(self, name: str, ranks: Sequence[int], groups: Groups, timeout_seconds: float) -> None:
        where = f"tie/{'-'.join(str(rank) for rank in ranks)}/{name}"
        self.group = groups.device(where, ranks, blocks=TIE_BLOCKS)
        self._others = ranks[1:] if self.group.rank == 0 else ranks[:1]
        self._scope, self._timeout_seconds = groups.scope.under(where), timeout_seconds
        self._wires: dict[int, wires.Wire] = {}
        self._attendant: Attendant | None = None
        self._joins: deque[_Join] = deque()  # this rank's parts that are not queued yet
        self._told = 0  # parts of the first holder that are queued, and this rank's not

    def attend(self, attendant: Attendant) -> None:
        """From now on `attendant` queues this rank's parts, if others begin. All holders call this together."""
        self._wires = wires.connect(self._scope, dist.get_rank(), self._others, self._timeout_seconds)
        if self.group.rank > 0:
            self._attendant = attendant
            self._side = torch.cuda.Stream(attendant.device)
            attendant.more_wires += self._wires.values()
            attendant.duties.append(self.join)
            attendant.ring()

    def all_reduce(self, tensor: Tensor) -> Steps:
        if self._attendant is not None:
            join = _Join(tensor)
            self._joins.append(join)
            self._attendant.ring()
            yield join
            assert join.work is not None
            yield waiting(join.work, self.group, self._timeout_seconds)
            return
        work = self.group.all_reduce(tensor)
        for wire in self._wires.values():
            wire.send(b"")
        yield waiting(work, self.group, self._timeout_seconds)

    def join(self) -> bool:
        """In the attendant's thread: queue what the first holder has told of; whether it waits for the device."""
        (first,) = self._wires.values()
        while first.receive() is not None:
            self._told += 1
        while self._told and self._joins and self._joins[0].computed.query():
            self._told -= 1
            self._joins.popleft().queue(self.group, self._side)
        if self._joins and not self._told and first.gone:
            self._joins.popleft().lost = f"{first} {first.loss}"
        return bool(self._told and self._joins)

    def close(self) -> None:
        for wire in self._wires.values():
            wire.close()
        self._joins.clear()


class _Join:
    """A part that is to be queued; complete when it is."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self.computed = torch.cuda.Event()
        self.computed.record(torch.cuda.current_stream(tensor.device))
        self.work: Wait | None = None
        self.lost = ""

    def queue(self, group: Group, side: torch.cuda.Stream) -> None:
        with torch.cuda.stream(side):
            side.wait_event(self.computed)
            self.work = group.all_reduce(self._tensor)

    def is_completed(self) -> bool:
        if self.lost:
            raise PeerLost(self.lost)
        return self.work is not None

    def wait(self) -> None:
        while not self.is_completed():
            time.sleep(_LOOK_SECONDS)
