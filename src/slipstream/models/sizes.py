"""Model shapes, presets, and exact counts: parameters, FLOPs and activations. Imports no torch.

Everything that has to know how big a part of a model is (the stage splitter, the planner, utilisation in
the logs) reads it here. FLOPs are those of the matrix products alone (2 per multiply-add), attention
counted over the keys a token may see: (T + 1) / 2 on average under the causal mask.

    forward FLOPs per token = 2 * active matrix parameters + layers * 2 * (T + 1) * heads * head_dim
    training FLOPs per token = 3 * forward        (the backward pass costs two forwards)
"""

from __future__ import annotations

from dataclasses import Field, dataclass, fields, replace
from sys import float_info
from typing import Any

from slipstream.errors import ConfigError, UserError, did_you_mean

FP8_SIDE = 16  # sides of matrices that GPUs multiply in fp8 are multiples of it
LARGEST = 2**40  # of any size of a model


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a Llama-style decoder; `experts > 0` makes every MLP a routed mixture."""

    vocab: int
    dim: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int  # width of the MLP, or of one expert
    head_width: int | None = None  # of one attention head; None: dim / heads
    tied: bool = True  # the head starts equal to the embedding and is kept equal by the update
    qk_norm: bool = False
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    init_std: float = 0.02
    experts: int = 0
    experts_per_token: int = 0
    balance_loss: float = 0.01  # coefficient of the load-balancing loss, mean over layers
    router_z_loss: float = 0.001
    document_mask: bool = False  # attention does not cross `end_of_document` tokens
    end_of_document: int = 0

    def __post_init__(self) -> None:
        if problems := list(_problems(self)):
            raise ConfigError(problems)

    @property
    def head_dim(self) -> int:
        return self.head_width or self.dim // self.heads

    @property
    def q_dim(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_dim(self) -> int:
        return self.kv_heads * self.head_dim


def _problems(config: ModelConfig):
    if wrong := [problem for field in fields(config) if (problem := _wrong_kind(config, field))]:
        yield from wrong
        return
    for name in ("vocab", "dim", "layers", "heads", "kv_heads", "ffn"):
        if getattr(config, name) < 1:
            yield f"model.{name} is {getattr(config, name)}; it must be at least 1."
            return
    if config.head_width is not None and (config.head_width < 2 or config.head_width % 2):
        yield f"model.head_width is {config.head_width}; rotary positions need an even width. Set 2 or more."
    elif config.head_width is None and (config.dim % config.heads or config.head_dim % 2):
        yield (
            f"model.dim {config.dim} does not give {config.heads} heads an even width. "
            f"Set model.dim to a multiple of {2 * config.heads}, or model.head_width."
        )
    if config.heads % config.kv_heads:
        yield (
            f"{config.heads} query heads cannot share {config.kv_heads} key-value heads. "
            f"Set model.kv_heads to a divisor of {config.heads}."
        )
    if config.experts and not 1 <= config.experts_per_token <= config.experts:
        yield (
            f"model.experts_per_token is {config.experts_per_token} with {config.experts} experts. "
            f"Set it between 1 and {config.experts}."
        )
    if config.experts and (config.dim % 8 or config.ffn % 8):
        yield (
            f"Routed experts of {config.dim} x {config.ffn} cannot use the grouped matrix product. "
            "Set model.dim and model.ffn to multiples of 8."
        )
    if config.experts_per_token and not config.experts:
        yield "model.experts_per_token has no effect without model.experts. Set model.experts too."
    if config.document_mask and not 0 <= config.end_of_document < config.vocab:
        yield f"model.end_of_document {config.end_of_document} is outside the vocabulary of {config.vocab}."


def _wrong_kind(config: ModelConfig, field: Field) -> str:
    """A config.json or a checkpoint may say anything."""
    value, kind = getattr(config, field.name), str(field.type)
    if value is None and "None" in kind:
        return ""
    if kind == "bool":
        good, wanted = isinstance(value, bool), "true or false"
    elif kind == "float":
        good, wanted = isinstance(value, int | float) and abs(value) <= float_info.max, "a number"
    else:
        good, wanted = isinstance(value, int) and abs(value) <= LARGEST, "a whole number of a usual size"
    good = good and (kind == "bool" or not isinstance(value, bool))
    return "" if good else f"model.{field.name} is {value!r:.60}; it must be {wanted}."


def _qwen3(
    dim: int, layers: int, heads: int, ffn: int, *, kv_heads: int = 8, tied: bool = False, **experts: Any
) -> ModelConfig:
    shape: dict[str, Any] = {"head_width": 128, "qk_norm": True, "rope_theta": 1e6, "norm_eps": 1e-6}
    return ModelConfig(151936, dim, layers, heads, kv_heads, ffn, tied=tied, **shape, **experts)


PRESETS: dict[str, ModelConfig] = {
    # 1.3M parameters: the fewest bits per byte of the embedded corpus after a fixed minute of one CPU core,
    # against half the vocabulary, six layers, or a width of 192.
    "cpu-default": ModelConfig(vocab=4096, dim=128, layers=4, heads=4, kv_heads=2, ffn=384),
    # For studies of delay on one device: 8.1M and 42.1M parameters, untied.
    "llama-8m": ModelConfig(vocab=8192, dim=256, layers=6, heads=4, kv_heads=4, ffn=512, tied=False),
    "llama-42m": ModelConfig(vocab=16384, dim=512, layers=8, heads=8, kv_heads=8, ffn=1376, tied=False),
    # The cost of llama-42m per token (42.5M active), eight experts, two at a time.
    "moe-94m": ModelConfig(
        vocab=16384,
        dim=512,
        layers=8,
        heads=8,
        kv_heads=8,
        ffn=704,
        tied=False,
        experts=8,
        experts_per_token=2,
    ),
    # The published SmolLM2 shapes.
    "smollm2-135m": ModelConfig(
        vocab=49152, dim=576, layers=30, heads=9, kv_heads=3, ffn=1536, rope_theta=100_000.0
    ),
    "smollm2-360m": ModelConfig(
        vocab=49152, dim=960, layers=32, heads=15, kv_heads=5, ffn=2560, rope_theta=100_000.0
    ),
    "smollm2-1.7b": ModelConfig(
        vocab=49152, dim=2048, layers=24, heads=32, kv_heads=32, ffn=8192, rope_theta=130_000.0
    ),
    # 10.1B parameters, 1.6B of them active: 32 experts of the width of the model, four at a time.
    "moe-10b": ModelConfig(
        vocab=49152,
        dim=2048,
        layers=24,
        heads=16,
        kv_heads=8,
        ffn=2048,
        rope_theta=100_000.0,
        experts=32,
        experts_per_token=4,
    ),
    # Shapes as their authors published them, to plan with. They differ from Llama-3.1 and later in nothing that costs.
    "llama3-8b": ModelConfig(128256, 4096, 32, 32, 8, 14336, tied=False, rope_theta=500_000.0),
    "llama3-70b": ModelConfig(128256, 8192, 80, 64, 8, 28672, tied=False, rope_theta=500_000.0),
    "qwen3-0.6b": _qwen3(1024, 28, 16, 3072, tied=True),
    "qwen3-1.7b": _qwen3(2048, 28, 16, 6144, tied=True),
    "qwen3-4b": _qwen3(2560, 36, 32, 9728, tied=True),
    "qwen3-8b": _qwen3(4096, 36, 32, 12288),
    "qwen3-14b": _qwen3(5120, 40, 40, 17408),
    "qwen3-32b": _qwen3(5120, 64, 64, 25600),
    "qwen3-30b-a3b": _qwen3(2048, 48, 32, 768, kv_heads=4, experts=128, experts_per_token=8),
    "mixtral-8x7b": ModelConfig(
        32000, 4096, 32, 32, 8, 14336, tied=False, rope_theta=1e6, experts=8, experts_per_token=2
    ),
    "mixtral-8x22b": ModelConfig(
        32768, 6144, 56, 48, 8, 16384, tied=False, rope_theta=1e6, experts=8, experts_per_token=2
    ),
}


def preset(name: str, **overrides: Any) -> ModelConfig:
    """The preset called `name`, with some fields replaced."""
    if name not in PRESETS:
        hint = did_you_mean(name, PRESETS)
        raise UserError(f"There is no model preset '{name}'.{hint} Presets: {', '.join(PRESETS)}.")
    return replace(PRESETS[name], **overrides)


@dataclass(frozen=True)
class Cost:
    """What one part of a model costs. FLOPs and activations are per token, FLOPs of one forward."""

    parameters: int
    active_parameters: int  # those one token uses
    forward_flops: float
    activation_values: int  # numbers kept from the forward for the backward
    checkpointed_values: int  # the same when only the part's input is kept

    def activation_bytes(self, bytes_per_value: int, checkpointing: bool = False) -> int:
        return bytes_per_value * (self.checkpointed_values if checkpointing else self.activation_values)


def embedding_cost(config: ModelConfig) -> Cost:
    count = config.vocab * config.dim
    return Cost(count, config.dim, 0.0, 0, 0)


def head_cost(config: ModelConfig) -> Cost:
    """Final norm and output matrix. The logits stay alive until the loss has been differentiated."""
    kept = 3 * config.dim + config.vocab
    matrix = config.vocab * config.dim
    return Cost(
        parameters=matrix + config.dim,
        active_parameters=matrix + config.dim,
        forward_flops=2.0 * matrix,
        activation_values=kept,
        checkpointed_values=kept,
    )


def _attention_matrices(config: ModelConfig) -> int:
    return 2 * config.dim * config.q_dim + 2 * config.dim * config.kv_dim


def attention_flops(config: ModelConfig, sequence: int) -> float:
    """A layer's attention, per token of one forward."""
    return 2.0 * _attention_matrices(config) + 2.0 * (sequence + 1) * config.q_dim


