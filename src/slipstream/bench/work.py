"""The work every contender does: the same model, microbatches, loss and optimizer, whatever the schedule.

    compute    transformer blocks, four to a stage
    sleep      waits for a set time and leaves the core free: any P on two cores, the scheduler alone is measured
    empty      almost nothing, with messages as large as `compute`'s: what is left is the runtime
    language   a real model (`language.py`), on the CPU or on a GPU

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
from slipstream.models.sizes import ModelConfig, head_cost, layer_cost, preset
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
                f"--stages {self.stages}: fewer than two have no bubble to measure. Set --stages to 2 or more."
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
        if self.batch < 1 or self.tokens < 1:
            raise UserError(f"--rows {self.batch} and --sequence {self.tokens} must be at least 1.")
        if self.compile and self.kind != "language":
            raise UserError("--compile compiles a model's layers. Add --work language.")
        warm_up_2bw(self.stages, self.microbatches, self.in_flight)  # refuses what our schedule cannot keep
        if self.cutover is not None and not 0 <= self.cutover <= self.microbatches:
            raise UserError(
                f"--cutover {self.cutover}: of {self.microbatches} microbatches none to all can be old."
            )
        if self._whole and self.cutover not in (None, self.microbatches):
            raise UserError(
                f"--cutover {self.cutover}: --correction {self.correction} takes a gradient that is old throughout. "
                "Drop one of them."
            )

    @property
    def old(self) -> int:
        """How many microbatches read the bank: what was given, or what a run takes."""
        if self.cutover is not None:
            return self.cutover
        usual = default_cutover(self.stages, self.microbatches, self.device == "cpu")
        return self.microbatches if self._whole else usual

    @property
    def _whole(self) -> bool:
        """Whether the correction takes a gradient that is old throughout."""
        return build_correction(self.correction).corrects_gradient

    @property
    def all_old(self) -> bool:
        """As in PipeDream-2BW."""
        return self.old == self.microbatches

    @property
    def model(self) -> ModelConfig:
        return preset(self.preset, tied=False)

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.device == "cuda" else torch.float32

    def device_of(self, rank: int) -> torch.device:
        return device_for(rank) if self.device == "cuda" else CPU

    def layers(self, owners: Sequence[int]) -> list[range]:
        """The layers of each part of a language model."""
        head = self.head_layers
        if head is None:
            head = head_cost(self.model).forward_flops / layer_cost(self.model, self.tokens).forward_flops
        return language.cut(self.model.layers, owners, head)

    def module(
        self, part: int, parts: int, owners: Sequence[int] | None = None, device: torch.device = CPU
    ) -> nn.Module:
        """Part number `part` of the model cut into `parts`; `owners`: the rank of each part, by default one each."""
        if self.kind == "language":
            layers = self.layers(owners or range(parts))[part]
            first, last = part == 0, part == parts - 1
            return language.build_part(
                self.model, layers, first=first, last=last, device=device, dtype=self.dtype
            )
        size = self.stages * self.blocks_per_stage // parts
        indices = range(part * size, (part + 1) * size)
        if self.kind == "sleep":
            share = size / self.blocks_per_stage
            return SleepStage(indices, self.dim, self.forward_seconds * share, self.backward_seconds * share)
        if self.kind == "empty":
            return EmptyStage(indices, self.dim).to(device, self.dtype)
        return ComputeStage(indices, self.dim, self.heads).to(device, self.dtype)

    def prepare(self, module: nn.Module) -> None:
        """What is done to every copy of a module that computes."""
        if self.compile:
            language.compile_layers(module)

    def loss(self) -> Callable[[Tensor, Tensor], Tensor]:
        return torch.compile(loss_fn) if self.compile else loss_fn

    def inputs(self, device: torch.device = CPU, first: bool = True) -> Tensor:
        """The m microbatches of one group, [m * batch, ...]: the model's, or what a later stage would receive."""
        return self._group(1, first, 1.0, device)

    def targets(self, device: torch.device = CPU, last: bool = True) -> Tensor:
        """Those of the last stage, or what an earlier one would receive as gradients."""
        return self._group(2, last, 1e-6, device)

    def _group(self, seed: int, own: bool, scale: float, device: torch.device) -> Tensor:
        rows = self.microbatches * self.batch
        if self.kind != "language":
            shape = (rows, self.dim) if self.kind == "sleep" else (rows, self.tokens, self.dim)
            return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, self.dtype)
        if own:
            return language.tokens(self.model, rows, self.tokens, device, seed)
        return language.hidden(self.model, rows, self.tokens, device, self.dtype, scale)


def build_optimizer(module: nn.Module) -> torch.optim.Optimizer:
    """AdamW with torch's fused kernel, for every contender: the plain loop costs three times as much here."""
    return torch.optim.AdamW(module.parameters(), lr=1e-4, fused=True)


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    """Of hidden states, the squared error; of logits, the cross entropy of the next token."""
    if target.is_floating_point():
        return functional.mse_loss(output, target)
    return TokenLoss()(output, target)


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
