"""Layers [first, last) of a model as one module, with the embedding or the head where asked. Either end may lie inside
a layer (`cut.py`): its attention is then on one stage and its MLP on the next.

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
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from slipstream.errors import UserError
from slipstream.models.auxiliary import AddLoss
from slipstream.models.cut import Layers, rising
from slipstream.models.llama import DenseLayer, RMSNorm, rotary_table
from slipstream.models.moe import MoE, MoELayer
from slipstream.models.sizes import ModelConfig


class Stage(nn.Module):
    """tokens [B, T] or hidden [B, T, D] -> hidden [B, T, D] or logits [B, T, V].

    With `chunked_loss` training gets (hidden, weight of the head): the loss makes the logits, some at a time.
    With `config.document_mask` the stages also hand on document numbers: (hidden, documents [B, T]).
    `router_losses` holds the last forward's [balance, z] of each routed layer, for the log.
    """

    def __init__(
        self,
        config: ModelConfig,
        first_layer: float,
        last_layer: float,
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
        halves = Layers(first_layer, last_layer).halves()
        self.layers = nn.ModuleDict({str(i): layer(config, device, *here) for i, here in halves.items()})
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
                if layer_losses is not None:
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
    first_layer: float,
    last_layer: float,
    *,
    embedding: bool,
    head: bool,
    seed: int,
    device: torch.device | str = "cpu",
) -> Stage:
    """Layers [first_layer, last_layer), initialised (on the meta device: shapes only)."""
    if not 0 <= first_layer <= last_layer <= config.layers or not rising([first_layer, last_layer + 0.5]):
        raise UserError(
            f"Layers [{first_layer}, {last_layer}) are not in a model of {config.layers} layers. "
            f"Choose 0 <= first <= last <= {config.layers}, in layers or halves of them."
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
