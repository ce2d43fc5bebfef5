"""Jobs over real NCCL: the engine on several ranks, held against the emulator on the first of them."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, SplitPoint, pipeline

from pipeline import tiny
from slipstream import Emulator, Schedule2BW
from slipstream.optim import build, newton_schulz, sharded

M = 8
DEVICE = torch.device("cuda", 0)


def muon(module):
    """In float32, so that it can be held against the emulator: on a GPU it works in bf16."""
    newton_schulz.compute_dtype = sharded.compute_dtype = lambda tensor: torch.float32
    return build("muon", module, lr=0.01)


OPTIMIZERS = {**tiny.OPTIMIZERS, "muon": muon}


def again(world, backend, device_id):
    """The default group made anew, as another launcher would make it."""
    dist.destroy_process_group()
    dist.init_process_group(
        backend,
        store=dist.PrefixStore("again", world.store),
        rank=world.rank,
        world_size=world.size,
        device_id=DEVICE if device_id else None,
    )


def data(group, rows=2 * M):
    return tuple(t.to(DEVICE) for t in tiny.batch(group, rows=rows))


def train(
    world, stages=None, backend=None, device_id=False, optimizer="adamw", tied=True, mode="replicated", traced=False,
    groups=30, bank_dtype=None, layers=tiny.LAYERS, machines=1, cutover=M // 2, compact_master=False,
    **options,
):  # fmt: skip
    """Drains, evaluations, captures and a synchronous start among 30 groups; then the emulator on the first rank."""
    if machines > 1:
        name = f"machine {world.rank * machines // world.size}"
        os.environ["NCCL_HOSTID"] = os.environ["SLIPSTREAM_MACHINE"] = name
    tiny.LAYERS = layers
    torch.cuda.set_device(DEVICE)
    if backend is not None:
        again(world, backend, device_id)
    stages = stages or world.size
    degree, (index, column) = world.size // stages, world.mesh(stages)
    pipelines = [dist.new_group(list(range(d * stages, (d + 1) * stages))) for d in range(degree)]
    columns = [dist.new_group(list(range(s, world.size, stages))) for s in range(stages)]
    options |= {"correction": "error_feedback", "max_grad_norm": 0.3, "synchronous": 3, "timeout": 60}
    options["cutover"] = cutover
    make = OPTIMIZERS[optimizer]
    placed = dict(
        options, shard_optimizer=mode == "zero1", bank_dtype=bank_dtype, compact_master=compact_master
    )
    if degree > 1:
        placed["data_group"] = columns[index]
    if mode == "fsdp":
        placed["prepare"] = _fully_sharded(columns[index])
    if traced:
        stage = _traced(world)
    else:
        module = tiny.Model(*tiny.cut(index, stages), tied=tied).to(DEVICE)
        stage = PipelineStage(module, index, stages, DEVICE, group=pipelines[column])
    if tied and not traced and stages > 1:
        names = {0: "embedding.weight", stages - 1: "head.weight"}
        placed["tied"] = {"embedding": names[index]} if index in names else {}
    with Schedule2BW(stage, M, tiny.loss_fn, make, **placed) as schedule:
        losses, evaluated = _run(schedule, index, stages, column, degree, groups)
        norms = dict(schedule.grad_norms)
        with schedule.gathered_master() as master:
            weights = {
                name: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().float().cpu()
                for name, p in master.named_parameters()
            }
    found = {"losses": losses, "evaluated": evaluated, "weights": weights, "norms": norms}
    if world.rank == 0:
        found["emulated"] = emulate(groups, make, tied and not traced, bank_dtype, options)
    return found


def _run(schedule, index, stages, column, degree, groups):
    first, last = index == 0, index == stages - 1
    losses, evaluated, captured = [], [], []
    schedule.after_update = lambda group: captured.append(schedule.capture()) if group == 9 else None
    for group in range(groups):
        x, y = (_share(t, column, degree) for t in data(group))
        taken = []
        schedule.step(*((x,) if first else ()), **({"target": y, "losses": taken} if last else {}))
        losses += [loss.detach() for loss in taken]
        if group in (4, 17):
            schedule.drain()
        if group in (5, 20):
            x, y = data(1000)
            taken = []
            schedule.eval(*((x,) if first else ()), **({"target": y, "losses": taken} if last else {}))
            evaluated += [loss.item() for loss in taken]
    schedule.drain()
    assert captured[0]["group"] == 10
    return [loss.item() for loss in losses], evaluated


def emulate(groups, make, tied, bank_dtype, options):
    rest = {key: value for key, value in options.items() if key not in ("timeout", "in_flight")}
    emulator = Emulator(
        tiny.Model(0, tiny.LAYERS, tied=tied).to(DEVICE), M, tiny.loss_fn, make, bank_dtype=bank_dtype, **rest
    )
    losses, evaluated = [], []
    for group in range(groups):
        losses += [loss.item() for loss in emulator.step(*data(group))]
        if group in (5, 20):
            evaluated += [loss.item() for loss in emulator.eval(*data(1000))]
    weights = {name: p.detach().float().cpu() for name, p in emulator.master.named_parameters()}
    return {"losses": losses, "evaluated": evaluated, "weights": weights, "norms": dict(emulator.grad_norms)}


def _share(tensor, column, degree):
    return torch.cat([chunk.chunk(degree)[column] for chunk in tensor.chunk(M)])


def _fully_sharded(group):
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    mesh = DeviceMesh.from_group(group, "cuda")

    def prepare(module):
        for layer in module.layers.values():
            fully_shard(layer, mesh=mesh)
        fully_shard(module, mesh=mesh)

    return prepare


def _traced(world):
    model = tiny.Model(0, tiny.LAYERS, tied=False)
    points = {f"layers.{i * 4 // world.size}": SplitPoint.BEGINNING for i in range(1, world.size)}
    pipe = pipeline(model, mb_args=(tiny.batch(0, rows=2)[0],), split_spec=points)
    return pipe.build_stage(world.rank, DEVICE)


def warm(world):
    """A few groups; the memory that is left on the device."""
    torch.cuda.set_device(DEVICE)
    module = tiny.Model(*tiny.cut(world.rank, world.size), tied=False).to(DEVICE)
    stage = PipelineStage(module, world.rank, world.size, DEVICE)
    with Schedule2BW(stage, M, tiny.loss_fn, tiny.adamw, timeout=60) as schedule:
        for group in range(3):
            x, y = data(group)
            last = world.rank == world.size - 1
            schedule.step(*((x,) if world.rank == 0 else ()), **({"target": y} if last else {}))
    return torch.cuda.mem_get_info()[0]


def lose(world, how, stage, group, seed=0, seconds=15):
    """Rank `stage` is lost in one way or another at `group`; the others say what they saw, and when."""
    torch.cuda.set_device(DEVICE)
    module = tiny.Model(*tiny.cut(world.rank, world.size), tied=False).to(DEVICE)
    schedule = Schedule2BW(
        PipelineStage(module, world.rank, world.size, DEVICE),
        M,
        tiny.loss_fn,
        tiny.adamw,
        max_grad_norm=0.3,
        timeout=seconds,
    )
    if how == "forward" and world.rank == stage:
        for replica in schedule._versions.replicas:
            replica.module.register_forward_pre_hook(_raising(schedule, group))
    if how == "backward" and world.rank == stage:
        for replica in schedule._versions.replicas:
            next(replica.module.parameters()).register_hook(_exhausting(schedule, group))
    for g in range(group + 20):
        if world.rank == stage and g == group and how in ("SIGKILL", "SIGSTOP"):
            delay = (seed % 10) * 0.002
            threading.Timer(delay, os.kill, (os.getpid(), getattr(signal, how))).start()
        x, y = data(g)
        last = world.rank == world.size - 1
        schedule.step(*((x,) if world.rank == 0 else ()), **({"target": y} if last else {}))
    schedule.drain()


def _raising(schedule, group):
    def hook(module, args):
        if schedule.group == group:
            raise ValueError("this forward raises")

    return hook


def _exhausting(schedule, group):
    def hook(grad):
        if schedule.group >= group:
            torch.empty(1 << 50, dtype=torch.uint8, device=DEVICE)
        return grad

    return hook


def many(world, count):
    """Schedules made, used and closed, one after another: what is left of them in this process and on the device."""
    torch.cuda.set_device(DEVICE)
    left = []
    for number in range(count):
        module = tiny.Model(*tiny.cut(world.rank, world.size), tied=False).to(DEVICE)
        stage = PipelineStage(module, world.rank, world.size, DEVICE)
        with Schedule2BW(stage, M, tiny.loss_fn, tiny.adamw, timeout=60) as schedule:
            x, y = data(number)
            last = world.rank == world.size - 1
            schedule.step(*((x,) if world.rank == 0 else ()), **({"target": y} if last else {}))
        del module, stage, schedule
        gc.collect()
        torch.cuda.empty_cache()
        left.append(
            (
                len(os.listdir("/proc/self/fd")),
                threading.active_count(),
                _native_threads(),
                torch.cuda.memory_reserved(),
            )
        )
        if number % 10 == 0:
            dist.barrier()
            time.sleep(0.2)
            left[-1] += (torch.cuda.mem_get_info()[0],)
    return left


def _native_threads():
    return len(os.listdir("/proc/self/task"))
