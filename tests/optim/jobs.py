"""Jobs that the sharding tests run in worker processes: one training of a small network, sharded or whole."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor

from slipstream.optim import build, newton_schulz


class Block(nn.Module):
    """Odd sizes: shards of unequal length, one rank's possibly empty."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 11)
        self.down = nn.Linear(11, 6, bias=False)
        self.flat = nn.Linear(6, 1, bias=False)
        self.experts = nn.Parameter(torch.zeros(3, 6, 5))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.down(torch.tanh(self.up(x))) + self.flat(x)
        return x + torch.einsum("bi,eio->bo", x, self.experts) @ torch.ones(5, 6)


def network() -> nn.Module:
    module = nn.Module()
    module.layers = nn.ModuleList([Block(), Block()])
    module.head = nn.Linear(6, 4)
    generator = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.3
    return module


def gradient(step: int, number: int, shape: torch.Size) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(100 * step + number))


def train(module: nn.Module, name: str, steps: int = 3) -> dict[str, Tensor]:
    """Steps with given gradients, the same on every rank and in every layout; whole weights at the end."""
    optimizer = build(name, module)
    for step in range(steps):
        for number, parameter in enumerate(module.parameters()):
            grad = gradient(step, number, parameter.shape)
            if isinstance(parameter, DTensor):
                grad = distribute_tensor(grad, parameter.device_mesh, parameter.placements)
            parameter.grad = grad
        optimizer.step()
    return {
        key: (p.full_tensor() if isinstance(p, DTensor) else p).detach()
        for key, p in module.named_parameters()
    }


def sharded(world, name: str, dim: int) -> dict[str, Tensor]:
    """Every parameter cut along `dim` where it has one, along 0 otherwise."""
    mesh = init_device_mesh("cpu", (world.size,))
    module = network()
    for child in module.modules():
        for key, parameter in list(child.named_parameters(recurse=False)):
            layout = [Shard(min(dim, parameter.ndim - 1))]
            child.register_parameter(key, nn.Parameter(distribute_tensor(parameter.data, mesh, layout)))
    return train(module, name)


def fsdp(world, name: str) -> dict[str, Tensor]:
    mesh = init_device_mesh("cpu", (world.size,))
    module = network()
    for layer in module.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(module, mesh=mesh)
    return train(module, name)


def whole_matrices(world, name: str) -> dict[str, Tensor]:
    """ZeRO-1 by whole matrices: a rank steps what it owns and the others take the result from it."""
    module = network()
    params = list(module.parameters())
    for number, parameter in enumerate(params):
        parameter.requires_grad_(number % world.size == world.rank)
    optimizer = build(name, module)
    assert all((p in optimizer.state) == p.requires_grad for p in params) or name != "muon"
    for step in range(3):
        for number, parameter in enumerate(params):
            parameter.grad = gradient(step, number, parameter.shape) if parameter.requires_grad else None
        optimizer.step()
        for number, parameter in enumerate(params):
            dist.broadcast(parameter.data, number % world.size)
    return {key: p.detach() for key, p in module.named_parameters()}


def orthogonalised(world) -> list[int]:
    """How many matrices each rank puts through Newton-Schulz in one step over sharded ones."""
    counts: list[int] = []
    kept = newton_schulz.orthogonalise

    def counting(stack: Tensor, steps: int) -> Tensor:
        counts.append(len(stack))
        return kept(stack, steps)

    newton_schulz.orthogonalise = counting
    try:
        fsdp(world, "muon")
    finally:
        newton_schulz.orthogonalise = kept
    return counts


def in_parts(world) -> tuple[int, bool]:
    """A step taken wait by wait: how many waits, and whether changing lr in between changed the result."""
    mesh = init_device_mesh("cpu", (world.size,))

    def step(disturb: bool) -> tuple[int, Tensor]:
        module = network()
        for layer in module.layers:
            fully_shard(layer, mesh=mesh)
        optimizer = build("muon", module.layers)
        for number, parameter in enumerate(module.layers.parameters()):
            grad = gradient(0, number, parameter.shape)
            parameter.grad = distribute_tensor(grad, mesh, [Shard(0)])
        waits = 0
        for wait in optimizer.step_in_parts():
            waits += 1
            if disturb:
                optimizer.param_groups[0]["lr"] = 100.0
            wait.wait()
        return waits, module.layers[0].up.weight.full_tensor()

    (waits, plain), (_, disturbed) = step(False), step(True)
    return waits, torch.equal(plain, disturbed)


def velocities(world) -> list[bool]:
    """Whether the velocity of each sharded parameter is this rank's part of the unsharded one."""
    mesh = init_device_mesh("cpu", (world.size,))

    def ahead(shard: bool) -> tuple[list[nn.Parameter], list[Tensor]]:
        module = network()
        if shard:
            for layer in module.layers:
                fully_shard(layer, mesh=mesh)
        params = list(module.layers.parameters())
        optimizer = build("muon", module.layers)
        for number, parameter in enumerate(params):
            grad = gradient(0, number, parameter.shape)
            parameter.grad = distribute_tensor(grad, mesh, [Shard(0)]) if shard else grad
        optimizer.step()
        return params, optimizer.velocity(params)

    (params, pieces), (_, whole) = ahead(True), ahead(False)
    parts = [distribute_tensor(v, mesh, [Shard(0)]).to_local() for v in whole]
    return [torch.equal(piece, part) for piece, part in zip(pieces, parts, strict=True)] + [bool(params)]


def two_axes(world, shape: tuple[int, ...], cuts: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """A matrix cut over a mesh of two axes, and the same one whole, after three steps."""
    mesh = init_device_mesh("cpu", (2, world.size // 2), mesh_dim_names=("data", "tensor"))
    module, plain = nn.Module(), nn.Module()
    start = gradient(9, 9, torch.Size(shape))
    module.weight = nn.Parameter(distribute_tensor(start.clone(), mesh, [Shard(cut) for cut in cuts]))
    plain.weight = nn.Parameter(start.clone())
    for each in (module, plain):
        optimizer = build("muon", each)
        for step in range(3):
            grad = gradient(step, 0, torch.Size(shape))
            each.weight.grad = (
                distribute_tensor(grad, mesh, [Shard(cut) for cut in cuts]) if each is module else grad
            )
            optimizer.step()
    return module.weight.full_tensor().detach(), plain.weight.detach()


def unfinished(world) -> None:
    """A matrix of which each rank has a summand."""
    mesh = init_device_mesh("cpu", (world.size,))
    module = nn.Linear(4, 4, bias=False)
    module.weight = nn.Parameter(DTensor.from_local(module.weight.data, mesh, [Partial()]))
    build("muon", module)
