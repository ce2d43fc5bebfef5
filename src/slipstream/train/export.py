"""Weights to and from a Hugging Face folder: safetensors, config.json, tokenizer files.

| model | class there |
|---|---|
| dense | LlamaForCausalLM |
| dense with QK-norm | Qwen3ForCausalLM (Llama has no QK-norm) |
| routed | MixtralForCausalLM |

Layouts agree, so tensors are renamed, never permuted; expert tensors [E, out, in] are cut into one matrix
per expert and stacked again on the way back. Only safetensors are read: no pickle, no remote code.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from slipstream.data.draft import new_folder
from slipstream.data.tokenizer import Tokenizer
from slipstream.errors import UserError
from slipstream.formats import parse_json
from slipstream.models.sizes import ModelConfig
from slipstream.models.stages import build_model

_SHARD_BYTES = 4 << 30
_TOP = {"embedding.weight": "model.embed_tokens.weight", "norm.weight": "model.norm.weight"}
_LAYER = {
    "attention.q.weight": "self_attn.q_proj.weight",
    "attention.k.weight": "self_attn.k_proj.weight",
    "attention.v.weight": "self_attn.v_proj.weight",
    "attention.o.weight": "self_attn.o_proj.weight",
    "attention.q_norm.weight": "self_attn.q_norm.weight",
    "attention.k_norm.weight": "self_attn.k_norm.weight",
    "attention_norm.weight": "input_layernorm.weight",
    "mlp_norm.weight": "post_attention_layernorm.weight",
    "mlp.gate.weight": "mlp.gate_proj.weight",
    "mlp.up.weight": "mlp.up_proj.weight",
    "mlp.down.weight": "mlp.down_proj.weight",
    "moe.router.weight": "block_sparse_moe.gate.weight",
}
_EXPERT = {"moe.gate": "w1", "moe.up": "w3", "moe.down": "w2"}


def parameter_shapes(config: ModelConfig) -> dict[str, torch.Size]:
    """Name and shape of every parameter; a tied head is the embedding and has no entry."""
    try:
        model = build_model(config, 0, "meta")
    except RuntimeError as error:  # sizes that no tensor can have
        raise UserError(f"There is no model of {config}: {error}.") from None
    return {name: tensor.shape for name, tensor in model.named_parameters()}


def _parts(config: ModelConfig, name: str) -> list[str]:
    """The names there of our tensor `name`: one, or one per expert."""
    if name == "head.weight":
        return ["lm_head.weight"]
    if name in _TOP:
        return [_TOP[name]]
    _, layer, rest = name.split(".", 2)
    prefix = f"model.layers.{layer}"
    if rest in _EXPERT:
        experts = range(config.experts)
        return [f"{prefix}.block_sparse_moe.experts.{e}.{_EXPERT[rest]}.weight" for e in experts]
    return [f"{prefix}.{_LAYER[rest]}"]


def to_hugging_face(state: Mapping[str, Tensor], config: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """Our tensors under their names there."""
    for name, shape in parameter_shapes(config).items():
        if name not in state or state[name].shape != shape:
            seen = tuple(state[name].shape) if name in state else "missing"
            raise UserError(f"The run's {name} is {seen}, but its model needs {tuple(shape)}: cannot export.")
        tensor, parts = state[name].detach().cpu(), _parts(config, name)
        slices = [tensor] if len(parts) == 1 and tensor.ndim < 3 else list(tensor.unbind(0))
        yield from ((part, piece.contiguous()) for part, piece in zip(parts, slices, strict=True))


def hugging_face_class(config: ModelConfig) -> str:
    if config.experts and config.qk_norm:
        raise UserError(
            "A routed model with QK-norm has no Hugging Face class that computes the same. "
            "Train with model.qk_norm=false to export."
        )
    kind = "Mixtral" if config.experts else "Qwen3" if config.qk_norm else "Llama"
    return f"{kind}ForCausalLM"


def hugging_face_config(config: ModelConfig, sequence: int, dtype: torch.dtype) -> dict[str, Any]:
    kind = hugging_face_class(config)
    common = {
        "architectures": [kind],
        "model_type": kind.removesuffix("ForCausalLM").lower(),
        "vocab_size": config.vocab,
        "hidden_size": config.dim,
        "intermediate_size": config.ffn,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": sequence,
        "initializer_range": config.init_std,
        "rms_norm_eps": config.norm_eps,
        # transformers 5 reads the second, earlier versions the first
        "rope_theta": config.rope_theta,
        "rope_parameters": {"rope_theta": config.rope_theta, "rope_type": "default"},
        "attention_bias": False,
        "tie_word_embeddings": config.tied,
        "torch_dtype": str(dtype).removeprefix("torch."),
        "bos_token_id": config.end_of_document,
        "eos_token_id": config.end_of_document,
    }
    if not config.experts:
        return common
    return common | {
        "num_local_experts": config.experts,
        "num_experts_per_tok": config.experts_per_token,
        "router_aux_loss_coef": config.balance_loss,
        "sliding_window": None,
    }


def write_own(
    weights: Mapping[str, Tensor], folder: Path, *, tokenizer: Path | None, dtype: torch.dtype
) -> None:
    """The weights of a user's own model, and the tokenizer."""
    tensors = ((name, tensor.detach().cpu().to(dtype).contiguous()) for name, tensor in weights.items())
    with new_folder(folder) as draft:
        _save_sharded(tensors, draft)
        if tokenizer is not None:  # which a model of one's own may have a format of its own for
            shutil.copyfile(tokenizer, draft / "tokenizer.json")


