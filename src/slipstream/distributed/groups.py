"""The process groups of one schedule: made when it is made, in one agreed order, and given back when it is closed.

Torch names a new group by how many groups a rank happens to have made, so that ranks with different histories wait
for each other for ever. Here the ranks first agree on a word (`Scope`), and every group is a backend of torch's own
under that word and a name. Nothing is entered into torch's tables, so closing a schedule leaves no trace of it.

Which backend carries a device's tensors is asked of the group that the user made (`carrier`).
"""

from __future__ import annotations

import atexit
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import count
from typing import Any, ClassVar, Literal, Protocol
from weakref import WeakMethod, WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from slipstream.distributed.device_group import SLOTS, DeviceGroup
from slipstream.errors import UserError
from slipstream.torch_private import default_store

# Torch's own watchdog ends a process without a word of ours: it gets its turn well after our timeout.
WATCHDOG_GRACE_SECONDS = 120.0
Way = Literal["forward", "backward"]  # from the stage before to the stage behind, and back
# Thread blocks of one kernel: each holds a multiprocessor while it waits, so those of all ranks of a GPU must fit, with
# room for whatever they wait for. Where a rank has a GPU to itself, NCCL chooses for collectives.
LINK_CTAS = 1
SHARED_GPU_CTAS = 2
PROBE_ELEMENTS = (1, 1 << 22)  # a norm, a gradient


def shares_gpus() -> bool:
    """Whether NCCL, from 2.30 on, was told that several ranks may be on one GPU."""
    return os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"


def carrier(group: dist.ProcessGroup | None, device: torch.device) -> str:
    """The backend that carries tensors of `device` in a user's group: "gloo", "nccl", or one of ours."""
    if device.type == "cpu":
        return "gloo"  # whatever else the group may do, and also where it carries nothing but CUDA tensors
    config = dist.get_backend_config(group)
    pairs = dict(entry.split(":", 1) for entry in config.split(",") if ":" in entry)
    found = pairs.get(device.type, config if not pairs else None)
    if found is None or found not in ("gloo", "nccl", *SLOTS):
        raise UserError(
            f"The process group carries {device.type} tensors over {found or 'nothing'} ({config}). Give the stage "
            "a group made with nccl, or with cpu:gloo,cuda:nccl."
        )
    return found


@dataclass(frozen=True)
class Scope:
    """A part of the default store that the ranks of one schedule have for themselves."""

    store: dist.Store

    @classmethod
    def handshake(cls, groups: Sequence[dist.ProcessGroup | None]) -> Scope:
        """The word of the first rank, passed on along each of `groups`: the pipeline, then what joins pipelines."""
        word = uuid.uuid4().hex
        for group in groups:
            words: list[Any] = [None] * dist.get_world_size(group)
            dist.all_gather_object(words, word, group=group)
            word = words[0]
        return cls(dist.PrefixStore(f"slipstream/{word}", default_store()))

    def under(self, name: str) -> dist.Store:
        return dist.PrefixStore(name, self.store)


class Wait(Protocol):
    """Something under way. `torch.distributed.Work` is one."""

    def is_completed(self) -> bool: ...
    def wait(self) -> object: ...


class Group:
    """One rank's end of a process group, with the calls that the engine makes. Ranks are those of the group."""

    def __init__(self, backend: Any, ranks: Sequence[int], kind: str) -> None:
        self.backend: Any = backend  # None once it was closed after a failure
        self.ranks = list(ranks)  # global
        self.kind = kind
        self.rank = self.ranks.index(dist.get_rank())
        self.size = len(self.ranks)

    @property
    def in_stream(self) -> bool:
        """Whether waiting for a message orders the device's stream and lets the host go on."""
        return self.kind == "nccl"

    def send(self, tensor: Tensor, peer: int) -> dist.Work:
        return self.backend.send([tensor], peer, 0)

    def recv(self, tensor: Tensor, peer: int) -> dist.Work:
        return self.backend.recv([tensor], peer, 0)

    def all_reduce(self, tensor: Tensor) -> dist.Work:
        options: Any = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.SUM
        return self.backend.allreduce([tensor], options)

    def reduce(self, tensor: Tensor, root: int) -> dist.Work:
        options: Any = dist.ReduceOptions()
        options.rootRank = root
        options.reduceOp = dist.ReduceOp.SUM
        return self.backend.reduce([tensor], options)

    def broadcast(self, tensor: Tensor, root: int) -> dist.Work:
        options = dist.BroadcastOptions()
        options.rootRank = root
        options.rootTensor = 0
        return self.backend.broadcast([tensor], options)

    def all_to_all(
        self, target: Tensor, source: Tensor, target_splits: list[int], source_splits: list[int]
    ) -> dist.Work:
        return self.backend.alltoall_base(
            target, source, target_splits, source_splits, dist.AllToAllOptions()
        )

    def close(self, failed: bool) -> None:
        """Give back sockets, threads and, over NCCL, the device's memory."""
        if self.kind == "nccl" and failed:
            self.backend.abort()  # a kernel may wait for a rank that is gone
            return
        self.backend.shutdown()
        if failed:
            # Gloo ends when all that was begun has ended, a sum that another rank does not join by its time limit. That
            # must not hold up whoever drops the last reference, a collection of garbage among them.
            held, self.backend = [self.backend], None
            threading.Thread(target=held.clear, name="slipstream-closing", daemon=True).start()


