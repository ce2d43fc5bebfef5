"""Jobs for worker processes: the engine on real ranks, over the tiny models."""

import gc
import os
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage

from pipeline import tiny
from slipstream import Schedule2BW, UserError, cloned_state

M = 4


def build(world, optimizer="adamw", tied=True, m=M, frozen=False, layers=tiny.LAYERS, **options):
    """A schedule over this rank's stage of the tiny model; `frozen`: the tied weights are not trained.

    All microbatches are old unless a test says otherwise: the default cutover is another trajectory at every depth.
    """
    options = {"cutover": m, **options}
    first, last = tiny.cut(world.rank, world.size, layers)
    module = tiny.Model(first, last, tied=tied, layers=layers)
    for part in (module.embedding, module.head):
        if frozen and part is not None:
            part.requires_grad_(False)
    stage = PipelineStage(module, world.rank, world.size, torch.device("cpu"))
    if tied and world.size > 1:
        names = {0: "embedding.weight", world.size - 1: "head.weight"}
        options["tied"] = {"embedding": names[world.rank]} if world.rank in names else {}
    make = tiny.OPTIMIZERS[optimizer] if isinstance(optimizer, str) else optimizer
    return Schedule2BW(stage, m, tiny.loss_fn, make, **{"timeout": 120, **options})


def step(world, schedule, group, outputs=True, **batch_options):
    """One group through this rank; the losses on the last stage, else an empty list."""
    x, y = tiny.batch(group, **batch_options)
    losses = []
    args = (x,) if world.rank == 0 else ()
    last = world.rank == world.size - 1
    schedule.step(*args, return_outputs=outputs, **({"target": y, "losses": losses} if last else {}))
    return [loss.item() for loss in losses]


def weights(schedule):
    with schedule.gathered_master() as master:
        return {name: p.detach().clone() for name, p in master.named_parameters()}


def train(world, groups, drains=(), evaluations=(), state=None, decay=False, outputs=True, **options):
    """Train over `groups`; returns losses, final weights, evaluation losses, the state at the end."""
    schedule = build(world, **options)
    if state is not None:
        schedule.load_state_dict(state)
    scheduler = (
        torch.optim.lr_scheduler.LambdaLR(schedule.optimizer, lambda g: 1 / (1 + 0.1 * g)) if decay else None
    )
    losses, evaluated = [], []
    for group in groups:
        losses += step(world, schedule, group, outputs)
        if scheduler is not None:
            scheduler.step()
        if group in drains:
            schedule.drain()
        if group in evaluations:
            x, y = tiny.batch(10_000, rows=4)
            found = []
            last = world.rank == world.size - 1
            schedule.eval(
                *((x,) if world.rank == 0 else ()), **({"target": y, "losses": found} if last else {})
            )
            evaluated += [loss.item() for loss in found]
    state = schedule.state_dict()
    return {
        "losses": losses,
        "weights": weights(schedule),
        "evaluated": evaluated,
        "state": state,
        "norms": dict(schedule.grad_norms),
        "skipped": schedule.skipped,
    }


def in_flight_at_steps(world, groups=12):
    """How many microbatches are between their forward and their backward whenever the optimizer steps."""
    schedule = build(world, in_flight=world.size)
    sizes = []
    schedule.optimizer.register_step_pre_hook(lambda *_: sizes.append(len(schedule._flight)))
    for group in range(groups):
        step(world, schedule, group)
    schedule.drain()
    return sizes, schedule._depth.warm_up


def order(world, groups, **options):
    """The actions this rank executed, in order, with the depth it settled on."""
    schedule = build(world, tied=False, **options)
    schedule.trace(True)
    for group in range(groups):
        step(world, schedule, group)
    schedule.drain()
    return [span.action[:4] for span in schedule.take_trace()], schedule.in_flight


