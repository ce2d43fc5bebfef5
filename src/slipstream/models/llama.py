"""The dense decoder: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

Names, layouts and arithmetic are those of Hugging Face's Llama, so that export needs no permutation.
Nothing here knows of pipelines. A forward changes no state: the rotary table is a function of the
sequence length, so replicas of a layer may run in any order.

Shapes: B sequences, T tokens, D model width, H query heads, K key-value heads, h head width, V vocabulary.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slipstream.models.sizes import ModelConfig


class RMSNorm(nn.Module):
    """y = w * x / sqrt(mean(x^2) + eps), the mean in float32 at least."""

    def __init__(self, dim: int, eps: float, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim, device=device))

    def forward(self, x: Tensor) -> Tensor:
        wide = x if x.dtype == torch.float64 else x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return wide.type_as(x) * self.weight.type_as(x)


def rotary_table(length: int, head_dim: int, theta: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin [T, h] of position * theta^(-2i/h), in float32; both halves of h hold the same angles."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        # A graph outlives the cache's memory.
        return _rotary_table.__wrapped__(length, head_dim, theta, device)
    return _rotary_table(length, head_dim, theta, device)


@lru_cache(maxsize=8)  # ten launches a forward otherwise
def _rotary_table(length: int, head_dim: int, theta: float, device: torch.device) -> tuple[Tensor, Tensor]:
    with torch.inference_mode(False):  # made in an evaluation, they must serve a training as well
        exponent = torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim
        position = torch.arange(length, device=device, dtype=torch.float32)
        angle = torch.outer(position, theta**-exponent)
        angle = torch.cat((angle, angle), dim=-1)
        return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (x_i, x_{i + h/2}) of x [B, T, H, h] by their positions' angles.

    Written by halves: a compiler turns this and its backward into one plain pass over x, which it does not do
    for the usual x cos + (-x_high, x_low) sin.
    """
    low, high = x.chunk(2, dim=-1)
    cos, sin = (table[:, None, : low.shape[-1]] for table in (cos, sin))
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1).type_as(x)


class Attention(nn.Module):
    def __init__(self, config: ModelConfig, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = config.heads, config.kv_heads, config.head_dim
        self.q = nn.Linear(config.dim, config.q_dim, bias=False, device=device)
        self.k = nn.Linear(config.dim, config.kv_dim, bias=False, device=device)
        self.v = nn.Linear(config.dim, config.kv_dim, bias=False, device=device)
        self.o = nn.Linear(config.q_dim, config.dim, bias=False, device=device)
        if config.qk_norm:
            self.q_norm = RMSNorm(config.head_dim, config.norm_eps, device)
            self.k_norm = RMSNorm(config.head_dim, config.norm_eps, device)
        self.qk_norm = config.qk_norm

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None) -> Tensor:
        b, t, _ = x.shape
        if self._can_join():
            q, k, v = self._joined(x, cos, sin)
        else:
            q, k, v = (linear(x).view(b, t, -1, self.head_dim) for linear in (self.q, self.k, self.v))
            if self.qk_norm:
                q, k = self.q_norm(q), self.k_norm(k)
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=self.heads != self.kv_heads
        )
        return self.o(out.transpose(1, 2).reshape(b, t, -1))

    def _can_join(self) -> bool:
        """In compiled code, where it is faster (docs/notes/trainer.md), and of plain products of plain tensors: what
        another library has put here (fp8, shards) is called as it is."""
        if not torch.compiler.is_compiling() or self.qk_norm:
            return False
        linears = (self.q, self.k, self.v)
        return all(
            type(x) is nn.Linear and type(x.weight) is nn.Parameter and x.bias is None for x in linears
        )

    def _joined(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q and k rotated, and v, of one product and one rotation; so the gradient of x is one product too. Parameters
        stay apart. v is copied, or the backward would keep all that the product made for its sake."""
        b, t, _ = x.shape
        joined = F.linear(x, torch.cat((self.q.weight, self.k.weight, self.v.weight)))
        turning = self.heads + self.kv_heads
        qk, v = joined.view(b, t, -1, self.head_dim).split((turning, self.kv_heads), dim=2)
        q, k = rotate(qk, cos, sin).split((self.heads, self.kv_heads), dim=2)
        return q, k, v.clone()


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x))"""

    def __init__(self, config: ModelConfig, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.gate = nn.Linear(config.dim, config.ffn, bias=False, device=device)
        self.up = nn.Linear(config.dim, config.ffn, bias=False, device=device)
        self.down = nn.Linear(config.ffn, config.dim, bias=False, device=device)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate(x), self.up(x)
        return self.down(F.silu(gate) * up)


class DenseLayer(nn.Module):
    """Attention and MLP, each beside a residual; where a stage ends inside the layer, one of them."""

    def __init__(
        self,
        config: ModelConfig,
        device: torch.device | str | None = None,
        attention: bool = True,
        mlp: bool = True,
    ) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.dim, config.norm_eps, device) if attention else None
        self.attention = Attention(config, device) if attention else None
        self.mlp_norm = RMSNorm(config.dim, config.norm_eps, device) if mlp else None
        self.mlp = MLP(config, device) if mlp else None

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None) -> Tensor:
        if self.attention_norm is not None and self.attention is not None:
            x = x + self.attention(self.attention_norm(x), cos, sin, mask)
        if self.mlp_norm is not None and self.mlp is not None:
            x = x + self.mlp(self.mlp_norm(x))
        return x
