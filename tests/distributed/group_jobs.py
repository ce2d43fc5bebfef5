"""Jobs on a group whose CPU tensors take the rings: what CUDA tensors do where ranks share a GPU."""

import os
import signal
import weakref
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import pipelining
from torch.distributed.pipelining import PipelineStage

from pipeline import jobs as engine_jobs
from pipeline import tiny
from slipstream import Schedule2BW
from slipstream.distributed.device_group import DeviceGroup, register
from slipstream.distributed.slots import HostSlots
from slipstream.pipeline.watched_stage import WatchedStage


def ringed(seconds=120.0):
    register("ringed", HostSlots, carried="cpu")
    group = dist.new_group(backend="ringed", timeout=timedelta(seconds=seconds))
    assert isinstance(group, DeviceGroup)
    return group


def point_to_point(world):
    """Everybody sends before anybody receives, more than the ring first holds; receives are waited for backwards."""
    group, other = ringed(), 1 - world.rank
    sizes = [1, 300_000, 0, 5, 7_000, 2]
    for index, size in enumerate(sizes):
        dist.isend(torch.full((size,), float(10 * world.rank + index)), other, group)
    outs = [torch.empty(size) for size in sizes]
    works = [dist.irecv(out, other, group) for out in outs]
    for work in reversed(works):
        work.wait()
    flags = torch.tensor([[True, False]] * 3).T
    ops = [dist.P2POp(dist.isend, flags, other, group)]
    back = torch.zeros(2, 3, dtype=torch.bool)
    ops.append(dist.P2POp(dist.irecv, back, other, group))
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    late = torch.empty(2)
    pending = dist.irecv(late, other, group)
    early = pending.is_completed()
    dist.barrier(group)
    dist.send(torch.tensor([1.0, 2.0]), other, group)
    dist.barrier(group)
    return (
        [out[0].item() for out in outs if out.numel()],
        torch.equal(back, flags),
        early,
        pending.is_completed(),
    )


def collectives(world):
    group = ringed()
    total = torch.tensor([0.1 * (world.rank + 1), 1.0])
    dist.all_reduce(total, group=group)
    largest = torch.tensor(world.rank)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    told = torch.tensor(7.0 if world.rank == 1 else 0.0)
    dist.broadcast(told, 1, group=group)
    parts = [torch.empty(1) for _ in range(world.size)]
    dist.all_gather(parts, torch.tensor([float(world.rank)]), group=group)
    summed = torch.tensor(1.0)
    dist.reduce(summed, 0, group=group)
    objects = [None] * world.size
    dist.all_gather_object(objects, f"rank {world.rank}", group=group)
    return total.tolist(), largest.item(), told.item(), torch.cat(parts).tolist(), summed.item(), objects


def sums(world, length=1000):
    """A sum told to all and one told to rank 1, what they should be, and how many received parts outlive a sum."""
    group, received = ringed(), []
    post = group._post

    def watched(out, rank):
        received.append(weakref.ref(out))
        return post(out, rank)

    group._post = watched
    own = [torch.randn(length, generator=torch.Generator().manual_seed(rank)) for rank in range(world.size)]
    expected = own[0].clone()
    for other in own[1:]:
        expected += other
    total, told = own[world.rank].clone().requires_grad_(), own[world.rank].clone()
    works = [
        dist.all_reduce(total, group=group, async_op=True),
        dist.reduce(told, 1, group=group, async_op=True),
    ]
    for work in works:
        work.wait()
        work.wait()  # a second wait adds nothing
    alive = sum(out() is not None for out in received)
    return (
        torch.equal(total, expected),
        torch.equal(told, expected if world.rank == 1 else own[world.rank]),
        len(received),
        alive,
    )


def host_traffic(world, rounds):
    """All that torch can ask of a group, with host tensors, many times over: they go to the gloo group inside."""
    register("shared", HostSlots)
    group, ranks, own = dist.new_group(backend="shared"), range(world.size), float(world.rank)
    for number in range(rounds):
        x = torch.tensor([own + number])
        objects = [None] * world.size
        dist.all_gather_object(objects, (world.rank, "x" * number), group=group)
        assert objects == [(rank, "x" * number) for rank in ranks]
        parts = [torch.empty(1) for _ in ranks]
        dist.all_gather(parts, x, group=group)
        assert torch.cat(parts).tolist() == [rank + number for rank in ranks]
        total = torch.tensor([own])
        dist.all_reduce(total, group=group)
        dist.broadcast(x, 1, group=group)
        assert (total.item(), x.item()) == (sum(ranks), 1.0 + number)
        dist.reduce(total, 0, group=group)
        dist.gather(x, parts if world.rank == 0 else None, 0, group=group)
        dist.scatter(x, [part + 1 for part in parts] if world.rank == 0 else None, 0, group=group)
        assert x.item() == 2.0 + number
        sent = dist.isend(torch.tensor([own]), (world.rank + 1) % world.size, group)
        dist.recv(x, (world.rank - 1) % world.size, group)
        sent.wait()
        assert x.item() == (world.rank - 1) % world.size
        flat = torch.empty(world.size)
        dist.all_gather_into_tensor(flat, torch.tensor([own]), group=group)
        dist.all_to_all_single(swapped := torch.empty(world.size), flat, group=group)
        assert flat.tolist() == list(ranks)
        assert swapped.tolist() == [own] * world.size
        dist.barrier(group)
    return rounds


