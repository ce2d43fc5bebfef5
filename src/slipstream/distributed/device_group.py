"""A process group for ranks that share one GPU: `dist.init_process_group("slipstream")`.

NCCL refuses two ranks on one GPU, and gloo only sends from host memory. Here CUDA tensors travel through rings in the
GPU's own memory (`ring.py`), one for each pair of ranks and direction, made when first used; CPU tensors go to a gloo
group inside. So everything written for `torch.distributed`, torch's own pipeline schedules among it, runs unchanged
on several ranks of one GPU. A send never waits for its receiver. A receive waits, host to host, for the sender to have
queued its part, and orders the device behind it; nothing waits for the device.

The collectives are what a pipeline needs: sums, broadcasts and gathers, made of sends and receives to every peer and
added up in the order of the ranks, so that all ranks get the same bits. Others fall to gloo's own CUDA support.

Where CUDA IPC cannot be had the same group sends through shared host memory: `slipstream_staged`.
"""

from __future__ import annotations

import base64
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, ClassVar
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor

from slipstream.distributed.ring import Door, RingReader, RingWriter, socket_folder
from slipstream.distributed.slots import DeviceSlots, HostSlots, SlotMaker
from slipstream.torch_private import serve_with

SHARED, STAGED = "slipstream", "slipstream_staged"  # the names of the backends
SLOTS: dict[str, SlotMaker] = {SHARED: DeviceSlots, STAGED: HostSlots}  # where each keeps what travels


def register(name: str, maker: SlotMaker, carried: str = "cuda") -> None:
    """Make the backend `name` known to torch; `carried`: the type of device whose tensors take the rings."""
    if not hasattr(dist.Backend, name.upper()):
        dist.Backend.register_backend(
            name, partial(DeviceGroup, maker=maker, carried=carried), devices=["cpu", "cuda"]
        )


def register_backends() -> None:
    """Make `slipstream` and `slipstream_staged` known to `torch.distributed`: groups of ranks that share one GPU."""
    for name, maker in SLOTS.items():
        register(name, maker)


def can_share(store: dist.Store, rank: int, size: int, device: torch.device) -> bool:
    """Whether each rank can read what its neighbour keeps on the device: tried out, one answer for all ranks."""
    written = torch.tensor([rank], device=device)
    slots, exported = None, b""
    try:
        slots = DeviceSlots.make(1, written.nbytes, device)
        slots.write(0, written, again=False)
        exported, _ = slots.handles()
    except (RuntimeError, OSError):  # told by sending nothing
        pass
    store.set(f"share/{rank}", base64.b64encode(exported).decode())
    neighbour = (rank + 1) % size
    found = torch.full_like(written, -1)
    try:
        DeviceSlots.open(base64.b64decode(store.get(f"share/{neighbour}")), []).read(0, found)
        opened = found.item() == neighbour
    except (RuntimeError, OSError, EOFError):
        opened = False
    store.set(f"shared/{rank}", "yes" if opened else "no")
    answers = [store.get(f"shared/{other}") for other in range(size)]
    del slots  # no earlier: a neighbour was reading it
    return all(answer == b"yes" for answer in answers)


