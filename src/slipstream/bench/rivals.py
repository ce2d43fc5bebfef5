"""Llamas of other libraries in the shape of one of ours, as their users train them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from slipstream.errors import UserError, install
from slipstream.models.sizes import ModelConfig
from slipstream.train.export import hugging_face_config


@dataclass(frozen=True)
class Rival:
    module: nn.Module
    loss: Callable[[Tensor], Tensor]  # of token ids [rows, sequence]


@contextmanager
def transformers_llama(
    shape: ModelConfig, sequence: int, device: torch.device, compiled: bool, narrow: bool = False
) -> Iterator[Rival]:
    """With torch's attention, compiled as a whole, float32 weights under autocast on a GPU (`narrow`: bfloat16 weights,
    which is faster and loses small updates)."""
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
        module: nn.Module = LlamaForCausalLM(config).train()
    if narrow:
        module.to(torch.bfloat16)
    call: Any = torch.compile(module) if compiled else module
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda" and not narrow)

    def loss(tokens: Tensor) -> Tensor:
        with autocast:
            return call(input_ids=tokens, labels=tokens).loss

    yield Rival(module, loss)


@contextmanager
def torchtitan_llama(
    shape: ModelConfig, sequence: int, device: torch.device, compiled: bool
) -> Iterator[Rival]:
    """Each layer and the loss compiled by themselves, one product for queries, keys and values, and bfloat16 by FSDP2
    on a group of one rank, as torchtitan has it. Two things differ: its default attention, which makes a mask of
    documents, is replaced by torch's causal one (in torchtitan's order of kernels), which has less to do; and the loss
    is of whole logits and not in chunks."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard  # seconds to import

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
    with _one_rank(device):
        narrow = torch.bfloat16 if device.type == "cuda" else None
        policy = MixedPrecisionPolicy(param_dtype=narrow, reduce_dtype=torch.float32)
        for part in (*module.layers.children(), module):
            fully_shard(part, mp_policy=policy, reshard_after_forward=False)
        yield Rival(module, lambda tokens: score(module(tokens), tokens))


@contextmanager
def _one_rank(device: torch.device) -> Iterator[None]:
    """A process group of this process alone."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _next_token_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())
