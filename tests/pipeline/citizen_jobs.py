"""Jobs over torch's own layouts: FSDP2, HSDP, tensor parallel, alone and together, on a pipeline of the tiny model."""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInputOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from pipeline import tiny
from slipstream import Schedule2BW

M = 4
# The mesh of one stage, and what is done on it. The pipeline dimension comes last: rank = place * stages + stage.
LAYOUTS = {
    "fsdp": ({"dp": 2}, ("fsdp",)),
    "fsdp 4": ({"dp": 4}, ("fsdp",)),
    "hsdp": ({"dp_replicate": 2, "dp_shard": 2}, ("fsdp",)),
    "replicated fsdp": ({"dp_replicate": 2, "dp_shard": 2}, ("fsdp over dp_shard",)),
    "tp": ({"tp": 2}, ("tp",)),
    "tp x dp": ({"dp": 2, "tp": 2}, ("tp",)),
    "fsdp x tp": ({"dp": 2, "tp": 2}, ("tp", "fsdp")),
    "sequence": ({"tp": 2}, ("sequence",)),
    "fsdp x sequence": ({"dp": 2, "tp": 2}, ("sequence", "fsdp")),
    "layers": ({"dp": 2}, ("fsdp layers",)),
    "root": ({"dp": 2}, ("fsdp root",)),
    "kept": ({"dp": 2}, ("fsdp kept",)),
    "dp": ({"dp": 2}, ()),
}


def optimizer(name, module):
    if name in tiny.OPTIMIZERS:
        return tiny.OPTIMIZERS[name](module)
    from slipstream.optim import build

    return build(name, module, lr=0.01)


def preparation(mesh, steps):
    """What a user does to a stage's module, as torch's tutorials do it."""
    data = [name for name in mesh.mesh_dim_names if name.startswith("dp")]

    def prepare(module):
        if "tp" in steps:
            plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            for layer in module.layers.values():
                parallelize_module(layer, mesh["tp"], plan)
        if "sequence" in steps:  # rows stand in for positions: there are as many on each rank
            plan = {
                "": PrepareModuleInputOutput(
                    input_layouts=Replicate(), desired_input_layouts=Shard(0), use_local_input=True,
                    output_layouts=Shard(0), desired_output_layouts=Replicate(), use_local_output=True,
                ),
                "norm": SequenceParallel(sequence_dim=0, use_local_output=True),
                "up": ColwiseParallel(input_layouts=Shard(0)),
                "down": RowwiseParallel(output_layouts=Shard(0)),
            }  # fmt: skip
            for layer in module.layers.values():
                parallelize_module(layer, mesh["tp"], plan)
        for step in steps:
            if not step.startswith("fsdp"):
                continue
            over = mesh["dp_shard"] if step == "fsdp over dp_shard" else mesh[tuple(data)]
            options = {"mesh": over} | ({"reshard_after_forward": False} if step == "fsdp kept" else {})
            for layer in module.layers.values() if step != "fsdp root" else ():
                fully_shard(layer, **options)
            if step != "fsdp layers":
                fully_shard(module, **options)

    return prepare


def place(world, layout, stages):
    """(stage, index among the data ranks, their number, mesh of the stage, group of the pipeline, preparation)."""
    sizes, steps = LAYOUTS[layout]
    whole = init_device_mesh("cpu", (*sizes.values(), stages), mesh_dim_names=(*sizes, "pp"))
    mesh = whole[tuple(sizes)]
    index, degree = 0, 1
    for name, size in sizes.items():
        if name.startswith("dp"):
            index, degree = index * size + mesh.get_local_rank(name), degree * size
    return whole.get_local_rank("pp"), index, degree, mesh, whole["pp"].get_group(), preparation(mesh, steps)


def share(tensor, index, degree):
    """This data rank's rows of each microbatch."""
    return torch.cat([rows.chunk(degree)[index] for rows in tensor.chunk(M)])


def whole(tensor):
    tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return tensor.detach().clone()


