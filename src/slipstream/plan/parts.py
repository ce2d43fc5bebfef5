"""The model as the planner sees it: an embedding, layers and a head, each with its cost on one device. Of a layer that
is cut in two, each stage has a half: the attention, or the MLP (or experts).

Figures come from shapes and the device's achieved rate, or from a profile measured on the real device:

    seconds of a part for b sequences = overhead + b * seconds per sequence,   backward = 2 * forward

With activation checkpointing the backward first repeats the forward and only a layer's input is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, floor

from slipstream.models.cut import Layers
from slipstream.models.sizes import Cost, ModelConfig, embedding_cost, half_costs, head_cost, layer_cost
from slipstream.plan.devices import Device
from slipstream.plan.memory import Precision

# The loss makes the logits' gradient in pieces, with fp32 copies of one piece at a time, then joins them.
LOSS_SCRATCH_PER_LOGIT, LOSS_SCRATCH_MOST = 12, 3 * 2**27
NORM_BACKWARD_BYTES = 5 * 4  # per value: the backward of a norm in fp32 has five copies of its input at most
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

    def share(self, computed: float, updated: float) -> Timing:
        """Of a part that does so much of the computing and of the update; a call's overhead goes with the computing."""
        return Timing(
            computed * self.forward_overhead,
            computed * self.forward_per_sequence,
            computed * self.backward_overhead,
            computed * self.backward_per_sequence,
            None if self.update is None else updated * self.update,
        )


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
    layers: tuple[Part, ...]  # all alike
    halves: tuple[Part, Part]  # of any of them: attention, MLP
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

    def timing(name: str, cost: Cost, overhead: float) -> Timing:
        seconds = cost.forward_flops * sequence / (device.peak_flops * device.efficiency)
        return timings.get(name) or Timing(overhead, seconds, 2 * overhead, 2 * seconds)

    def part(cost: Cost, timing: Timing, wide_values: int = 0, hidden: int = 0, **extra: float) -> Part:
        kept = cost.activation_bytes(precision.activation) + wide_values * wide
        return Part(
            matrices=hidden,
            others=cost.parameters - hidden,
            timing=timing,
            activation_bytes=kept * sequence,
            checkpointed_bytes=cost.activation_bytes(precision.activation, checkpointing=True) * sequence,
            working_bytes=extra.pop("working", kept) * sequence,
            backward_bytes=extra.pop("backward", 0.0) * sequence,
            scratch_bytes=extra.pop("scratch", 0.0) * sequence,
            update_flops=extra.pop("update", 0.0),
            largest=int(extra.pop("largest", 0)),
        )

    layer, overhead = layer_cost(config, sequence), device.layer_overhead
    layer_timing = timing("layer", layer, overhead)

    def half(cost: Cost, shapes: list[tuple[int, int, int]], wide_values: int, **extra: float) -> Part:
        return part(
            cost,
            layer_timing.share(cost.forward_flops / layer.forward_flops, cost.parameters / layer.parameters),
            wide_values,
            sum(count * rows * columns for count, rows, columns in shapes),
            update=sum(count * newton_schulz_flops(rows, columns) for count, rows, columns in shapes),
            **extra,
        )

    attention_cost, mlp_cost = half_costs(config, sequence)
    attention_shapes, mlp_shapes = _matrix_shapes(config)
    attention = half(
        attention_cost,
        attention_shapes,
        wide_values=config.dim,  # a norm's input
        backward=NORM_BACKWARD_BYTES * max(config.dim, config.q_dim),
        largest=config.dim * config.q_dim,
    )
    mlp = half(
        mlp_cost,
        mlp_shapes,
        wide_values=config.dim * (2 if config.experts else 1),  # the router reads fp32 too
        backward=(2 * config.ffn * max(1, config.experts_per_token) + config.dim) * precision.activation,
        largest=max(1, config.experts) * config.dim * config.ffn,
    )
    head = head_cost(config)
    return Model(
        embedding=part(embedding_cost(config), timing("embedding", embedding_cost(config), overhead / 10)),
        layers=(_joined(attention, mlp, layer_timing),) * config.layers,
        halves=(attention, mlp),
        head=part(
            head,
            timing("head", head, overhead / 3),
            wide_values=config.dim,
            working=precision.activation * config.vocab,
            scratch=LOSS_SCRATCH_PER_LOGIT * config.vocab,
        ),
        boundary_bytes=precision.activation * config.dim * sequence,
        tied_parameters=config.vocab * config.dim if config.tied else 0,
    )


def _joined(attention: Part, mlp: Part, timing: Timing) -> Part:
    """A layer that is not cut."""
    return Part(
        matrices=attention.matrices + mlp.matrices,
        others=attention.others + mlp.others,
        timing=timing,
        activation_bytes=attention.activation_bytes + mlp.activation_bytes,
        checkpointed_bytes=attention.checkpointed_bytes,  # the MLP's input is computed again
        working_bytes=attention.working_bytes + mlp.working_bytes,
        # The attention's comes second, when what the MLP had kept is gone.
        backward_bytes=max(mlp.backward_bytes, attention.backward_bytes - mlp.activation_bytes),
        scratch_bytes=0.0,
        update_flops=attention.update_flops + mlp.update_flops,
        largest=max(attention.largest, mlp.largest),
    )


def _matrix_shapes(config: ModelConfig) -> tuple[list[tuple[int, int, int]], list[tuple[int, int, int]]]:
    """(how many, rows, columns) of the hidden matrices of a layer's attention and of its MLP."""
    attention = [(2, config.dim, config.q_dim), (2, config.dim, config.kv_dim)]
    mlp = [(3 * max(1, config.experts), config.dim, config.ffn)]
    return attention, [*mlp, (1, config.experts, config.dim)] if config.experts else mlp


def newton_schulz_flops(rows: int, columns: int) -> float:
    """Five steps of X <- aX + (bA + cA^2)X with A = X X^T, on the smaller side."""
    small, large = sorted((rows, columns))
    return NEWTON_SCHULZ_STEPS * (4.0 * small * small * large + 2.0 * small**3)


def stage_parts(model: Model, layers: Layers) -> list[Part]:
    """The parts of the stage that holds `layers`: the embedding with the first, the head with the last."""
    first, last = ceil(layers.start), floor(layers.stop)
    parts = [model.embedding] if layers.start == 0 else []
    if layers.start < first:
        parts.append(model.halves[1])
    parts += model.layers[first:last]
    if last < layers.stop:
        parts.append(model.halves[0])
    return [*parts, model.head] if layers.stop == len(model.layers) else parts


def stage_seconds(parts: Sequence[Part], size: int, checkpointing: bool) -> tuple[float, float]:
    """Forward and backward of a microbatch of `size` sequences."""
    forward = sum(part.timing.forward(size) for part in parts)
    backward = sum(part.timing.backward(size) for part in parts)
    return forward, backward + (forward if checkpointing else 0.0)