class DeviceGroup(dist.ProcessGroup):
    """One rank of such a group. Created by torch, in `init_process_group` and `new_group`.

    A ring's events must outlive what the other rank's device has queued on them, so ranks shut their groups down
    together, when all devices have settled (`world.py`).

    What it does not do itself it asks of gloo, never of `super()`: there torch keeps the interpreter's lock while it
    waits for gloo's thread, and that thread needs the lock to let go of an earlier tensor.
    """

    alive: ClassVar[WeakSet[DeviceGroup]] = WeakSet()  # of this process: whoever leaves has to close them all

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        timeout: timedelta,
        *,
        maker: SlotMaker,
        carried: str,
    ) -> None:
        super().__init__(rank, size)  # pyrefly: ignore[missing-argument, bad-argument-type]  # the form a subclass has to use
        gloo = dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, size, timeout=timeout)
        serve_with(self, gloo)
        self.gloo: Any = gloo  # torch's stubs do not list its collectives
        self._store = store
        self.timeout_seconds = timeout.total_seconds()
        self._maker = maker
        self._carried = carried
        self._folder = socket_folder()
        self._door = Door(self._folder.name)
        self._writers: dict[int, RingWriter] = {}
        self._readers: dict[int, RingReader] = {}
        self._posted: dict[int, deque[_Receive]] = {}
        store.set(f"door/{rank}", self._door.path)
        DeviceGroup.alive.add(self)

    def getBackendName(self) -> str:
        return SHARED

    # Point to point ---------------------------------------------------------------------------------------

    def send(self, tensors: list[Tensor], dstRank: int, tag: int) -> dist.Work:
        if not self._carries(tensors):
            return self.gloo.send(tensors, dstRank, tag)
        try:
            for tensor in tensors:
                self._writer(dstRank).send(tensor)
        except OSError as error:
            return _Done(lost(error))
        return _Done()

    def recv(self, tensors: list[Tensor], srcRank: int, tag: int) -> dist.Work:
        if not self._carries(tensors):
            return self.gloo.recv(tensors, srcRank, tag)
        return _Together([self._post(tensor, srcRank) for tensor in tensors])

    # Collectives ------------------------------------------------------------------------------------------
    # Torch's stubs list several overloads of each; these methods are the one that torch.distributed calls.

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:  # pyrefly: ignore[bad-override]
        if not self._carries(tensors) or opts.reduceOp != dist.ReduceOp.SUM:
            return self.gloo.allreduce(tensors, opts)
        (tensor,) = tensors
        for rank in self._others():
            self.send([tensor], rank, 0)  # a rank that is gone is told by what does not come from it
        return self._summed(tensor)

    def reduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:  # pyrefly: ignore[bad-override]
        if not self._carries(tensors) or opts.reduceOp != dist.ReduceOp.SUM:
            return self.gloo.reduce(tensors, opts)
        (tensor,) = tensors
        if self.rank() != opts.rootRank:
            return self.send(tensors, opts.rootRank, 0)
        return self._summed(tensor)

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:  # pyrefly: ignore[bad-override]
        if not self._carries(tensors):
            return self.gloo.broadcast(tensors, opts)
        if self.rank() != opts.rootRank:
            return self.recv(tensors, opts.rootRank, 0)
        return _Together([self.send(tensors, rank, 0) for rank in self._others()])

    def allgather(  # pyrefly: ignore[bad-override]
        self, output_tensors: list[list[Tensor]], input_tensors: list[Tensor], opts: Any = None
    ) -> dist.Work:
        if not self._carries(input_tensors):
            return self.gloo.allgather(output_tensors, input_tensors, opts)
        (outputs,), (tensor,) = output_tensors, input_tensors
        outputs[self.rank()].copy_(tensor)
        sent = [self.send([tensor], rank, 0) for rank in self._others()]
        return _Together([*sent, *(self._post(outputs[rank], rank) for rank in self._others())])

    def _summed(self, tensor: Tensor) -> dist.Work:
        """The sum of this rank's tensor and one from each of the others, which are expected from now on."""
        parts = {
            rank: self._post(torch.empty_like(tensor, requires_grad=False), rank) for rank in self._others()
        }

        def add() -> None:
            # In the order of the ranks on every one of them, into what rank 0 told; a part goes once it is added.
            own = tensor.detach()
            total = own if self.rank() == 0 else parts.pop(0).out
            for rank in range(1, self.size()):
                total += own if rank == self.rank() else parts.pop(rank).out
            if total is not own:
                own.copy_(total)

        return _Together(list(parts.values()), add)

    def _others(self) -> list[int]:
        return [rank for rank in range(self.size()) if rank != self.rank()]

    # Rings ------------------------------------------------------------------------------------------------

    def _carries(self, tensors: Sequence[Tensor]) -> bool:
        return tensors[0].device.type == self._carried

    def _post(self, out: Tensor, rank: int) -> _Receive:
        receive = _Receive(self, rank, out)
        self._posted.setdefault(rank, deque()).append(receive)
        return receive

    def complete(self, receive: _Receive, seconds: float | None) -> None:
        """Receive, in order, up to and with `receive`; `seconds` None: only what is there already."""
        posted = self._posted[receive.source]
        while not receive.done:
            if seconds is None and not self._arrived(receive.source):
                return
            first = posted.popleft()
            try:
                limit = self.timeout_seconds if seconds is None else seconds
                self._reader(first.source, limit).receive(first.out, limit)
            except OSError as error:  # TimeoutError among them
                first.error = lost(error)
            first.done = True
            if first.error is not None and first is not receive:
                receive.error, receive.done = first.error, True

    def _arrived(self, rank: int) -> bool:
        while rank not in self._readers and self._door.waiting():
            self._admit(self.timeout_seconds)
        return rank in self._readers and self._readers[rank].ready()

    def _writer(self, rank: int) -> RingWriter:
        if rank not in self._writers:
            wire = self._door.knock(self._store.get(f"door/{rank}").decode(), self.rank())
            self._writers[rank] = RingWriter(wire, self._maker, self.timeout_seconds)
        return self._writers[rank]

    def _reader(self, rank: int, seconds: float) -> RingReader:
        while rank not in self._readers:
            self._admit(seconds)
        return self._readers[rank]

    def _admit(self, seconds: float) -> None:
        rank, wire = self._door.admit(seconds)
        self._readers[rank] = RingReader(wire, self._maker)

    def hang_up(self) -> None:
        """Close every wire, so that no rank waits for this one any more. The rings' memory stays until `shutdown`."""
        for end in [*self._writers.values(), *self._readers.values()]:
            end.hang_up()
        self._door.close()

    def shutdown(self) -> None:
        self.hang_up()
        self._writers.clear()
        self._readers.clear()
        self._folder.cleanup()
        self.gloo.shutdown()


