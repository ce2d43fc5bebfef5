"""The work every contender does: the same model, microbatches, loss and optimizer, whatever the schedule.

`compute` is real: transformer blocks (causal attention and MLP), four to a stage. `sleep` only waits: its
forward and backward hold a stage for a set time and leave the core free, so eight stages fit on two cores and
what is measured is the scheduler alone. `empty` does almost nothing with messages as large as `compute`'s: what is
left is the runtime. `language` is a real model (`language.py`), on the CPU or on a GPU.
Invariant: block i is the same for every contender and every split (its weights come from its index), so a contender
that cuts a stage in two does the same total work.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from slipstream.bench import language
from slipstream.distributed.world import device_for
from slipstream.errors import UserError
from slipstream.models.loss import TokenLoss
from slipstream.models.sizes import ModelConfig
from slipstream.optim.corrections import build_correction
from slipstream.schedule.asynchronous import warm_up_2bw
from slipstream.schedule.cutover import default_cutover

KINDS = ("compute", "sleep", "empty", "language")
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Work:
    """One bench setting. Shapes: hidden states are [batch, tokens, dim] per microbatch."""

    kind: str = "compute"
    stages: int = 2
    microbatches: int = 4
    max_grad_norm: float | None = None
    correction: str = "none"
    in_flight: int | None = None
    cutover: int | None = None  # of our schedule; None: its default
    link_latency_seconds: float = 0.0
    dim: int = 128
    heads: int = 4
    blocks_per_stage: int = 4
    batch: int = 2
    tokens: int = 64
    forward_seconds: float = 0.010
    backward_seconds: float = 0.020
    device: str = "cpu"
    preset: str = "smollm2-135m"  # of the language work
    head_layers: float | None = None  # layers the head is worth; None: by FLOPs
    compile: bool = False

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UserError(f"There is no work '{self.kind}'. Choose --work {' or '.join(KINDS)}.")
        if self.stages < 2:
            raise UserError(
                f"A pipeline of {self.stages} stage has no bubble to measure. Set --stages to 2 or more."
            )
        if self.microbatches < self.stages:
            raise UserError(
                f"{self.microbatches} microbatches cannot fill {self.stages} stages. "
                f"Set --microbatches to {self.stages} or more."
            )
        if not 0 <= self.link_latency_seconds < math.inf:
            raise UserError(
                f"--link-latency-ms {self.link_latency_seconds * 1e3:g} must not be negative, nor endless."
            )
        warm_up_2bw(self.stages, self.microbatches, self.in_flight)  # refuses what our schedule cannot keep
        if self.cutover is not None and not 0 <= self.cutover <= self.microbatches:
            raise UserError(
                f"--cutover {self.cutover}: of {self.microbatches} microbatches none to all can be old."
            )
        build_correction(self.correction)

    @property
    def all_old(self) -> bool:
        """Whether every microbatch reads the bank, as in PipeDream-2BW."""
        chosen = default_cutover(self.stages, self.microbatches) if self.cutover is None else self.cutover
        return chosen == self.microbatches

    @property
    def blocks(self) -> int:
        return self.stages * self.blocks_per_stage

    @property
    def model(self) -> ModelConfig:
        return language.model_of(self.preset)

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.device == "cuda" else torch.float32

    @property
    def rows(self) -> int:
        """Of one group."""
        return self.microbatches * self.batch

    def device_of(self, rank: int) -> torch.device:
        return device_for(rank) if self.device == "cuda" else CPU

    def layers(self, owners: Sequence[int]) -> list[range]:
        """The layers of each part of a language model."""
        head = self.head_layers
        if head is None:
            head = language.head_layers_by_flops(self.model, self.tokens)
        return language.cut(self.model.layers, owners, head)


def build_module(
    work: Work, part: int, parts: int, owners: Sequence[int] | None = None, device: torch.device = CPU
) -> nn.Module:
    """Part number `part` of the model cut into `parts`; `owners`: the rank of each part, by default one each."""
    if work.kind == "language":
        layers = work.layers(owners or range(parts))[part]
        first, last = part == 0, part == parts - 1
        return language.build_part(
            work.model, layers, first=first, last=last, device=device, dtype=work.dtype
        )
    size = work.blocks // parts
    indices = range(part * size, (part + 1) * size)
    if work.kind == "sleep":
        share = size / work.blocks_per_stage
        return SleepStage(indices, work.dim, work.forward_seconds * share, work.backward_seconds * share)
    if work.kind == "empty":
        return EmptyStage(indices, work.dim).to(device, work.dtype)
    return ComputeStage(indices, work.dim, work.heads).to(device, work.dtype)


def prepare(work: Work) -> Callable[[nn.Module], None] | None:
    """What is done to every copy of a module that computes."""
    return language.compile_layers if work.compile else None


def build_optimizer(module: nn.Module) -> torch.optim.Optimizer:
    """AdamW with torch's fused kernel, for every contender: the plain loop costs three times as much here."""
    return torch.optim.AdamW(module.parameters(), lr=1e-4, fused=True)


