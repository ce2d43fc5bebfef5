"""A real language model as the bench's work: decoder layers, embedding, head and loss of a preset.

The head counts as so many layers (measured, `balance.py`, or by its FLOPs), and each rank gets an equal share of the
whole, also where a schedule puts two parts on it. Embedding and head are not tied: no contender exchanges their
gradients. Weights are drawn on the device, from their global names: how the model is cut does not change them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise, starmap
from zlib import crc32

import torch
from torch import Tensor, nn

from slipstream.errors import UserError
from slipstream.models.sizes import ModelConfig
from slipstream.models.stages import Stage


def cut(layers: int, owners: Sequence[int], head_layers: float) -> list[range]:
    """The layers of each part. `owners`: the rank of each part in the order of the model, one or two a rank."""
    stages = max(owners) + 1
    if layers < stages:
        raise UserError(f"{layers} layers cannot fill {stages} stages. Set --stages to {layers} or fewer.")
    with_head = min(
        range(1, layers - stages + 2),
        key=lambda n: max(n + head_layers, math.ceil((layers - n) / (stages - 1))),
    )
    rest, longer = divmod(layers - with_head, stages - 1)
    others = [rank for rank in range(stages) if rank != owners[-1]]
    shares = {rank: rest + (place < longer) for place, rank in enumerate(others)} | {owners[-1]: with_head}
    parts_a_rank = len(owners) // stages
    edges = [0]
    for part, rank in enumerate(owners):
        half = shares[rank] // parts_a_rank
        size = half if rank in owners[:part] or parts_a_rank == 1 else shares[rank] - half
        if not size and part != len(owners) - 1:
            raise UserError(
                f"{layers} layers and the head cannot fill {len(owners)} parts on {stages} ranks."
            )
        edges.append(edges[-1] + size)
    return list(starmap(range, pairwise(edges)))


def build_part(
    model: ModelConfig, layers: range, *, first: bool, last: bool, device: torch.device, dtype: torch.dtype
) -> Stage:
    """Layers `layers`, with the embedding in the first part and the head in the last."""
    stage = Stage(model, layers.start, layers.stop, embedding=first, head=last, device=device)
    with torch.no_grad():
        for name, parameter in stage.named_parameters():
            if parameter.ndim > 1:
                generator = torch.Generator(device).manual_seed(crc32(name.encode()))
                parameter.normal_(0.0, model.init_std, generator=generator)
    return stage.to(dtype)


def tokens(model: ModelConfig, rows: int, length: int, device: torch.device, seed: int) -> Tensor:
    return torch.randint(model.vocab, (rows, length), generator=torch.Generator().manual_seed(seed)).to(
        device
    )


def hidden(
    model: ModelConfig, rows: int, length: int, device: torch.device, dtype: torch.dtype, scale: float
) -> Tensor:
    """Stands for a neighbour's activations, or for its gradients, where there is no neighbour."""
    generator = torch.Generator(device).manual_seed(1)
    return torch.randn((rows, length, model.dim), generator=generator, device=device, dtype=dtype) * scale


def compile_layers(module: nn.Module) -> None:
    """Compile each decoder layer; all of them share one compiled function."""
    if isinstance(module, Stage):
        module.prepare_for_compiler()
        for layer in module.layers.values():
            layer.compile()
