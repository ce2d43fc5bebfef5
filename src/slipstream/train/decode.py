"""The logits of the next token, one token after another: keys and values of what came before are kept.

Invariant: `feed(a)` then `feed(b)` ends with the logits that the model gives the last token of a + b, to rounding.

Shapes: T tokens fed at once, H query heads, K key-value heads, h head width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.models.llama import Attention, rotary_table, rotate
from slipstream.models.stages import Stage


@dataclass
class _Past:
    """Keys and values [1, K, capacity, h] of one layer; the first `Decoder.length` rows are filled."""

    keys: Tensor
    values: Tensor


class Decoder:
    """A whole model and what it remembers of at most `capacity` tokens. Without gradients."""

    def __init__(self, model: Stage, capacity: int) -> None:
        assert model.embedding is not None, "only a whole model can write"
        assert model.head is not None, "only a whole model can write"
        config, weight = model.config, model.embedding.weight
        self.capacity, self.length = capacity, 0
        self._model = model
        self._table = rotary_table(capacity, config.head_dim, config.rope_theta, weight.device)
        shape = (1, config.kv_heads, capacity, config.head_dim)
        self._past = [_Past(weight.new_empty(shape), weight.new_empty(shape)) for _ in model.layers]

    def forget(self) -> None:
        self.length = 0

    @torch.no_grad()
    def feed(self, tokens: Sequence[int]) -> Tensor:
        """Read `tokens` after those already read; the logits [V] after the last of them.

        Several tokens only into an empty memory: what follows a prompt comes one by one.
        """
        count = len(tokens)
        assert self.length == 0 or count == 1, f"{count} tokens after {self.length}"
        assert 0 < count <= self.capacity - self.length, (count, self.length, self.capacity)
        model = self._model
        assert model.embedding is not None
        assert model.norm is not None
        assert model.head is not None
        x = model.embedding(torch.tensor([tokens], device=model.embedding.weight.device))
        for layer, past in zip(cast("list[Any]", list(model.layers.values())), self._past, strict=True):
            x = x + self._attend(layer.attention, layer.attention_norm(x), past)
            rows = layer.mlp_norm(x)
            x = x + (layer.moe(rows)[0] if model.config.experts else layer.mlp(rows))
        self.length += count
        logits = model.head(model.norm(x[:, -1]))[0]
        if model.config.document_mask and tokens[-1] == model.config.end_of_document:
            self.forget()  # the next token begins a document and sees nothing of this one
        return logits

    def _attend(self, attention: Attention, x: Tensor, past: _Past) -> Tensor:
        count, end = x.shape[1], self.length + x.shape[1]
        cos, sin = (part[self.length : end] for part in self._table)
        linears = (attention.q, attention.k, attention.v)
        q, k, v = (linear(x).view(1, count, -1, attention.head_dim) for linear in linears)
        if attention.qk_norm:
            q, k = attention.q_norm(q), attention.k_norm(k)
        past.keys[:, :, self.length : end] = rotate(k, cos, sin).transpose(1, 2)
        past.values[:, :, self.length : end] = v.transpose(1, 2)
        out = F.scaled_dot_product_attention(
            rotate(q, cos, sin).transpose(1, 2),
            past.keys[:, :, :end],
            past.values[:, :, :end],
            is_causal=count > 1,
            enable_gqa=attention.heads != attention.kv_heads,
        )
        return attention.o(out.transpose(1, 2).reshape(1, count, -1))