def _asked_of_gloo(name: str) -> Callable[..., dist.Work]:
    return lambda group, *args, **kwargs: getattr(group.gloo, name)(*args, **kwargs)


for _name in (
    "all_gather_single",  # the names with "single" are of torch 2.15
    "all_gather_single_coalesced",
    "all_to_all_single",
    "allgather_coalesced",
    "allreduce_coalesced",
    "alltoall",
    "alltoall_base",
    "barrier",
    "gather",
    "gather_single",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "scatter",
):
    if hasattr(dist.ProcessGroupGloo, _name):
        setattr(DeviceGroup, _name, _asked_of_gloo(_name))


class _Done(dist.Work):
    """A send: it has been queued, or it failed."""

    def __init__(self, error: Exception | None = None) -> None:
        super().__init__()
        self._error = error

    def is_completed(self) -> bool:
        return True

    def wait(self, timeout: timedelta | None = None) -> bool:
        if self._error is not None:
            raise self._error
        return True


class _Receive(dist.Work):
    """A receive that has been posted."""

    def __init__(self, group: DeviceGroup, source: int, out: Tensor) -> None:
        super().__init__()
        self._group = group
        self.source = source
        self.out = out
        self.done = False
        self.error: Exception | None = None

    def is_completed(self) -> bool:
        self._group.complete(self, None)
        return self.done

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._group.complete(self, timeout.total_seconds() if timeout else self._group.timeout_seconds)
        if self.error is not None:
            raise self.error
        return True


class _Together(dist.Work):
    """Several of them, and what is done when all are there."""

    def __init__(self, parts: Sequence[Any], then: Callable[[], None] | None = None) -> None:
        super().__init__()
        self._parts = parts
        self._then = then

    def is_completed(self) -> bool:
        return all(part.is_completed() for part in self._parts)

    def wait(self, timeout: timedelta | None = None) -> bool:
        for part in self._parts:
            part.wait(timeout)
        self._parts, part = (), None  # so that `then` can let go of them one by one
        if self._then is not None:
            self._then()
            self._then = None
        return True


def lost(error: OSError) -> Exception:
    """What torch's own groups raise when a peer is gone or silent."""
    return dist.DistNetworkError(str(error))
