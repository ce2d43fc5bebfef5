"""The shape of a model out of the config.json of a Hugging Face folder. Imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from slipstream.errors import UserError
from slipstream.formats import parse_json
from slipstream.models.sizes import ModelConfig


def read_config(folder: Path, *, to_run: bool = True) -> ModelConfig:
    """The shape of the model in a Hugging Face folder (or of its config.json alone).

    `to_run`: anything we would compute differently is refused; for a plan only what costs counts.
    """
    path = folder / "config.json" if folder.is_dir() else folder
    if not path.is_file():
        what = "is not a Hugging Face folder: it has no config.json" if folder.is_dir() else "does not exist"
        raise UserError(f"{folder} {what}. Name the folder of a model, or its config.json.")
    try:
        return _read_config(folder, parse_json(path.read_text(encoding="utf-8")), to_run)
    except KeyError as error:
        raise UserError(f"{path} does not say {error}. Is it the config of a whole model?") from None
    except (ValueError, TypeError, AttributeError) as error:
        raise UserError(
            f"{path} cannot be read: {error}. Copy it anew from where the model came from."
        ) from None


def _read_config(folder: Path, raw: dict[str, Any], to_run: bool) -> ModelConfig:
    kind = (raw.get("architectures") or ["none"])[0]
    known = ("LlamaForCausalLM", "MixtralForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM")
    if kind not in (known[:3] if to_run else known):
        raise UserError(f"{folder} holds a {kind}; only Llama, Mixtral and Qwen3 models can be read.")
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    head_dim = raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"]
    refused = {
        "rope_type": rope.get("rope_type", "default") != "default",
        "attention_bias": bool(raw.get("attention_bias")),
        "mlp_bias": bool(raw.get("mlp_bias")),
        "hidden_act": raw.get("hidden_act", "silu") != "silu",
        "sliding_window": bool(raw.get("sliding_window")) and raw.get("use_sliding_window", True),
    }
    if to_run and (bad := [name for name, wrong in refused.items() if wrong]):
        raise UserError(f"{folder} uses settings this package does not compute: {', '.join(bad)}.")
    end = raw.get("eos_token_id")
    routed = kind in ("MixtralForCausalLM", "Qwen3MoeForCausalLM")
    fits = head_dim * raw["num_attention_heads"] == raw["hidden_size"]
    return ModelConfig(
        vocab=raw["vocab_size"],
        dim=raw["hidden_size"],
        layers=raw["num_hidden_layers"],
        heads=raw["num_attention_heads"],
        kv_heads=raw.get("num_key_value_heads") or raw["num_attention_heads"],
        ffn=raw.get("moe_intermediate_size") or raw["intermediate_size"],
        head_width=None if fits else head_dim,
        tied=raw.get("tie_word_embeddings", False),
        qk_norm=kind.startswith("Qwen3"),
        rope_theta=float(rope.get("rope_theta") or raw.get("rope_theta", 10_000.0)),
        norm_eps=raw.get("rms_norm_eps", 1e-6),
        init_std=raw.get("initializer_range", 0.02),
        experts=raw.get("num_local_experts") or raw["num_experts"] if routed else 0,
        experts_per_token=raw["num_experts_per_tok"] if routed else 0,
        end_of_document=end if isinstance(end, int) else 0,
    )
