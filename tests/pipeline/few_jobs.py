"""Jobs on data ranks that share the optimizer of few parameters: fewer than there are ranks, or scalars."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage

from slipstream import Schedule2BW, cloned_state, merge_states

M, GROUPS = 4, 7


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.scales = nn.ParameterList([nn.Parameter(torch.tensor(value)) for value in (1.0, 2.0, 0.5)])

    def forward(self, x):
        for scale in self.scales:
            x = x * scale
        return self.linear(x)


MODULES = {"one": lambda: nn.Linear(3, 3, bias=False), "scalars": Scaled}


def trained_only(module):
    return torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], lr=0.01)


def build(world, module, sharded=True, optimizer=trained_only, **options):
    """One stage; every rank is a data rank."""
    alone = [dist.new_group([rank]) for rank in range(world.size)][world.rank]
    torch.manual_seed(0)
    stage = PipelineStage(MODULES[module](), 0, 1, torch.device("cpu"), group=alone)
    return Schedule2BW(
        stage, M, lambda output, target: (output - target).square().mean(), optimizer,
        data_group=dist.group.WORLD, shard_optimizer=sharded, timeout=30, **options,
    )  # fmt: skip


def train(schedule, groups):
    for group in groups:
        x = torch.rand(2 * M, 3, generator=torch.Generator().manual_seed(group))
        schedule.step(x, target=torch.ones(2 * M, 3))
    schedule.drain()


def weights(schedule):
    with schedule.gathered_master() as master:
        return {name: p.detach().clone() for name, p in master.named_parameters()}


def run(world, module, sharded=True, stop=None, in_place=False, **options):
    """The weights after all groups; with `stop`, by way of a state that another schedule goes on from."""
    schedule = build(world, module, sharded, **options)
    train(schedule, range(stop or GROUPS))
    if stop is not None:
        states = [None] * world.size
        dist.all_gather_object(states, cloned_state(schedule.state_dict()))
        schedule.close()
        schedule = build(world, module, sharded, **options)
        saved = merge_states(states)
        if in_place:
            live = schedule.state_dict()
            for name, bank in live["banks"].items():
                for parameter, tensor in bank.items():
                    tensor.copy_(saved["banks"][name][parameter])
            saved = {**saved, "banks": live["banks"]}
        schedule.load_state_dict(saved)
        train(schedule, range(stop, GROUPS))
    found = weights(schedule)
    schedule.close()
    return found