def write_transformers(
    weights: Mapping[str, Tensor],
    described: Mapping[str, Any],
    folder: Path,
    *,
    vocab: int,
    tokenizer: Path | None,
    sequence: int,
    dtype: torch.dtype,
) -> str:
    """The weights of a model of transformers, as it saves them itself; the name of its class."""
    from slipstream.models import hugging_face

    with new_folder(folder) as draft:
        end = None if tokenizer is None else Tokenizer.load(tokenizer).end_of_document
        kind = hugging_face.write(weights, described, vocab, draft, dtype, end)
        _write_tokenizer(tokenizer, draft, sequence)
    return kind


def export(
    state: Mapping[str, Tensor],
    config: ModelConfig,
    folder: Path,
    *,
    tokenizer: Path | None = None,
    sequence: int = 2048,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Write the folder. `tokenizer` is a tokenizer.json; `sequence` the length trained with."""
    described = hugging_face_config(config, sequence, dtype)
    if tokenizer is not None:
        end = Tokenizer.load(tokenizer).end_of_document
        described |= {"bos_token_id": end, "eos_token_id": end}
    with new_folder(folder) as draft:
        _save_sharded(((name, tensor.to(dtype)) for name, tensor in to_hugging_face(state, config)), draft)
        _write_json(draft / "config.json", described)
        _write_tokenizer(tokenizer, draft, sequence)


def _write_tokenizer(tokenizer: Path | None, folder: Path, sequence: int) -> None:
    if tokenizer is None:
        return
    _copy_tokenizer(tokenizer, folder)
    end = Tokenizer.load(tokenizer).end_text
    described = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": end,
        "eos_token": end,
        "model_max_length": sequence,
        "clean_up_tokenization_spaces": False,
    }
    _write_json(folder / "tokenizer_config.json", described)


def _copy_tokenizer(tokenizer: Path, folder: Path) -> None:
    """As it was used in training: it cut no text, and put nothing around one."""
    raw = parse_json(tokenizer.read_text(encoding="utf-8"))
    raw |= {"truncation": None, "padding": None, "post_processor": None}
    (folder / "tokenizer.json").write_text(json.dumps(raw, ensure_ascii=False, indent=1), encoding="utf-8")


def _save_sharded(tensors: Iterator[tuple[str, Tensor]], folder: Path) -> None:
    """One file up to 4 GiB; beyond, several and an index, holding one file's tensors at a time."""
    files: list[Path] = []
    where: dict[str, str] = {}
    held: dict[str, Tensor] = {}
    total = size = 0

    def flush() -> None:
        path = folder / f"part-{len(files)}"
        try:
            save_file(held, path, metadata={"format": "pt"})
        except SafetensorError as error:  # such as a full disk
            raise OSError(str(error)) from error
        where.update(dict.fromkeys(held, path.name))
        files.append(path)
        held.clear()

    for name, tensor in tensors:
        if held and size + tensor.nbytes > _SHARD_BYTES:
            flush()
            size = 0
        held[name] = tensor
        size, total = size + tensor.nbytes, total + tensor.nbytes
    flush()
    if len(files) == 1:
        files[0].rename(folder / "model.safetensors")
        return
    final = {p.name: f"model-{i:05d}-of-{len(files):05d}.safetensors" for i, p in enumerate(files, 1)}
    for path in files:
        path.rename(folder / final[path.name])
    weight_map = {name: final[part] for name, part in where.items()}
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    _write_json(folder / "model.safetensors.index.json", index)


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def read_weights(folder: Path, config: ModelConfig) -> dict[str, Tensor]:
    """Our names -> float32 tensors, out of every .safetensors file of the folder."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise UserError(f"{folder} has no .safetensors file. Save the model with safe_serialization=True.")
    where: dict[str, Any] = {}
    try:
        for path in files:
            opened = safe_open(path, framework="pt")
            where.update(dict.fromkeys(opened.keys(), opened))
    except (SafetensorError, OSError) as error:
        raise UserError(f"{folder} cannot be read: {error}.") from error
    state = {}
    for name, shape in parameter_shapes(config).items():
        parts = _parts(config, name)
        if missing := [part for part in parts if part not in where]:
            raise UserError(f"{folder} lacks {missing[0]}, which a model of its config.json needs.")
        tensors = [where[part].get_tensor(part).float() for part in parts]
        state[name] = torch.stack(tensors) if re.search(r"\.moe\.(gate|up|down)$", name) else tensors[0]
        if state[name].shape != shape:
            raise UserError(
                f"{folder}: {parts[0]} is {tuple(state[name].shape)}, but config.json implies {tuple(shape)}."
            )
    if config.tied:  # a model cut into stages holds the head as a tensor of its own
        state["head.weight"] = state["embedding.weight"]
    return state
