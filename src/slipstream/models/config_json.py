"""The shape of a model out of the config.json of a Hugging Face folder. Imports no torch."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from slipstream.errors import UserError, install
from slipstream.formats import parse_json
from slipstream.models.sizes import ModelConfig

TRAINED = ("LlamaForCausalLM", "MixtralForCausalLM", "Qwen3ForCausalLM")
PLANNED = (*TRAINED, "Qwen3MoeForCausalLM")


def read_config(folder: Path, *, to_run: bool = True) -> ModelConfig:
    """The shape of the model in a Hugging Face folder (or of its config.json alone).

    `to_run`: anything we would compute differently is refused; for a plan only what costs counts.
    """
    raw = read_json(folder)
    try:
        return _read_config(folder, raw, to_run)
    except KeyError as error:
        raise UserError(f"{_file(folder)} does not say {error}. Is it the config of a whole model?") from None
    except (ValueError, TypeError, AttributeError) as error:
        raise _unreadable(folder, error) from None


def read_json(folder: Path) -> dict[str, Any]:
    """What the config.json of a Hugging Face folder (or that file alone) says, as it is."""
    path = _file(folder)
    if not path.is_file():
        what = "is not a Hugging Face folder: it has no config.json" if folder.is_dir() else "does not exist"
        raise UserError(f"{folder} {what}. Name the folder of a model, or its config.json.")
    try:
        found = parse_json(path.read_text(encoding="utf-8"))
    except (ValueError, TypeError, AttributeError) as error:
        raise _unreadable(folder, error) from None
    if not isinstance(found, dict):
        raise _unreadable(folder, f"it holds a {type(found).__name__}")
    return found


def read_described(folder: Path) -> dict[str, Any]:
    """As `read_json`, of a language model of any class that transformers has."""
    found = read_json(folder)
    for key, kind in (("model_type", str), ("vocab_size", int)):
        if not isinstance(found.get(key), kind):
            raise UserError(
                f"{_file(folder)} does not say {key}. Is it the config of a language model of transformers?"
            )
    return found


def require_transformers() -> None:
    if find_spec("transformers") is None:
        raise UserError(f"model.hf trains a class of transformers, which is not installed. {install('hf')}")


def _file(folder: Path) -> Path:
    return folder / "config.json" if folder.is_dir() else folder


def _unreadable(folder: Path, why: object) -> UserError:
    return UserError(f"{_file(folder)} cannot be read: {why}. Copy it anew from where the model came from.")


def differences(folder: Path) -> list[str]:
    """The settings of a model that is only planned for in which a model of ours would be another one."""
    raw = read_json(folder)
    kind = _kind(raw)
    return ([] if kind in TRAINED else [kind]) + _uncomputed(raw)


def _kind(raw: dict[str, Any]) -> str:
    return (raw.get("architectures") or ["none"])[0]


def _uncomputed(raw: dict[str, Any]) -> list[str]:
    """Settings that models of ours do not have."""
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    found = {
        "rope_type": rope.get("rope_type", "default") != "default",
        "attention_bias": bool(raw.get("attention_bias")),
        "mlp_bias": bool(raw.get("mlp_bias")),
        "hidden_act": raw.get("hidden_act", "silu") != "silu",
        "sliding_window": bool(raw.get("sliding_window")) and raw.get("use_sliding_window", True),
    }
    return [name for name, has in found.items() if has]


def _read_config(folder: Path, raw: dict[str, Any], to_run: bool) -> ModelConfig:
    kind = _kind(raw)
    if kind not in (TRAINED if to_run else PLANNED):
        raise UserError(f"{folder} holds a {kind}; only Llama, Mixtral and Qwen3 models can be read.")
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if raw["num_attention_heads"] < 1:
        raise ValueError(f"num_attention_heads is {raw['num_attention_heads']}")
    head_dim = raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"]
    if to_run and (bad := _uncomputed(raw)):
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