def dead_peer(world):
    group = ringed()
    x = torch.zeros(1)
    if world.rank == 1:
        dist.send(x, 0, group)
        os.kill(os.getpid(), signal.SIGKILL)
    dist.recv(x, 1, group)
    dist.recv(x, 1, group)


def silent_peer(world):
    group = ringed()
    if world.rank == 0:
        group.timeout_seconds = 0.3
        dist.recv(torch.zeros(1), 1, group)


PLACEMENTS = {
    "Schedule1F1B": lambda rank, size: [rank],
    "ScheduleGPipe": lambda rank, size: [rank],
    "ScheduleInterleaved1F1B": lambda rank, size: [rank, rank + size],
    "ScheduleZBVZeroBubble": lambda rank, size: [rank, 2 * size - 1 - rank],
    "ScheduleDualPipeV": lambda rank, size: [rank, 2 * size - 1 - rank],
}


def torch_schedule(world, name, groups=3, device="cpu", backend="both"):
    """Losses of one of torch's schedules on gloo and on the rings."""
    by_group = {}
    if backend in ("both", "gloo"):
        by_group["gloo"] = dist.new_group(backend="gloo")
    by_group["rings"] = ringed() if device == "cpu" else dist.group.WORLD
    return {
        kind: _train(world, name, groups, torch.device(device), group) for kind, group in by_group.items()
    }


def _train(world, name, groups, device, group):
    held = PLACEMENTS[name](world.rank, world.size)
    parts = len(held) * world.size
    modules = [tiny.Model(*tiny.cut(part, parts), tied=False).to(device) for part in held]
    stages = [WatchedStage(m, part, parts, device, group) for m, part in zip(modules, held, strict=True)]
    build = getattr(pipelining, name)
    schedule = build(stages if len(stages) > 1 else stages[0], n_microbatches=8, loss_fn=tiny.loss_fn)
    optimizer = torch.optim.SGD([p for m in modules for p in m.parameters()], lr=0.1)
    found = []
    for index in range(groups):
        x, y = (t.to(device).contiguous() for t in tiny.batch(index, rows=16))  # torch checks strides
        losses = []
        schedule.step(*((x,) if 0 in held else ()), target=y if parts - 1 in held else None, losses=losses)
        optimizer.step()
        optimizer.zero_grad()
        found += [loss.item() for loss in losses]
    return found


def greeted(world):
    """Whom the stages of a V greet before the first step, as ranks."""
    held, parts = [world.rank, 2 * world.size - 1 - world.rank], 2 * world.size
    peers = set()
    for part in held:
        stage = WatchedStage(torch.nn.Identity(), part, parts, torch.device("cpu"))
        stage.stage_index_to_group_rank = {index: min(index, parts - 1 - index) for index in range(parts)}
        peers |= {op.group_peer for op in stage._get_init_p2p_neighbors_ops()}
    return peers


def engine(world, groups=12):
    """The engine over the rings instead of its own shared memory."""
    group = ringed()
    module = tiny.Model(*tiny.cut(world.rank, world.size), tied=True)
    stage = PipelineStage(module, world.rank, world.size, torch.device("cpu"), group=group)
    names = {0: "embedding.weight", world.size - 1: "head.weight"}
    schedule = Schedule2BW(
        stage, engine_jobs.M, tiny.loss_fn, tiny.adamw, max_grad_norm=0.5, timeout=120, cutover=engine_jobs.M,
        tied={"embedding": names[world.rank]} if world.rank in names else {},
    )  # fmt: skip
    losses = [loss for index in range(groups) for loss in engine_jobs.step(world, schedule, index)]
    schedule.drain()
    return losses


def engine_loses_a_stage(world):
    group = ringed()
    module = tiny.Model(*tiny.cut(world.rank, world.size), tied=False)
    stage = PipelineStage(module, world.rank, world.size, torch.device("cpu"), group=group)
    schedule = Schedule2BW(stage, engine_jobs.M, tiny.loss_fn, tiny.adamw, timeout=120)
    for index in range(10):
        if world.rank == 1 and index == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        engine_jobs.step(world, schedule, index)
    schedule.drain()