def skip(world, bad, groups=8):
    """Group `bad` gives a loss that is not finite, seen first by the last stage only."""
    schedule = build(world, correction="error_feedback")
    plain, count = schedule.loss_fn, 0

    def poisoned(output, target):
        nonlocal count
        count += 1
        return plain(output, target) * (float("nan") if (count - 1) // M == bad else 1.0)

    schedule.loss_fn = poisoned
    losses = [loss for group in range(groups) for loss in step(world, schedule, group)]
    schedule.drain()
    return {"losses": losses, "weights": weights(schedule), "skipped": schedule.skipped}


def stop(world, asker):
    """Rank `asker` asks for a stop during group 3; every rank says after how many groups it stopped."""
    schedule = build(world)
    while not schedule.stopping():
        step(world, schedule, schedule.group)
        if world.rank == asker and schedule.group == 4:
            schedule.request_stop()
    schedule.drain()
    return schedule.group, schedule.completed


def snapshots(world, after, groups=8):
    """States captured when each stage passes update `after`, without draining."""
    schedule = build(world, correction="error_feedback", max_grad_norm=0.5)
    taken = []

    def hook(group):
        if group == after:
            taken.append(cloned_state(schedule.capture()))

    schedule.after_update = hook
    for group in range(groups):
        step(world, schedule, group)
    schedule.drain()
    return {"state": taken[0], "weights": weights(schedule)}


def broken(world, case):
    """Wrong use on one rank or all; the launcher re-raises what the user would see."""
    first, last = world.rank == 0, world.rank == world.size - 1
    if case == "few microbatches":
        build(world, m=1)
    elif case == "missed parameters":
        build(world, optimizer=lambda module: torch.optim.SGD(list(module.parameters())[:-1], lr=0.1))
    elif case == "shapes":
        schedule = build(world)
        step(world, schedule, 0)
        step(world, schedule, 1, length=7)
    elif case == "loss":
        schedule = build(world)
        schedule.loss_fn = lambda output, target: output
        step(world, schedule, 0)
    elif case == "target":
        schedule = build(world)
        step(world, schedule, 0) if last else schedule.step(tiny.batch(0)[0], target=torch.zeros(8))
    elif case == "input":
        schedule = build(world)
        step(world, schedule, 0) if first else schedule.step(torch.zeros(8))
    elif case == "frozen tie":
        build(world, frozen=True)
    elif case == "lonely tie":
        build(world, tied=False) if first else _tied_block(world, "layers.2.up.weight")
    elif case == "unlike ties":
        _tied_block(world, "layers.0.up.weight" if first else "layers.2.down.weight")
    elif case == "short batch":
        step(world, build(world), 0, rows=6)
    elif case == "no input":
        build(world).step()
    elif case == "again":
        schedule = build(world)
        try:
            step(world, schedule, 0)
            schedule.loss_fn = lambda output, target: output
            step(world, schedule, 1)
            schedule.drain()
        except UserError:
            step(world, schedule, 2)


def _tied_block(world, name):
    module = tiny.Model(*tiny.cut(world.rank, world.size), tied=False)
    stage = PipelineStage(module, world.rank, world.size, torch.device("cpu"))
    return Schedule2BW(stage, M, tiny.loss_fn, tiny.adamw, tied={"block": name}, timeout=120)


def far_down(world, folder):
    """The temporary folder has a name longer than a socket's may be."""
    import tempfile

    usual, tempfile.tempdir = tempfile.tempdir, folder
    try:
        return train(world, range(3))["losses"]
    finally:
        tempfile.tempdir = usual


def frozen(world):
    """Twelve groups of the same batch, embedding and head frozen."""
    schedule = build(world, frozen=True)
    return [loss for _ in range(12) for loss in step(world, schedule, 0)]


def lose(world, how, flushed=0):
    """Rank 1 dies or stalls in the middle of group 3; the first `flushed` groups are synchronous."""
    import os
    import signal
    import time

    schedule = build(world, timeout=120 if how == "die" else 8, synchronous=flushed)
    for group in range(10):
        if world.rank == 1 and group == 3:
            if how == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(100)
        step(world, schedule, group)
    schedule.drain()


def on_gpu(world, groups=10, backend=None, cutover=M):
    """Stages that share one GPU; rank 0 also runs the emulator there. `backend`: not the group's own way."""
    import torch.distributed as dist

    from slipstream import Emulator

    device = torch.device("cuda", 0)
    group = dist.new_group(backend=backend) if backend else dist.group.WORLD
    schedule = _gpu_schedule(world, group, timeout=60, cutover=cutover)
    losses = [loss for group in range(groups) for loss in _gpu_step(world, schedule, group)]
    schedule.drain()
    emulated = []
    if world.rank == 0:
        model = tiny.Model(tied=False).to(device)
        emulator = Emulator(model, M, tiny.loss_fn, tiny.adamw, max_grad_norm=0.1, cutover=cutover)
        for group in range(groups):
            emulated += [loss.item() for loss in emulator.step(*(t.to(device) for t in tiny.batch(group)))]
    return losses, emulated, dist.get_backend()


def deterministic(world, job, *given, **named):
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # torch asks for it
    torch.use_deterministic_algorithms(True)
    try:
        return globals()[job](world, *given, **named)
    finally:
        torch.use_deterministic_algorithms(False)


def halves(world, optimizer, device="cuda", groups=8):
    """Losses of a small language model with bf16 banks and half of a group old: with a master in halves, with a plain
    one, and of the emulator (on rank 0)."""
    from slipstream import Emulator
    from slipstream.models.loss import TokenLoss, with_group_count
    from slipstream.models.sizes import ModelConfig
    from slipstream.models.stages import build_stage
    from slipstream.optim import build

    rank, ranks = world.rank, world.size
    config = ModelConfig(vocab=256, dim=128, layers=4, heads=2, kv_heads=2, ffn=256, tied=False)

    def stage(first, last):
        ends = {"embedding": first == 0, "head": last == config.layers}
        return build_stage(config, first, last, **ends, seed=0, device=device)

    def rows(group):
        tokens = torch.randint(
            config.vocab, (2 * M, 33), generator=torch.Generator().manual_seed(group), device="cpu"
        ).to(device)
        return tokens[:, :-1].contiguous(), with_group_count(tokens[:, 1:].contiguous())

    options = {"cutover": M // 2, "bank_dtype": torch.bfloat16, "max_grad_norm": 0.5}
    loss = TokenLoss(shares=M)
    made = (M, loss, lambda module: build(optimizer, module, lr=1e-2), "error_feedback")
    found = {}
    for name, compact in (("halves", True), ("plain", False)):
        module = stage(rank * config.layers // ranks, (rank + 1) * config.layers // ranks)
        placed = PipelineStage(module, rank, ranks, torch.device(device))
        with Schedule2BW(placed, *made, **options, compact_master=compact, timeout=60) as schedule:
            taken = []
            for group in range(groups):
                x, y = rows(group)
                losses = []
                first, last = rank == 0, rank == ranks - 1
                schedule.step(*((x,) if first else ()), **({"target": y, "losses": losses} if last else {}))
                taken += losses
            schedule.drain()
        found[name] = [loss.item() for loss in taken]
    if rank == 0:
        emulator = Emulator(stage(0, config.layers), *made, **options)
        taken = [loss for group in range(groups) for loss in emulator.step(*rows(group))]
        found["emulated"] = [loss.item() for loss in taken]
    return found


def lose_on_gpu(world):
    """Rank 1 dies in the middle of group 3."""
    import os
    import signal

    schedule = _gpu_schedule(world, None, timeout=10)
    for group in range(10):
        if world.rank == 1 and group == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        _gpu_step(world, schedule, group)
    schedule.drain()


def _gpu_schedule(world, group, timeout, cutover=M):
    device = torch.device("cuda", 0)
    module = tiny.Model(*tiny.cut(world.rank, world.size), tied=False).to(device)
    stage = PipelineStage(module, world.rank, world.size, device, group=group)
    return Schedule2BW(
        stage, M, tiny.loss_fn, tiny.adamw, max_grad_norm=0.1, timeout=timeout, cutover=cutover
    )


def _gpu_step(world, schedule, group):
    x, y = (t.to("cuda") for t in tiny.batch(group))
    found = []
    last = world.rank == world.size - 1
    schedule.step(*((x,) if world.rank == 0 else ()), **({"target": y, "losses": found} if last else {}))
    return [loss.item() for loss in found]


def tied_gradients(world, groups=3):
    """Of every tied weight's all-reduce, whether what travels is a gradient itself."""
    from slipstream.pipeline.mesh import Mesh
    from slipstream.pipeline.ties import TieGroup

    held, found = set(), []
    tie, all_reduce = Mesh.tie, TieGroup.all_reduce

    def noted(self, grads):
        held.update(grad.data_ptr() for grad in grads if grad is not None)
        yield from tie(self, grads)
        held.clear()

    def travels(self, tensor):
        found.append(tensor.data_ptr() in held)
        yield from all_reduce(self, tensor)

    with mock.patch.object(Mesh, "tie", noted), mock.patch.object(TieGroup, "all_reduce", travels):
        schedule = build(world)
        for group in range(groups):
            step(world, schedule, group)
        schedule.drain()
    schedule.close()
    return found


def closed(world, count, fails):
    """Schedules made one after another, used and closed, or refused by their optimizer; what is open after each."""
    left = []

    def refusing(module):
        raise ValueError("no optimizer today")

    gc.disable()  # else a collection might happen to come in time
    try:
        for group in range(count):
            if fails:
                with pytest.raises(ValueError, match="today"):
                    build(world, optimizer=refusing)
            else:
                with build(world) as schedule:
                    step(world, schedule, group)
                del schedule
                gc.collect()
            dist.barrier()
            deadline = time.monotonic() + 20  # what a failed schedule leaves is closed beside
            now = _open()
            while left and now > left[0] and time.monotonic() < deadline:
                time.sleep(0.05)
                now = _open()
            left.append(now)
    finally:
        gc.enable()
    schedule = build(world)  # and another can be made
    step(world, schedule, 0)
    schedule.close()
    return left


def _open():
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def beside_groups_of_ones_own(world, groups=3):
    """The weights of a run in which rank 0 alone has made a group, as a user may."""
    if world.rank == 0:
        dist.new_group([0], use_local_synchronization=True)
    schedule = build(world)
    for group in range(groups):
        step(world, schedule, group)
    schedule.drain()
    found = weights(schedule)
    schedule.close()
    return found
