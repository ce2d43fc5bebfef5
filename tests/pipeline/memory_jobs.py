"""How many bytes a stage holds for each parameter, at the worst moment of a run."""

from unittest import mock

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from slipstream import Schedule2BW
from slipstream.optim import build

WIDTH, LAYERS = (
    160,
    6,
)  # a layer of 25,600 parameters beside one row of activations: the weights are what counts


class Live(TorchDispatchMode):
    """Looks at every storage that is alive after each operation; `most` is the largest sum of their bytes."""

    def __init__(self, *tensors):
        super().__init__()
        self.storages = WeakIdKeyDictionary()
        self.most = 0
        self.note(tensors)

    def note(self, tensors):
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor):
                rings = tensor.dtype == torch.uint8  # shared memory between neighbours, of a fixed size
                counts = self.storages.get(tensor.untyped_storage(), True) and not rings
                self.storages[tensor.untyped_storage()] = counts
        held = 0
        # `items` of the dictionary itself is slow; a copy, since what dies on the way takes itself out.
        for reference, counts in self.storages.data.copy().items():
            if counts and (storage := reference()) is not None:
                held += storage.nbytes()
        self.most = max(self.most, held)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        self.note(tree_leaves((args, kwargs, found)))
        return found


def stage_module():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))


def optimizer(name, module):
    if name == "sgd":
        return torch.optim.SGD(module.parameters(), lr=1e-3, momentum=0.9)
    return build(name, module, lr=1e-3)


# A layer is a bucket, and nothing is packed: here, and not in the jobs that this process runs later. Ranks that pack
# otherwise than others send each other sums of another length, which ends a process.
@mock.patch("slipstream.pipeline.compact.BUCKET_ELEMENTS", WIDTH * WIDTH)
@mock.patch("slipstream.pipeline.compact.MOST_BUCKETS", LAYERS)
@mock.patch("slipstream.pipeline.peers.SMALL_BYTES", 0)
def peak(world, stages, microbatches, name="sgd", groups=4, sharded=False, **options):
    """Bytes per parameter of this stage, without the optimizer's state: while it trains, and in an evaluation."""
    from torch.distributed.device_mesh import init_device_mesh

    ways = world.size // stages
    mesh = init_device_mesh("cpu", (ways, stages), mesh_dim_names=("dp", "pp"))
    stage = mesh.get_local_rank("pp")
    module = stage_module()
    with Live() as live:
        schedule = Schedule2BW(
            PipelineStage(module, stage, stages, torch.device("cpu"), group=mesh["pp"].get_group()), microbatches,
            lambda output, target: (output - target).float().square().mean(), lambda m: optimizer(name, m),
            bank_dtype=torch.bfloat16, max_grad_norm=1.0, mesh=mesh["dp"], shard_optimizer=sharded, timeout=60,
            **options,
        )  # fmt: skip
        live.note(p for p in module.parameters())
        x = torch.zeros(microbatches, WIDTH, dtype=torch.bfloat16)
        for group in range(groups):
            if group == 2:
                live.most = 0  # what it takes to begin is not what a run takes
            schedule.step(*((x,) if stage == 0 else ()), **({"target": x} if stage == stages - 1 else {}))
        schedule.drain()
        trained = live.most
        live.most = 0
        y = x.float()  # as the master is
        schedule.eval(*((y,) if stage == 0 else ()), **({"target": y} if stage == stages - 1 else {}))
        evaluated = live.most
        schedule.close()
    count = sum(p.numel() for p in module.parameters())
    return trained / count, evaluated / count
