"""Jobs on a pipeline x data mesh: 2 stages x 2 data ranks."""

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage

from pipeline import tiny
from slipstream import Schedule2BW, UserError

M, GROUPS = 4, 6


def train(
    world, stages, mode, optimizer="adamw", tied=True, state=None, groups=range(GROUPS), cuts=None, **settings
):
    """Each data rank takes its half of every microbatch; returns losses, whole weights, state."""
    stage_index, data_rank = world.mesh(stages)
    degree = world.size // stages
    pipelines = [dist.new_group(list(range(d * stages, (d + 1) * stages))) for d in range(degree)]
    columns = [dist.new_group(list(range(s, world.size, stages))) for s in range(stages)]
    # With biases a sum in another order changes weights by 1e-7, without them by 2e-6: some gradients are almost zero.
    part = cuts[stage_index] if cuts else tiny.cut(stage_index, stages)
    module = tiny.Model(*part, tied=tied, bias=True)
    options = {}
    if mode == "fsdp":
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.fsdp import fully_shard

        mesh = DeviceMesh.from_group(columns[stage_index], "cpu")

        def prepare(m):
            for layer in m.layers.values():
                fully_shard(layer, mesh=mesh)
            fully_shard(m, mesh=mesh)

        options["prepare"] = prepare
    if tied and stages > 1:
        names = {0: "embedding.weight", stages - 1: "head.weight"}
        options["tied"] = {"embedding": names[stage_index]} if stage_index in names else {}
    make = tiny.OPTIMIZERS[optimizer] if optimizer in tiny.OPTIMIZERS else (lambda m: _build(optimizer, m))
    stage = PipelineStage(module, stage_index, stages, torch.device("cpu"), group=pipelines[data_rank])
    schedule = Schedule2BW(
        stage, M, tiny.loss_fn, make, max_grad_norm=0.3, data_group=columns[stage_index] if degree > 1 else None,
        shard_optimizer=mode == "zero1", timeout=120, **options, **settings,
    )  # fmt: skip
    if state is not None:
        schedule.load_state_dict(state[world.rank] if isinstance(state, list) else state)
    losses = []
    for group in groups:
        x, y = (_share(t, data_rank, degree) for t in tiny.batch(group))
        found = []
        last = stage_index == stages - 1
        schedule.step(*((x,) if stage_index == 0 else ()), **({"target": y, "losses": found} if last else {}))
        losses += [loss.item() for loss in found]
    evaluated = []
    x, y = tiny.batch(999)
    if stage_index == stages - 1:
        schedule.eval(*((x,) if stage_index == 0 else ()), target=y, losses=evaluated)
    else:
        schedule.eval(*((x,) if stage_index == 0 else ()))
    held = sum(
        p.numel() for i, p in enumerate(schedule._versions.master.parameters) if i in schedule._versions.owned
    )
    with schedule.gathered_master() as master:
        weights = {
            name: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone()
            for name, p in master.named_parameters()
        }
    return {
        "losses": losses, "weights": weights, "evaluated": [e.item() for e in evaluated], "held": held,
        "state": schedule.state_dict(), "norms": dict(schedule.grad_norms),
    }  # fmt: skip


class Experts(torch.nn.Module):
    """Rows go to one of two experts by their sign; an expert without rows has no gradient at all."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.plus, self.minus = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)

    def forward(self, x):
        rows, above = [], x[:, 0] > 0
        for expert, mine in ((self.plus, above), (self.minus, ~above)):
            if mine.any():
                rows.append(expert(x[mine]))
        return torch.cat(rows)


def experts(world, sharded=False):
    """One stage; with two data ranks each of them has rows of one sign only."""
    alone = [dist.new_group([rank]) for rank in range(world.size)][world.rank]
    stage = PipelineStage(Experts(), 0, 1, torch.device("cpu"), group=alone)
    schedule = Schedule2BW(
        stage, 2, lambda output, target: (output - target).square().mean(), tiny.adamw, max_grad_norm=0.3,
        data_group=dist.group.WORLD if world.size > 1 else None, shard_optimizer=sharded, timeout=120, cutover=2,
    )  # fmt: skip
    for group in range(6):
        rows = torch.rand(2, 4, 3, generator=torch.Generator().manual_seed(group)) + 0.1
        signed = [rows, -rows.flip(1)]
        share = signed[world.rank] if world.size > 1 else torch.cat(signed, dim=1)
        schedule.step(share.flatten(0, 1), target=torch.ones(share.shape[1] * 2, 3))
    schedule.drain()
    with schedule.gathered_master() as master:
        return {name: p.detach().clone() for name, p in master.named_parameters()}


def seeds(world, sharded):
    """One stage on each data rank, each begun from a seed of its own."""
    alone = [dist.new_group([rank]) for rank in range(world.size)][world.rank]
    torch.manual_seed(world.rank)
    stage = PipelineStage(torch.nn.Linear(3, 3), 0, 1, torch.device("cpu"), group=alone)
    schedule = Schedule2BW(
        stage, 2, lambda output, target: (output - target).square().mean(), tiny.adamw,
        data_group=dist.group.WORLD, shard_optimizer=sharded, in_flight=3, timeout=120, cutover=2,
    )  # fmt: skip
    losses = []
    for _ in range(3):
        schedule.step(torch.ones(4, 3), target=torch.zeros(4, 3), losses=(found := []))
        losses += [loss.item() for loss in found]
    if not sharded:
        schedule.drain()
    with schedule.gathered_master() as master:
        assert schedule.completed == schedule.group, "a gathered master is drained"
        return losses, master.weight.tolist()


def _share(tensor, data_rank, degree):
    """This data rank's rows of each microbatch."""
    rows = [chunk.chunk(degree)[data_rank] for chunk in tensor.chunk(M)]
    return torch.cat(rows)


def _build(name, module):
    from slipstream.optim import build

    return build(name, module, lr=0.01)


def saving(world):
    """What the user's own module says when it is saved while another rank owns some of it."""
    alone = [dist.new_group([rank]) for rank in range(world.size)][world.rank]
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    expected = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    stage = PipelineStage(module, 0, 1, torch.device("cpu"), group=alone)
    schedule = Schedule2BW(
        stage, 2, lambda output, target: (output - target).square().mean(), tiny.adamw,
        data_group=dist.group.WORLD, shard_optimizer=True, timeout=120,
    )  # fmt: skip
    try:
        module.state_dict()
        said = ""
    except UserError as error:
        said = str(error)
    with schedule.gathered_master() as whole:
        found = whole.state_dict()
        same = all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    return said, same, found.keys() == expected.keys()


def swings(group):
    """A cutover of nothing, of some and of all microbatches, all of them twice in a row."""
    return (0, 3, 4, 2, 4, 4, 1)[group % 7]
