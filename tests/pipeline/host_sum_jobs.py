"""What the ranks do in test_host_sum.py."""

import os
import time

import torch
import torch.distributed as dist

from slipstream.distributed import wires
from slipstream.pipeline.host_sum import HostSum, PeerLost
from slipstream.torch_private import default_store


def _host_sum(timeout=60.0, machine=None) -> HostSum:
    """`machine`: the name of this rank's machine, where it is to be taken for another one."""
    if machine is not None:
        os.environ["SLIPSTREAM_MACHINE"] = machine
    try:
        store = dist.PrefixStore("host_sum", default_store())
        others = [rank for rank in range(dist.get_world_size()) if rank != dist.get_rank()]
        return HostSum(dist.get_rank(), wires.connect(store, dist.get_rank(), others, 60.0), timeout)
    finally:
        os.environ.pop("SLIPSTREAM_MACHINE", None)


def two_rounds_at_a_time(world, machines=1):
    host_sum = _host_sum(machine=f"machine {world.rank % machines}" if machines > 1 else None)
    pending, heard = [], []
    for number in range(6):
        vector = torch.zeros(world.size, dtype=torch.float64)
        vector[world.rank] = world.rank + 10.0 * number
        pending.append((host_sum.all_reduce(vector), vector))
        if len(pending) == 2:
            round_, vector = pending.pop(0)
            round_.wait()
            heard.append(vector.tolist())
    for round_, vector in pending:
        round_.wait()
        heard.append(vector.tolist())
    dist.barrier()
    return heard


def one_is_late(world):
    host_sum = _host_sum()
    if world.rank == 1:
        dist.barrier()
    vector = torch.full((1,), 1.0 + world.rank, dtype=torch.float64)
    told = host_sum.all_reduce(vector)
    before = told.is_completed()
    if world.rank == 0:
        dist.barrier()
    told.wait()
    assert told.is_completed()
    return before, vector.item()


def one_leaves(world):
    host_sum = _host_sum()
    if world.rank == 1:
        host_sum.close()
        return None
    return _error(host_sum)


def one_is_silent(world):
    host_sum = _host_sum()
    if world.rank == 0:
        host_sum._timeout_seconds = 0.5
        told = _error(host_sum)
    dist.barrier()  # silent, but there
    return told if world.rank == 0 else None


def _error(host_sum):
    try:
        host_sum.all_reduce(torch.zeros(1, dtype=torch.float64)).wait()
    except PeerLost as error:
        return str(error)
    return None


def many_files(world):
    """With more files open than `select` takes."""
    pipes = [os.pipe() for _ in range(600)]
    try:
        return two_rounds_at_a_time(world)
    finally:
        for ends in pipes:
            for end in ends:
                os.close(end)


def a_stranger(world):
    """Somebody who does not know the word comes first, and is shown out."""
    import socket
    import threading

    store = dist.PrefixStore("stranger", world.store)
    stranger = None
    if world.rank == 1:

        def knock():
            import json

            store.wait(["places/0"])
            nonlocal stranger
            stranger = socket.socket(socket.AF_UNIX)
            stranger.connect(json.loads(store.get("places/0"))["path"])
            stranger.sendall(b"\0\0\0\1" + b"x" * 32)

        store.set("machine/1", wires.machine())
        thread = threading.Thread(target=knock, daemon=True)
        thread.start()
        thread.join()
    found = wires.connect(store, world.rank, [1 - world.rank], 30.0)
    found[1 - world.rank].send(b"hello")
    deadline = time.monotonic() + 20
    while (said := found[1 - world.rank].receive()) is None and time.monotonic() < deadline:
        time.sleep(0.01)
    return said, None if stranger is None else stranger.recv(1)
