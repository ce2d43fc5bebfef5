"""Llamas of other libraries in the shape of one of ours, as their users train them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.errors import UserError, install
from slipstream.models.sizes import ModelConfig
from slipstream.train.export import hugging_face_config


@dataclass(frozen=True)
class Rival:
    module: nn.Module
    loss: Callable[[Tensor], Tensor]  # of token ids [rows, sequence]


def transformers_llama(shape: ModelConfig, sequence: int, device: torch.device, compiled: bool) -> Rival:
    """With torch's attention; compiled as a whole."""
    try:
        from transformers import LlamaConfig, LlamaForCausalLM
    except ImportError:
        raise UserError(
            "transformers is not installed, so there is nothing to compare with. "
            "Install it, or set --contenders ours,ours_sync."
        ) from None
    described = hugging_face_config(shape, sequence, torch.float32)
    config = LlamaConfig(**described | {"attn_implementation": "sdpa", "use_cache": False})
    with device:
        module = LlamaForCausalLM(config).train()
    call: Any = torch.compile(module) if compiled else module
    return Rival(module, lambda tokens: call(input_ids=tokens, labels=tokens).loss)


def torchtitan_llama(shape: ModelConfig, sequence: int, device: torch.device, compiled: bool) -> Rival:
    """Each layer and the loss compiled by themselves, and one product for queries, keys and values, as torchtitan has
    it. Its own attention makes a mask of documents; torch's causal one has less to do."""
    try:
        from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm
        from torchtitan.models.common.attention import ScaledDotProductAttention
        from torchtitan.models.common.config_utils import make_ffn_config, make_gqa_config
        from torchtitan.models.llama3.model import Llama3Model, Llama3TransformerBlock
    except ImportError as error:
        raise UserError(
            f"torchtitan cannot be imported ({error}). {install('torchtitan')} "
            "Or leave titan_compiled out of --contenders."
        ) from None
    if shape.qk_norm:
        raise UserError(
            "torchtitan's Llama has no norm of queries and keys. Leave titan_compiled out of --contenders."
        )
    normal = {"weight": partial(nn.init.normal_, std=shape.init_std)}
    norm = RMSNorm.Config(
        normalized_shape=shape.dim, eps=shape.norm_eps, param_init={"weight": nn.init.ones_}
    )
    layer = Llama3TransformerBlock.Config(
        attention_norm=norm,
        ffn_norm=norm,
        attention=make_gqa_config(
            dim=shape.dim, n_heads=shape.heads, n_kv_heads=shape.kv_heads, head_dim=shape.head_dim,
            wqkv_param_init=normal, wo_param_init=normal, inner_attention=ScaledDotProductAttention.Config(),
            fuse_qkv=True, rope=ComplexRoPE.Config(dim=shape.head_dim, max_seq_len=sequence, theta=shape.rope_theta),
        ),
        feed_forward=make_ffn_config(
            dim=shape.dim, hidden_dim=shape.ffn, w1_param_init=normal, w2w3_param_init=normal
        ),
    )  # fmt: skip
    config = Llama3Model.Config(
        dim=shape.dim,
        vocab_size=shape.vocab,
        enable_weight_tying=shape.tied,
        tok_embeddings=Embedding.Config(
            num_embeddings=shape.vocab, embedding_dim=shape.dim, param_init=normal
        ),
        norm=norm,
        lm_head=Linear.Config(in_features=shape.dim, out_features=shape.vocab, param_init=normal),
        layers=[layer] * shape.layers,
    )
    with device:
        module = config.build().train()
        module.init_states()
    score: Callable[[Tensor, Tensor], Tensor] = _next_token_loss
    if compiled:
        score = torch.compile(score)
        for each in module.layers.children():
            each.compile(fullgraph=True)
    return Rival(module, lambda tokens: score(module(tokens), tokens))


def _next_token_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())
