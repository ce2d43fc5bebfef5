"""Layers [first, last) of a model as one module, with the embedding or the head where asked.

Parameter names are global (`layers.7.mlp.up.weight` wherever layer 7 lives) and every tensor is drawn
from (seed, its global name): how the model is cut changes neither names nor initial weights.

Auxiliary losses of routed layers never travel between stages. With total loss L = mean over microbatches
of (loss + aux), a stage adds weight * d aux / d theta in its own backward, where `weight` is what the
engine multiplies a microbatch's loss with before differentiating: 1/m for an engine that seeds the
backward with 1/m, 1 for one that divides the finished gradients by m.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate, pairwise

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from slipstream.errors import UserError
from slipstream.models.auxiliary import AddLoss
from slipstream.models.llama import DenseLayer, RMSNorm, rotary_table
from slipstream.models.moe import MoE, MoELayer
from slipstream.models.sizes import ModelConfig, head_cost, layer_cost


class Stage(nn.Module):
    """tokens [B, T] or hidden [B, T, D] -> hidden [B, T, D] or logits [B, T, V].

    With `chunked_loss` training gets (hidden, weight of the head): the loss makes the logits, some at a time.
    With `config.document_mask` the stages also hand on document numbers: (hidden, documents [B, T]).
    `router_losses` holds the last forward's [balance, z] of each routed layer, for the log.
    """

    def __init__(
        self,
        config: ModelConfig,
        first_layer: int,
        last_layer: int,
        *,
        embedding: bool,
        head: bool,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        self.config = config
        self.activation_checkpointing = False
        self.chunked_loss = False
        self.auxiliary_weight = 1.0
        self.router_losses: Tensor | None = None
        self._rotary_table = rotary_table
        layer = MoELayer if config.experts else DenseLayer
        self.embedding = nn.Embedding(config.vocab, config.dim, device=device) if embedding else None
        self.layers = nn.ModuleDict({str(i): layer(config, device) for i in range(first_layer, last_layer)})
        self.norm = RMSNorm(config.dim, config.norm_eps, device) if head else None
        self.head = nn.Linear(config.dim, config.vocab, bias=False, device=device) if head else None
        if config.tied and self.embedding is not None and self.head is not None:
            self.head.weight = self.embedding.weight

    def forward(self, x: Tensor, documents: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        config = self.config
        cos, sin = self._rotary_table(x.shape[1], config.head_dim, config.rope_theta, x.device)
        if self.embedding is not None:
            if config.document_mask:
                documents = document_numbers(x, config.end_of_document)
            x = self.embedding(x)
        mask = None if documents is None else document_mask(documents)
        losses = []
        for layer in self.layers.values():
            if self.activation_checkpointing and torch.is_grad_enabled():
                # Nothing here is random, and the state of a generator cannot be read while a graph is recorded.
                x = checkpoint(layer, x, cos, sin, mask, use_reentrant=False, preserve_rng_state=False)
            else:
                x = layer(x, cos, sin, mask)
            if config.experts:
                x, layer_losses = x
                losses.append(layer_losses)
        if losses:
            x = self._add_router_losses(x, torch.stack(losses))
        if self.head is not None and self.norm is not None:
            x = self.norm(x)
            return (x, self.head.weight) if self.chunked_loss and torch.is_grad_enabled() else self.head(x)
        return x if documents is None else (x, documents)

    def prepare_for_compiler(self) -> None:
        """To be called before a stage or its layers are compiled. The compiler is loaded here and not before: it
        takes seconds, and most processes compile nothing."""
        self._rotary_table = _rotary_table_outside_graphs()
        for module in self.modules():
            if isinstance(module, MoE):
                module.prepare_for_compiler()

    def _add_router_losses(self, x: Tensor, losses: Tensor) -> Tensor:
        self.router_losses = losses.detach()
        # Numbers of the host stay there: as a tensor they would be copied to the device, which waits for its queue.
        balance, z = losses.unbind(-1)
        weighted = self.config.balance_loss * balance + self.config.router_z_loss * z
        return AddLoss.apply(x, weighted.sum() / self.config.layers, self.auxiliary_weight)


@cache
def _rotary_table_outside_graphs() -> Callable[..., tuple[Tensor, Tensor]]:
    """Compiled together, every layer would take cosines again instead of reading them."""
    return torch.compiler.disable(rotary_table)


def document_numbers(tokens: Tensor, end_of_document: int) -> Tensor:
    """For each position, how many documents ended before it; the end mark belongs to the document it ends."""
    ends = (tokens == end_of_document).to(torch.int64)
    return ends.cumsum(1) - ends


def document_mask(documents: Tensor) -> Tensor:
    """[B, 1, T, T], True where a query may see a key: same document, not later."""
    t = documents.shape[1]
    causal = torch.ones(t, t, dtype=torch.bool, device=documents.device).tril()
    return ((documents.unsqueeze(1) == documents.unsqueeze(2)) & causal).unsqueeze(1)


def build_stage(
    config: ModelConfig,
    first_layer: int,
    last_layer: int,
    *,
    embedding: bool,
    head: bool,
    seed: int,
    device: torch.device | str = "cpu",
) -> Stage:
    """Layers [first_layer, last_layer), initialised (on the meta device: shapes only)."""
    if not 0 <= first_layer <= last_layer <= config.layers:
        raise UserError(
            f"Layers [{first_layer}, {last_layer}) are not in a model of {config.layers} layers. "
            f"Choose 0 <= first <= last <= {config.layers}."
        )
    stage = Stage(config, first_layer, last_layer, embedding=embedding, head=head, device=device)
    for name, parameter in stage.named_parameters():
        parameter.slipstream_role = _role(name, parameter)  # pyrefly: ignore[missing-attribute]
    if torch.device(device).type != "meta":
        initialise(stage, config, seed)
    return stage


def build_model(config: ModelConfig, seed: int, device: torch.device | str = "cpu") -> Stage:
    """The whole model as one stage."""
    return build_stage(config, 0, config.layers, embedding=True, head=True, seed=seed, device=device)


def _role(name: str, parameter: nn.Parameter) -> str:
    if parameter.ndim == 1:
        return "vector"
    return {"embedding.weight": "embedding", "head.weight": "head"}.get(name, "matrix")


@torch.no_grad()
def initialise(stage: nn.Module, config: ModelConfig, seed: int) -> None:
    """Normal weights of `init_std`; matrices that write into the residual are scaled by 1/sqrt(2 layers)."""
    for name, parameter in stage.named_parameters():
        if parameter.ndim == 1:
            parameter.fill_(1.0)
            continue
        source = "embedding.weight" if config.tied and name == "head.weight" else name
        writes_residual = name.endswith(("attention.o.weight", "mlp.down.weight", "moe.down"))
        std = config.init_std / math.sqrt(2 * config.layers) if writes_residual else config.init_std
        digest = hashlib.sha256(f"{seed}:{source}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        # Drawn on the CPU in float32, so that every device and dtype starts from the same numbers.
        parameter.copy_(torch.empty(parameter.shape).normal_(0.0, std, generator=generator))


def split(
    config: ModelConfig, num_stages: int, boundaries: Sequence[int] | None = None, sequence: int = 1024
) -> list[range]:
    """The layers of each stage: cut at `boundaries` (the first layers of stages 1, 2, ...), or balanced."""
    if not 1 <= num_stages <= config.layers:
        raise UserError(
            f"{config.layers} layers cannot form {num_stages} stages of at least one layer. "
            f"Set pipeline.stages between 1 and {config.layers}."
        )
    if boundaries is None:
        boundaries = _balanced(config, num_stages, sequence)
    edges = [0, *boundaries, config.layers]
    if len(edges) != num_stages + 1 or any(a >= b for a, b in pairwise(edges)):
        raise UserError(
            f"pipeline.boundaries {list(boundaries)} do not cut {config.layers} layers into {num_stages} "
            f"stages. List {num_stages - 1} increasing layer numbers between 1 and {config.layers - 1}."
        )
    return [range(a, b) for a, b in pairwise(edges)]


def measured_cut(seconds: Sequence[float], layers: Sequence[range]) -> tuple[list[int], float]:
    """The boundaries by which the slowest of these stages would be quickest, and what part of its time would be left.

    `seconds`: what each stage takes, in any unit. Layers are taken to cost the same, as much as those of the stages
    between the first and the last do; what these two take beyond their layers is the embedding's and the head's.
    """
    sizes = [len(part) for part in layers]
    stages = len(sizes)
    if stages == 1:
        return [], 1.0
    plain = range(1, stages - 1) if stages > 2 else range(1)
    layer = sum(seconds[stage] for stage in plain) / sum(sizes[stage] for stage in plain)
    first, last = (seconds[stage] - layer * sizes[stage] for stage in (0, -1))

    def slowest(cut: list[int]) -> float:
        return max(
            layer * size + first * (at == 0) + last * (at == stages - 1) for at, size in enumerate(cut)
        )

    total, between = sum(sizes), stages - 2
    cuts = [
        [begin, *(_even(total - begin - end, between)), end]
        for begin in range(1, total - between)
        for end in (range(1, total - begin - between + 1) if between else [total - begin])
    ]
    best = min([sizes, *cuts], key=slowest)  # as it is, unless another is better
    return list(accumulate(best[:-1])), slowest(best) / max(seconds)


def _even(layers: int, stages: int) -> list[int]:
    size, longer = divmod(layers, stages) if stages else (0, 0)
    return [size + (at < longer) for at in range(stages)]


def _balanced(config: ModelConfig, num_stages: int, sequence: int) -> list[int]:
    """Boundaries whose costliest stage is cheapest. All layers cost the same, the head sits on the last
    stage and the embedding is a lookup, so only the size of the last stage is open."""
    layer = layer_cost(config, sequence).forward_flops
    head = head_cost(config).forward_flops
    if num_stages == 1:
        return []

    def costliest(last: int) -> float:
        return max(layer * last + head, layer * math.ceil((config.layers - last) / (num_stages - 1)))

    last = min(range(1, config.layers - num_stages + 2), key=costliest)
    return list(accumulate(_even(config.layers - last, num_stages - 1)))