def build(
    world,
    layout,
    stages,
    name="adamw",
    dtype=torch.float32,
    tied=True,
    weight=1.0,
    layers=tiny.LAYERS,
    **options,
):
    stage, index, degree, mesh, group, prepare = place(world, layout, stages)
    module = tiny.Model(*tiny.cut(stage, stages, layers), tied=tied, dtype=dtype, layers=layers)
    if tied and stages > 1:
        names = {0: "embedding.weight", stages - 1: "head.weight"}
        options["tied"] = {"embedding": names[stage]} if stage in names else {}
    schedule = Schedule2BW(
        PipelineStage(module, stage, stages, torch.device("cpu"), group=group), M,
        lambda output, target: tiny.loss_fn(output, target) * weight, lambda m: optimizer(name, m),
        **{"max_grad_norm": 0.3, "cutover": M, "mesh": mesh, "prepare": prepare, "timeout": 60, **options},
    )  # fmt: skip
    return schedule, stage == 0, stage == stages - 1, index, degree


def step(schedule, first, last, index, degree, group, rows=tiny.ROWS):
    x, y = (share(t, index, degree) for t in tiny.batch(group, rows=rows))
    found = []
    schedule.step(*((x,) if first else ()), **({"target": y, "losses": found} if last else {}))
    return [loss.item() for loss in found]


def evaluate(schedule, first, last, group=999):
    x, y = tiny.batch(group)
    found = []
    schedule.eval(*((x,) if first else ()), **({"target": y, "losses": found} if last else {}))
    return [loss.item() for loss in found]


def train(world, layout, stages, name="adamw", groups=4, rows=16, evaluations=(), **options):
    """Losses, whole weights, norms and evaluations of `groups` groups of `rows` rows."""
    schedule, *seat = build(world, layout, stages, name, **options)
    losses, evaluated = [], []
    for group in range(groups):
        losses += step(schedule, *seat, group, rows)
        if group in evaluations:
            evaluated.append(evaluate(schedule, *seat[:2]))
    schedule.drain()
    norms = dict(schedule.grad_norms)
    with schedule.gathered_master() as master:
        weights = {n: whole(p) for n, p in master.named_parameters()}
    return {"losses": losses, "weights": weights, "norms": norms, "evaluated": evaluated}


class Counted(nn.Module):
    """Square layers, for counting."""

    def __init__(self, layers):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleDict({str(i): nn.Linear(4, 4) for i in range(layers)})

    def forward(self, x):
        for layer in self.layers.values():
            x = layer(x)
        return x


def gathers(world, updates=6, microbatches=8, layers=4, cutover=8):
    """All-gathers of FSDP2 per update at one stage, in the long run; and the final weights."""
    mesh = init_device_mesh("cpu", (world.size, 1), mesh_dim_names=("dp", "pp"))
    count = 0

    def prepare(module):
        nonlocal count
        for layer in module.layers.values():
            fully_shard(layer, mesh=mesh["dp"], reshard_after_forward=False)

    stage = PipelineStage(Counted(layers), 0, 1, torch.device("cpu"), group=mesh["pp"].get_group())
    schedule = Schedule2BW(
        stage, microbatches, lambda output, target: (output - target).square().mean(), tiny.adamw, mesh=mesh["dp"],
        prepare=prepare, timeout=60, cutover=cutover,
    )  # fmt: skip
    plain = {
        name: getattr(torch.distributed, name)
        for name in (
            "all_gather_single",
            "all_gather_into_tensor",
        )  # as a newer torch calls it, and an older one
        if hasattr(torch.distributed, name)
    }

    def counting(gather):
        def counted(*args, **kwargs):
            nonlocal count
            count += 1
            return gather(*args, **kwargs)

        return counted

    counts = []
    try:
        for name, gather in plain.items():
            setattr(torch.distributed, name, counting(gather))
        for group in range(updates):
            x = torch.rand(2 * microbatches, 4, generator=torch.Generator().manual_seed(group))
            schedule.step(x, target=torch.ones_like(x))
            counts.append(count)
            count = 0
        schedule.drain()
    finally:
        for name, gather in plain.items():
            setattr(torch.distributed, name, gather)
    return counts, {name: whole(p) for name, p in schedule.master.named_parameters()}


def flat(state, path=()):
    """The tensors of a state, whole, by path; other leaves as they are."""
    if isinstance(state, dict):
        return {
            key: value for name, item in state.items() for key, value in flat(item, (*path, name)).items()
        }
    return {".".join(path): whole(state) if isinstance(state, torch.Tensor) else state}


