"""Jobs on stages that were told different things, and on stages whose parameters have the same names."""

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.utils.checkpoint import checkpoint

from pipeline import tiny
from slipstream import Schedule2BW, cloned_state, merge_states

M = 4
SOONER = 10.0  # seconds: nothing here may wait that long


def build(rank, size, index=None, module=None, timeout=SOONER, **options):
    index = rank if index is None else index
    options = {"optimizer": tiny.adamw, "loss_fn": tiny.loss_fn, "n_microbatches": M} | options
    if module is None:
        module = tiny.Model(*tiny.cut(index, size), tied=False)
    return Schedule2BW(PipelineStage(module, index, size, torch.device("cpu")), timeout=timeout, **options)


def call(function, rank, size, group):
    x, y = tiny.batch(group)
    losses = []
    function(*([x] if rank == 0 else []), **({"target": y, "losses": losses} if rank == size - 1 else {}))
    return [loss.item() for loss in losses]


def in_order(world, order):
    build(world.rank, world.size, order[world.rank])


def in_a_part_of_a_mesh(world):
    """Two pipelines that average over nobody."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    index = mesh.get_local_rank("pp")
    module = tiny.Model(*tiny.cut(index, 2), tied=False)
    stage = PipelineStage(module, index, 2, torch.device("cpu"), group=mesh.get_group("pp"))
    Schedule2BW(stage, M, tiny.loss_fn, tiny.adamw, mesh=mesh["pp"], timeout=SOONER)


def told(world, name, values):
    """`values`: of the argument `name`, by stage."""
    with build(world.rank, world.size, **{name: values[world.rank]}) as schedule:
        call(schedule.step, world.rank, world.size, 0)


def evaluate_on(world, ranks, after):
    """Some ranks evaluate where the others go on."""
    schedule = build(world.rank, world.size)
    for group in range(4):
        if group == after and world.rank in ranks:
            call(schedule.eval, world.rank, world.size, 99)
        call(schedule.step, world.rank, world.size, group)
    schedule.drain()


def data_ranks_told(world, name, values):
    """`values`: of the argument `name`, by data rank of one stage."""
    from pipeline import few_jobs

    few_jobs.build(world, "one", sharded=False, **{name: values[world.rank]})


class Dropping(nn.Module):
    """One layer of a model, computed again in the backward."""

    def __init__(self, index, reentrant):
        super().__init__()
        torch.manual_seed(index)
        self.reentrant = reentrant
        self.layers = nn.ModuleDict(
            {
                str(index): nn.Sequential(
                    nn.Linear(WIDTH, 4 * WIDTH), nn.Dropout(), nn.Linear(4 * WIDTH, WIDTH)
                )
            }
        )

    def forward(self, x):
        if not x.requires_grad and torch.is_grad_enabled():
            x = x.detach().requires_grad_()  # or the reentrant kind computes no gradients
        for layer in self.layers.values():
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return x


def turns_to_eval(world, reentrant, drained):
    """Losses and norms of a run whose module leaves the training mode after two groups, and comes back."""
    module = Dropping(world.rank, reentrant)
    with build(world.rank, world.size, module=module, loss_fn=mean_square, max_grad_norm=1.0) as schedule:
        losses = []
        for group in range(6):
            if group in (2, 4):
                if drained:
                    schedule.drain()
                module.train(group == 4)
            torch.manual_seed(group)
            losses += train_same(schedule, world.rank, world.size, [group])
        schedule.drain()
        return losses, dict(schedule.grad_norms)


def torn(world, saved):
    """Each rank goes on from the state of a boundary of its own."""
    states = []
    with build(world.rank, world.size) as schedule:
        for group in range(max(saved) + 1):
            states.append(cloned_state(schedule.state_dict()))
            call(schedule.step, world.rank, world.size, group)
    schedule = build(world.rank, world.size)
    schedule.load_state_dict(states[saved[world.rank]])
    for group in range(3):
        call(schedule.step, world.rank, world.size, group)
    schedule.drain()


def torn_data_ranks(world):
    """The same of one stage's data ranks."""
    from pipeline import few_jobs

    schedule = few_jobs.build(world, "one", sharded=False)
    few_jobs.train(schedule, range(2))
    state = cloned_state(schedule.state_dict())
    few_jobs.train(schedule, range(2, 3))
    if world.rank == 1:
        schedule.load_state_dict(state)
    few_jobs.train(schedule, range(3, 5))


WIDTH = 6


def same_names(rank):
    torch.manual_seed(rank)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.LayerNorm(WIDTH))


def mean_square(output, target):
    return (output - target).square().mean()


def rows(group):
    x = torch.randn(2 * M, WIDTH, generator=torch.Generator().manual_seed(group))
    return x, x.roll(1, 1)


def build_same(rank, size):
    return build(rank, size, module=same_names(rank), loss_fn=mean_square)


def train_same(schedule, rank, size, groups):
    found = []
    for group in groups:
        x, y = rows(group)
        losses = []
        schedule.step(
            *([x] if rank == 0 else []), **({"target": y, "losses": losses} if rank == size - 1 else {})
        )
        found += [loss.item() for loss in losses]
    return found


class Shared(nn.Module):
    """A stage that is one weight, tied to that of the other."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.wte = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x):
        return self.wte(x)


def tied_by_one_name(world):
    """Losses of groups 1 to 3, gone straight through and by way of the union of both stages' states."""
    rank, size = world.rank, world.size
    ways = {}
    for way in ("straight", "merged"):
        with build(rank, size, module=Shared(), loss_fn=mean_square, tied={"wte": "wte.weight"}) as schedule:
            if way == "straight":
                train_same(schedule, rank, size, [0])
                states = [None] * size
                dist.all_gather_object(states, cloned_state(schedule.state_dict()))
            else:
                schedule.load_state_dict(merge_states(states))
            ways[way] = train_same(schedule, rank, size, range(1, 4))
    return ways["straight"], ways["merged"]


def bare(section):
    return {name.split(".", 2)[2]: value for name, value in section.items()}


def goes_on(world, way, folder):
    """Losses of groups 3 to 5, gone straight through and by way of a state in which names repeat."""
    rank, size = world.rank, world.size
    with build_same(rank, size) as straight:
        train_same(straight, rank, size, range(3))
        if way == "dcp":
            dcp.save({"engine": straight}, checkpoint_id=folder)
        state = cloned_state(straight.state_dict())
        expected = train_same(straight, rank, size, range(3, 6))
    if way == "merged":
        states = [None] * size
        dist.all_gather_object(states, state)
        state = merge_states(states)
    if way == "bare":  # of this stage, as an earlier version named it
        parts = {part: bare(state[part]) for part in ("master", "optimizer", "hyper")}
        state = state | parts | {"banks": {bank: bare(held) for bank, held in state["banks"].items()}}
        state = {
            part: held for part, held in state.items() if held != {}
        }  # as distributed checkpoints give it
    with build_same(rank, size) as again:
        for p in again.master.parameters():
            p.data.zero_()
        if way == "dcp":
            dcp.load({"engine": again}, checkpoint_id=folder)
        else:
            again.load_state_dict(state)
        found = train_same(again, rank, size, range(3, 6))
    return expected, found, state