def half_costs(config: ModelConfig, sequence: int) -> tuple[Cost, Cost]:
    """A decoder layer's attention, and its MLP or experts, each with its norm."""
    matrices = _attention_matrices(config)
    norms = config.dim + (2 * config.head_dim if config.qk_norm else 0)
    # What eager autograd keeps. The residual, normalised, scaled. q, k, v and attention's result.
    kept = 3 * config.dim + 2 * config.q_dim + 2 * config.kv_dim
    if config.qk_norm:  # before the norm, and normalised
        kept += 2 * (config.q_dim + config.kv_dim)
    attention = Cost(
        parameters=matrices + norms,
        active_parameters=matrices + norms,
        forward_flops=attention_flops(config, sequence),
        activation_values=kept,
        checkpointed_values=config.dim,
    )
    expert = 3 * config.dim * config.ffn
    router = config.dim * config.experts
    copies = config.experts_per_token if config.experts else 1
    # As above. Gate, its activation, up and their product.
    kept = 3 * config.dim + copies * 4 * config.ffn
    if config.experts:  # the rows gathered for the experts, and what each expert returns
        kept += copies * 2 * config.dim + 2 * config.experts
    mlp = Cost(
        parameters=max(1, config.experts) * expert + router + config.dim,
        active_parameters=copies * expert + router + config.dim,
        forward_flops=2.0 * (copies * expert + router),
        activation_values=kept,
        checkpointed_values=config.dim,
    )
    return attention, mlp