class Groups:
    """Makes the groups of one schedule and closes them together."""

    # Of this process, in the order they were made: whoever leaves early has to close them.
    open: ClassVar[WeakValueDictionary[int, Groups]] = WeakValueDictionary()
    _numbers: ClassVar[Iterator[int]] = count()

    def __init__(self, scope: Scope, device: torch.device, kind: str, timeout_seconds: float) -> None:
        self.scope = scope
        self._device = device
        self.kind = kind  # of what carries the device's tensors
        self._timeout = timedelta(seconds=timeout_seconds)
        self._made: list[Group] = []
        self._users: list[WeakMethod] = []
        self._number = next(Groups._numbers)
        Groups.open[self._number] = self
        atexit.unregister(close_all)
        atexit.register(close_all, failed=True)

    @classmethod
    def handshake(
        cls, groups: Sequence[dist.ProcessGroup | None], device: torch.device, timeout_seconds: float
    ) -> Groups:
        """By all ranks of a mesh together. `groups`: this rank's pipeline, then those that join it to the others."""
        return cls(Scope.handshake(groups), device, carrier(groups[0], device), timeout_seconds)

    def host(self, name: str, ranks: Sequence[int]) -> Group:
        """A gloo group, for tensors in host memory."""
        store, rank = self._place(name, ranks)
        return self._add(dist.ProcessGroupGloo(store, rank, len(ranks), timeout=self._timeout), ranks, "gloo")

    def device(
        self, name: str, ranks: Sequence[int], link: Way | None = None, blocks: int | None = None
    ) -> Group:
        """A group that carries the device's tensors as the user's does; `link`: one direction between two stages;
        `blocks`: at most so many of one of its kernels, where NCCL is not to choose.

        It is connected when this returns: nothing is set up in the middle of a run.
        """
        if self.kind == "nccl":
            most = LINK_CTAS if link else SHARED_GPU_CTAS if shares_gpus() else blocks
            made = self._add(self._nccl(name, ranks, most), ranks, "nccl")
            self._connect(made, link)
            return made
        if self.kind == "gloo":
            return self.host(name, ranks)
        store, rank = self._place(name, ranks)
        maker = SLOTS[self.kind]
        backend = DeviceGroup(store, rank, len(ranks), self._timeout, maker=maker, carried="cuda")
        return self._add(backend, ranks, self.kind)

    def close_first(self, user: Callable[[], None]) -> None:
        """A method that ends whoever uses them beside the caller, such as a thread."""
        self._users.append(WeakMethod(user))

    def close(self, failed: bool = False) -> None:
        Groups.open.pop(self._number, None)
        for user in self._users:
            if (close := user()) is not None:
                close()
        while self._made:
            self._made.pop().close(failed)

    def _add(self, backend: Any, ranks: Sequence[int], kind: str) -> Group:
        self._made.append(Group(backend, ranks, kind))
        return self._made[-1]

    def _place(self, name: str, ranks: Sequence[int]) -> tuple[dist.Store, int]:
        return self.scope.under(name), list(ranks).index(dist.get_rank())

    def _nccl(self, name: str, ranks: Sequence[int], blocks: int | None) -> Any:
        store, rank = self._place(name, ranks)
        # Each link has a group to itself, so that its messages are in one order is no news to warn of.
        os.environ.setdefault("TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING", "0")
        options: Any = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        options._timeout = self._timeout + timedelta(seconds=WATCHDOG_GRACE_SECONDS)
        options.global_ranks_in_group = list(ranks)
        options.group_name = f"slipstream {name}"
        if blocks is not None:
            options.config.max_ctas = blocks
            options.config.min_ctas = 1
        return dist.ProcessGroupNCCL(store, rank, len(ranks), options)

    def _connect(self, group: Group, link: Way | None) -> None:
        """NCCL connects at the first message of a kind, and a collective's kind depends on its size: send them now, and
        wait for them."""
        group.backend.eager_connect_single_device(self._device)
        for elements in PROBE_ELEMENTS if link is None else PROBE_ELEMENTS[:1]:
            probe = torch.zeros(elements, device=self._device)
            if link is None:
                work = group.all_reduce(probe)
            elif (group.rank == 0) == (link == "forward"):
                work = group.send(probe, 1 - group.rank)
            else:
                work = group.recv(probe, 1 - group.rank)
            self._await(work, group)

    def _await(self, work: Any, group: Group) -> None:
        deadline = time.monotonic() + self._timeout.total_seconds()
        while not work.is_completed():
            if time.monotonic() > deadline:
                others = ", ".join(str(rank) for rank in group.ranks if rank != dist.get_rank())
                raise UserError(
                    f"NCCL did not connect to rank {others} within {self._timeout.total_seconds():g} s."
                )
            time.sleep(0.0005)
        work.wait()


def close_all(failed: bool) -> None:
    """Of a process that ends without having closed its schedules: the last one first.

    Closing is something that NCCL's ranks do together, so all of them must come to the same group next.
    """
    for _, groups in sorted(Groups.open.items(), reverse=True):
        groups.close(failed)
