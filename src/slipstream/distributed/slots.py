"""Memory that two processes share, cut into slots: of a GPU (CUDA IPC), or of the host (a memory file).

A slot is filled by one process and emptied by the other, in turn. On a GPU neither of them waits for the device:
each slot has two events that both processes know. `filled` is recorded behind the copy into the slot, `emptied`
behind the copy out of it, and the other side's stream waits for it:

    write:  wait emptied[i]   copy in    record filled[i]        then tell the reader, host to host
    read:   wait filled[i]    copy out   record emptied[i]       then tell the writer, host to host

A stream waits for the record it finds when the wait is queued, so each wait must be queued after the record it means
and before the next one: that is what telling each other in between, host to host, is for. Host memory needs no
events, because copies into and out of it are done when they return; it is also how CUDA tensors travel where IPC
cannot be had.
"""

from __future__ import annotations

import mmap
import os
import pickle
from multiprocessing.reduction import ForkingPickler

import torch
from torch import Tensor

_ALIGNMENT = 512


class DeviceSlots:
    """`count` slots of `size` bytes each in the memory of a GPU that both processes use: made by the one that writes,
    opened by the one that reads."""

    def __init__(
        self, memory: Tensor, filled: list[torch.cuda.Event], emptied: list[torch.cuda.Event]
    ) -> None:
        self.count, self.size = memory.shape
        self._memory = memory
        self._filled = filled
        self._emptied = emptied

    @classmethod
    def make(cls, count: int, size: int, device: torch.device) -> DeviceSlots:
        memory = torch.empty(count, aligned(size), dtype=torch.uint8, device=device)
        filled, emptied = ([torch.cuda.Event(interprocess=True) for _ in range(count)] for _ in range(2))
        return cls(memory, filled, emptied)

    @classmethod
    def open(cls, message: bytes, descriptors: list[int]) -> DeviceSlots:
        return cls(*pickle.loads(message))

    def write(self, index: int, tensor: Tensor, again: bool) -> None:
        """Fill a slot; `again`: it has been filled and emptied before."""
        stream = torch.cuda.current_stream(self._memory.device)
        if again:
            self._emptied[index].wait(stream)
        slot_view(self._memory[index], tensor).copy_(tensor.detach(), non_blocking=True)
        self._filled[index].record(stream)

    def read(self, index: int, out: Tensor) -> None:
        stream = torch.cuda.current_stream(self._memory.device)
        self._filled[index].wait(stream)
        out.detach().copy_(slot_view(self._memory[index], out), non_blocking=True)
        self._emptied[index].record(stream)

    def handles(self) -> tuple[bytes, list[int]]:
        """What another process needs to open the same memory: bytes, and file descriptors to send along."""
        # What torch teaches multiprocessing: the memory stays this process's, and lives while a reader has it open.
        with torch.cuda.device(self._memory.device):
            return bytes(ForkingPickler.dumps((self._memory, self._filled, self._emptied))), []


class HostSlots:
    """The same in host memory, for tensors of any device."""

    def __init__(self, descriptor: int, count: int, size: int) -> None:
        self.count, self.size = count, size
        self._descriptor = descriptor
        self._memory = mmap.mmap(descriptor, count * size)
        self._slots = [
            torch.frombuffer(self._memory, dtype=torch.uint8, count=size, offset=index * size)
            for index in range(count)
        ]

    @classmethod
    def make(cls, count: int, size: int, device: torch.device) -> HostSlots:
        descriptor = os.memfd_create("slipstream-slots")
        os.ftruncate(descriptor, count * aligned(size))
        return cls(descriptor, count, aligned(size))

    @classmethod
    def open(cls, message: bytes, descriptors: list[int]) -> HostSlots:
        return cls(descriptors[0], *pickle.loads(message))

    def write(self, index: int, tensor: Tensor, again: bool) -> None:
        slot_view(self._slots[index], tensor).copy_(tensor.detach())

    def read(self, index: int, out: Tensor) -> None:
        out.detach().copy_(slot_view(self._slots[index], out))

    def handles(self) -> tuple[bytes, list[int]]:
        return pickle.dumps((self.count, self.size)), [self._descriptor]

    def __del__(self) -> None:
        os.close(self._descriptor)


Slots = DeviceSlots | HostSlots
SlotMaker = type[DeviceSlots] | type[HostSlots]


def slot_view(slot: Tensor, like: Tensor) -> Tensor:
    """The head of a slot of bytes, as a tensor of the dtype and shape of `like`."""
    if like.numel() == 0:
        return torch.empty_like(like)
    return slot[: like.numel() * like.element_size()].view(like.dtype).view(like.shape)


def aligned(size: int) -> int:
    return max(1, -(-size // _ALIGNMENT)) * _ALIGNMENT