def layer_cost(config: ModelConfig, sequence: int) -> Cost:
    """One decoder layer at sequence length `sequence`."""
    attention, mlp = half_costs(config, sequence)
    return Cost(
        parameters=attention.parameters + mlp.parameters,
        active_parameters=attention.active_parameters + mlp.active_parameters,
        forward_flops=attention.forward_flops + mlp.forward_flops,
        activation_values=attention.activation_values + mlp.activation_values,
        checkpointed_values=config.dim,  # the MLP's input is computed again
    )


def parameters(config: ModelConfig) -> int:
    """Distinct parameters: a tied head is not counted a second time."""
    total = config.layers * layer_cost(config, 1).parameters + head_cost(config).parameters
    return total if config.tied else total + embedding_cost(config).parameters


def active_parameters(config: ModelConfig) -> int:
    """Parameters one token is multiplied with (all but the embedding, for a dense model)."""
    layers = config.layers * layer_cost(config, 1).active_parameters
    return layers + head_cost(config).active_parameters


def forward_flops_per_token(config: ModelConfig, sequence: int) -> float:
    return config.layers * layer_cost(config, sequence).forward_flops + head_cost(config).forward_flops


def flops_per_token(config: ModelConfig, sequence: int) -> float:
    """Training FLOPs per token: forward and backward."""
    return 3.0 * forward_flops_per_token(config, sequence)