def save(world, layout, stages, folder, name="adamw", groups=3, **options):
    """Train, then save the engine with torch's distributed checkpoint. Returns the state, whole."""
    import torch.distributed.checkpoint as dcp

    schedule, *seat = build(world, layout, stages, name, **options)
    for group in range(groups):
        step(schedule, *seat, group, 16)
    dcp.save({"engine": schedule}, checkpoint_id=folder)
    return flat(schedule.state_dict())


def resume(world, layout, stages, folder, name="adamw", groups=range(3, 6), **options):
    """Load the engine with torch's distributed checkpoint and go on."""
    import torch.distributed.checkpoint as dcp

    schedule, *seat = build(world, layout, stages, name, **options)
    dcp.load({"engine": schedule}, checkpoint_id=folder)
    loaded = flat(schedule.state_dict())
    losses = [loss for group in groups for loss in step(schedule, *seat, group, 16)]
    schedule.drain()
    with schedule.gathered_master() as master:
        weights = {n: whole(p) for n, p in master.named_parameters()}
    return {"loaded": loaded, "losses": losses, "weights": weights, "norms": dict(schedule.grad_norms)}


def beside_torch(world, groups=3, scale_grads=True):
    """The same calls on torch's 1F1B and on ours with every group flushed: outputs, losses, evaluations, weights."""
    import copy

    from torch.distributed.pipelining import Schedule1F1B
    from torch.distributed.pipelining.microbatch import TensorChunkSpec

    first, last = world.rank == 0, world.rank == world.size - 1
    module = tiny.Model(*tiny.cut(world.rank, world.size), tied=False)
    stages = [
        PipelineStage(copy.deepcopy(module), world.rank, world.size, torch.device("cpu")) for _ in range(2)
    ]
    options = {"args_chunk_spec": (TensorChunkSpec(0),) if first else None, "scale_grads": scale_grads}
    theirs = Schedule1F1B(stages[0], M, loss_fn=tiny.loss_fn, **options)
    optimizer = tiny.momentum(stages[0].submod)
    ours = Schedule2BW(
        stages[1],
        M,
        tiny.loss_fn,
        tiny.momentum,
        correction="none",
        synchronous=groups,
        timeout=60,
        **options,
    )
    found = []
    for group in range(groups):
        x, y = tiny.batch(group)
        x = x.contiguous()  # torch 2.11 takes no other
        row = []
        for schedule in (theirs, ours):
            losses = []
            out = schedule.step(*((x,) if first else ()), **({"target": y, "losses": losses} if last else {}))
            row.append((out, [loss.item() for loss in losses]))
        optimizer.step()
        optimizer.zero_grad()
        found.append(row)
    x, y = tiny.batch(99)
    x = x.contiguous()
    evaluated = [
        schedule.eval(*((x,) if first else ()), **({"target": y} if last else {}))
        for schedule in (theirs, ours)
    ]
    ours.drain()
    weights = [[p.detach().clone() for p in m.parameters()] for m in (stages[0].submod, ours.master)]
    return found, evaluated, weights


def from_meta(world, ready, groups=5):
    """Stages without values until they are sharded: made real by `prepare`, or replicas and master by the caller."""
    from torch.distributed.tensor import distribute_tensor

    mesh = init_device_mesh("cpu", (world.size, 1), mesh_dim_names=("dp", "pp"))

    def shard(module):
        for layer in module.layers.values():
            fully_shard(layer, mesh=mesh["dp"])
        fully_shard(module, mesh=mesh["dp"])
        module.to_empty(device="cpu")

    def fill(module):
        shard(module)
        values = tiny.Model(tied=False).state_dict()
        with torch.no_grad():
            for name, p in module.named_parameters():
                p.copy_(distribute_tensor(values[name], p.device_mesh, p.placements))

    modules = [tiny.Model(tied=False).to("meta") for _ in range(3 if ready else 1)]
    if ready:
        fill(modules[0])
        for module in modules[1:]:
            shard(module)
    schedule = Schedule2BW(
        PipelineStage(modules[0], 0, 1, torch.device("cpu"), group=mesh["pp"].get_group()), M, tiny.loss_fn,
        tiny.adamw, mesh=mesh["dp"], max_grad_norm=0.3, timeout=60, cutover=M,
        **({"replicas": modules[1:]} if ready else {"prepare": fill}),
    )  # fmt: skip
    for group in range(groups):
        step(schedule, True, True, world.rank, world.size, group, 16)
    schedule.drain()
    return {name: whole(p) for name, p in schedule.master.named_parameters()}