def group_input(work: Work, first: bool = True, device: torch.device = CPU) -> Tensor:
    """The m microbatches of one group, [m * batch, ...]: the model's input, or what a later stage would receive."""
    if work.kind == "language":
        if first:
            return language.tokens(work.model, work.rows, work.tokens, device, seed=1)
        return language.hidden(work.model, work.rows, work.tokens, device, work.dtype, scale=1.0)
    shape = (work.rows, *_microbatch_shape(work))
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(device, work.dtype)


def group_target(work: Work, last: bool = True, device: torch.device = CPU) -> Tensor:
    """The target of the last stage, or what an earlier stage would receive as gradients."""
    if work.kind == "language":
        if last:
            return language.tokens(work.model, work.rows, work.tokens, device, seed=2)
        return language.hidden(work.model, work.rows, work.tokens, device, work.dtype, scale=1e-6)
    shape = (work.rows, *_microbatch_shape(work))
    return torch.randn(shape, generator=torch.Generator().manual_seed(2)).to(device, work.dtype)


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    """Of hidden states, the squared error; of logits, the cross entropy of the next token."""
    if target.is_floating_point():
        return functional.mse_loss(output, target)
    return TokenLoss()(output, target)


def loss_of(work: Work) -> Callable[[Tensor, Tensor], Tensor]:
    return torch.compile(loss_fn) if work.compile else loss_fn


def _microbatch_shape(work: Work) -> tuple[int, ...]:
    return (work.dim,) if work.kind == "sleep" else (work.tokens, work.dim)


class ComputeStage(nn.Module):
    """Blocks `indices` of the model, one after the other."""

    def __init__(self, indices: range, dim: int, heads: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict()
        for index in indices:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(index)
                self.blocks[str(index)] = Block(dim, heads)

    def forward(self, hidden: Tensor) -> Tensor:
        for block in self.blocks.values():
            hidden = block(hidden)
        return hidden


class Block(nn.Module):
    """Pre-norm attention and MLP. Shapes: B batch, T tokens, D dim, H heads."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.RMSNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)
        self.mlp_norm = nn.RMSNorm(dim)
        self.up = nn.Linear(dim, 4 * dim, bias=False)
        self.down = nn.Linear(4 * dim, dim, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:  # [B, T, D]
        qkv = self.qkv(self.attention_norm(hidden)).unflatten(-1, (3, self.heads, -1))  # [B, T, 3, H, D/H]
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each [B, H, T, D/H]
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        hidden = hidden + self.out(mixed.transpose(1, 2).flatten(2))
        return hidden + self.down(functional.gelu(self.up(self.mlp_norm(hidden))))


class EmptyStage(nn.Module):
    """One addition, so that there is a graph and a gradient."""

    def __init__(self, indices: range, dim: int) -> None:
        super().__init__()
        self.shifts = nn.ParameterDict({str(index): nn.Parameter(torch.zeros(dim)) for index in indices[:1]})

    def forward(self, hidden: Tensor) -> Tensor:  # [B, T, D]
        for shift in self.shifts.values():
            hidden = hidden + shift
        return hidden


class SleepStage(nn.Module):
    """Waits instead of computing, with a graph like a layer's: an input path and a weight path.

    Half of the backward's time sits on each path, so a schedule that takes the two gradients apart
    (zero-bubble) can wait for them apart. The first stage's input needs no gradient; there the weight path
    takes all of it.
    """

    def __init__(self, indices: range, dim: int, forward_seconds: float, backward_seconds: float) -> None:
        super().__init__()
        self.forward_seconds = forward_seconds
        self.backward_seconds = backward_seconds
        self.shifts = nn.ParameterDict({str(index): nn.Parameter(torch.zeros(dim)) for index in indices})

    def forward(self, hidden: Tensor) -> Tensor:  # [B, D]
        input_share = 0.5 if hidden.requires_grad else 0.0
        hidden = _Wait.apply(hidden, self.forward_seconds, input_share * self.backward_seconds)
        shift = torch.stack(list(self.shifts.values())).sum(0)
        return hidden + _Wait.apply(shift, 0.0, (1 - input_share) * self.backward_seconds)


class _Wait(torch.autograd.Function):
    """The identity, holding its caller for a set time in the forward and in the backward."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, forward_seconds: float, backward_seconds: float) -> Tensor:
        ctx.backward_seconds = backward_seconds
        time.sleep(forward_seconds)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(ctx.backward_seconds)
        return grads[0], None, None
