"""The model as the planner sees it: an embedding, layers and a head, each with its cost on one device.

Figures come from shapes and the device's achieved rate, or from a profile measured on the real device:

    seconds of a part for b sequences = overhead + b * seconds per sequence,   backward = 2 * forward

With activation checkpointing the backward first repeats the forward and only a layer's input is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from slipstream.models.sizes import Cost, ModelConfig, embedding_cost, head_cost, layer_cost
from slipstream.plan.devices import Device
from slipstream.plan.memory import Precision

# The loss makes the logits' gradient in pieces, with fp32 copies of one piece at a time, then joins them.
LOSS_SCRATCH_PER_LOGIT, LOSS_SCRATCH_MOST = 12, 3 * 2**27
WIDE_NORMS = 2  # norms of a layer, whose input is kept in fp32
NEWTON_SCHULZ_STEPS = 5


@dataclass(frozen=True)
class Timing:
    """Seconds of one part: an overhead per call and a time per sequence, forward and backward."""

    forward_overhead: float
    forward_per_sequence: float
    backward_overhead: float
    backward_per_sequence: float
    update: float | None = None  # the optimizer's step; None: from the device's rates

    def forward(self, size: int) -> float:
        return self.forward_overhead + size * self.forward_per_sequence

    def backward(self, size: int) -> float:
        return self.backward_overhead + size * self.backward_per_sequence


@dataclass(frozen=True)
class Part:
    """One unit of the model. Bytes are per sequence."""

    matrices: int  # parameters in hidden matrices
    others: int  # all other parameters
    timing: Timing
    activation_bytes: float
    checkpointed_bytes: float
    working_bytes: float  # alive only while this part runs its backward; of a layer, what it computes again
    backward_bytes: float  # the same of a layer: gradients of what it computed
    scratch_bytes: float  # the same, but never more than LOSS_SCRATCH_MOST in all
    update_flops: float  # Newton-Schulz of its matrices
    largest: int = 0  # parameters of its largest hidden matrix, or stack of experts

    @property
    def parameters(self) -> int:
        return self.matrices + self.others


@dataclass(frozen=True)
class Model:
    """The parts in order, and what travels between two stages for one sequence."""

    embedding: Part
    layers: tuple[Part, ...]
    head: Part
    boundary_bytes: float
    tied_parameters: int  # whose gradients the first and the last stage add up


def build_model(
    config: ModelConfig,
    sequence: int,
    device: Device,
    precision: Precision,
    timings: dict[str, Timing] | None = None,
) -> Model:
    """The parts of `config`; `timings` ("embedding", "layer", "head") replace the rates of the device."""
    timings = timings or {}

    wide = 4 - precision.activation  # what fp32 adds to a value kept in the activations' precision

    def part(name: str, cost: Cost, hidden: int, overhead: float, **extra: float) -> Part:
        kept = cost.activation_bytes(precision.activation) + extra.pop("wide_values", 0) * wide
        seconds = cost.forward_flops * sequence / (device.peak_flops * device.efficiency)
        return Part(
            matrices=hidden,
            others=cost.parameters - hidden,
            timing=timings.get(name) or Timing(overhead, seconds, 2 * overhead, 2 * seconds),
            activation_bytes=kept * sequence,
            checkpointed_bytes=cost.activation_bytes(precision.activation, checkpointing=True) * sequence,
            working_bytes=extra.pop("working", 0.0) * sequence,
            backward_bytes=extra.pop("backward", 0.0) * sequence,
            scratch_bytes=extra.pop("scratch", 0.0) * sequence,
            update_flops=extra.pop("update", 0.0),
            largest=int(extra.pop("largest", 0)),
        )

    layer = layer_cost(config, sequence)
    shapes = _matrix_shapes(config)
    hidden = sum(count * rows * columns for count, rows, columns in shapes)
    flops = sum(count * newton_schulz_flops(rows, columns) for count, rows, columns in shapes)
    overhead = device.layer_overhead
    wide_values = config.dim * (WIDE_NORMS + (1 if config.experts else 0))  # the router reads fp32 too
    recomputed = layer.activation_bytes(precision.activation) + wide_values * wide
    gradients = (2 * config.ffn * max(1, config.experts_per_token) + config.dim) * precision.activation
    layer_part = part(
        "layer", layer, hidden, overhead, wide_values=wide_values, working=recomputed, backward=gradients,
        update=flops, largest=max(config.dim * config.q_dim, max(1, config.experts) * config.dim * config.ffn),
    )  # fmt: skip
    return Model(
        embedding=part("embedding", embedding_cost(config), 0, overhead / 10),
        layers=(layer_part,) * config.layers,
        head=part(
            "head",
            head_cost(config),
            0,
            overhead / 3,
            wide_values=config.dim,
            working=precision.activation * config.vocab,
            scratch=LOSS_SCRATCH_PER_LOGIT * config.vocab,
        ),
        boundary_bytes=precision.activation * config.dim * sequence,
        tied_parameters=config.vocab * config.dim if config.tied else 0,
    )


def _matrix_shapes(config: ModelConfig) -> list[tuple[int, int, int]]:
    """(how many, rows, columns) of a layer's hidden matrices."""
    experts = max(1, config.experts)
    shapes = [
        (2, config.dim, config.q_dim),
        (2, config.dim, config.kv_dim),
        (3 * experts, config.dim, config.ffn),
    ]
    return [*shapes, (1, config.experts, config.dim)] if config.experts else shapes


def newton_schulz_flops(rows: int, columns: int) -> float:
    """Five steps of X <- aX + (bA + cA^2)X with A = X X^T, on the smaller side."""
    small, large = sorted((rows, columns))
    return NEWTON_SCHULZ_STEPS * (4.0 * small * small * large + 2.0 * small**3)


def stage_parts(model: Model, layers: range) -> list[Part]:
    """The parts of the stage that holds `layers`: the embedding with the first, the head with the last."""
    parts = [model.embedding] if layers.start == 0 else []
    parts += model.layers[layers.start : layers.stop]
    return [*parts, model.head] if layers.stop == len(model.layers) else parts


def stage_seconds(parts: Sequence[Part], size: int, checkpointing: bool) -> tuple[float, float]:
    """Forward and backward of a microbatch of `size` sequences."""
    forward = sum(part.timing.forward(size) for part in parts)
    backward = sum(part.timing.backward(size) for part in parts)
    return forward, backward + (forward if checkpointing else 0.0)
