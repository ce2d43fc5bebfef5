"""Text from a run: the master of its newest checkpoint as one module on one process.

next token ~ softmax(logits / temperature) over the k likeliest
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.data.tokenizer import Tokenizer
from slipstream.errors import UserError
from slipstream.models.llama import Attention, rotary_table, rotate
from slipstream.models.stages import Stage
from slipstream.train.master import load_master, whole_model


@dataclass(frozen=True)
class Trained:
    """A run ready to write text."""

    model: Stage
    tokenizer: Tokenizer
    step: int
    sequence: int


def load_trained(run: str | Path) -> Trained:
    """The master of the newest good checkpoint of a run."""
    master = load_master(run)
    if master.described is not None:
        raise UserError(
            f"'{run}' trained a model of transformers, which writes text itself: `slipstream export {run} FOLDER`, "
            "then transformers.pipeline('text-generation', 'FOLDER')."
        )
    if master.model is None:
        raise UserError(
            f"'{run}' trained a model of your own ({master.config.model.module}), which only you can run. "
            f"`slipstream export {run} FOLDER` writes its weights for `load_state_dict`."
        )
    if master.tokenizer is None:
        raise UserError(
            f"'{run}' has no tokenizer: its data came without a tokenizer.json. Put one beside it."
        )
    model = whole_model(master).eval()
    assert isinstance(model, Stage)
    return Trained(model, Tokenizer.load(master.tokenizer), master.step, master.config.data.sequence)


@dataclass
class _Past:
    """Keys and values [1, K, capacity, h] of one layer; the first `Decoder.length` rows are filled."""

    keys: Tensor
    values: Tensor


class Decoder:
    """A whole model and the keys and values it keeps of at most `capacity` tokens. Without gradients.

    Invariant: `feed(a)` then `feed(b)` ends with the logits that the model gives the last token of a + b, to rounding.
    """

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


def sample(
    model: Stage,
    prompt: list[int],
    tokens: int,
    *,
    sequence: int,
    temperature: float = 0.8,
    top_k: int = 40,
    seed: int = 0,
    end: int | None = None,
) -> Iterator[int]:
    """Token by token, from at most `sequence` tokens of context, as in training.

    When the context is full its older half is dropped and the rest read again, so that a token costs one row of
    the model and not the whole window.
    """
    if temperature < 0 or top_k < 0:
        raise UserError(f"temperature = {temperature} and top_k = {top_k} must not be negative.")
    generator = torch.Generator(device=next(model.parameters()).device).manual_seed(seed)
    decoder = Decoder(model, sequence)
    context = _last_document(model, prompt)[-sequence:]
    logits = decoder.feed(context)
    for made in range(1, tokens + 1):
        token = _choose(logits.float(), temperature, top_k, generator)
        if token == end:
            return
        yield token
        if made == tokens:
            return
        context = [*context[-sequence:], token]
        if decoder.length == decoder.capacity:
            decoder.forget()
            logits = decoder.feed(context[-max(1, sequence // 2) :])
        else:
            logits = decoder.feed([token])


def _last_document(model: Stage, prompt: list[int]) -> list[int]:
    """What the last token of the prompt can see."""
    if not model.config.document_mask:
        return prompt
    ends = [i for i, token in enumerate(prompt[:-1]) if token == model.config.end_of_document]
    return prompt[ends[-1] + 1 :] if ends else prompt


def _choose(logits: Tensor, temperature: float, top_k: int, generator: torch.Generator) -> int:
    if bool(torch.isnan(logits).any()) or not bool(torch.isfinite(logits.max())):
        raise UserError("The model's answer is not finite: its weights are too large to compute with.")
    if temperature == 0:
        return int(logits.argmax())
    if top_k and top_k < logits.numel():
        threshold = logits.topk(top_k).values[-1]
        logits = logits.masked_fill(logits < threshold, float("-inf"))
    # The likeliest token at 0, and a temperature float32 can hold: no quotient is then infinity over infinity.
    logits = (logits - logits.max()) / min(max(temperature, 1e-30), 1e30)
    return int(torch.multinomial(torch.softmax(logits, dim=-1), 1, generator=generator))


def write(trained: Trained, prompt: str, tokens: int, *, temperature: float, top_k: int, seed: int) -> str:
    """The continuation of `prompt`, as text."""
    return "".join(pieces(trained, prompt, tokens, temperature=temperature, top_k=top_k, seed=seed))


def pieces(
    trained: Trained, prompt: str, tokens: int, *, temperature: float, top_k: int, seed: int
) -> Iterator[str]:
    """The same text piece by piece, each when its last token is there.

    A character may take several tokens: what ends within one is held back until it is whole.
    """
    try:
        prompt.encode()
    except UnicodeEncodeError as error:  # bytes of a command line that are no UTF-8 come as lone surrogates
        raise UserError(
            f"The prompt is not UTF-8 text (position {error.start}). Write it in UTF-8."
        ) from None
    ids = trained.tokenizer.encode(prompt) or [trained.tokenizer.end_of_document]
    made = sample(
        trained.model,
        ids,
        tokens,
        sequence=trained.sequence,
        temperature=temperature,
        top_k=top_k,
        seed=seed,
        end=trained.tokenizer.end_of_document,
    )
    yield from _in_pieces(trained.tokenizer, made)


def _in_pieces(tokenizer: Tokenizer, made: Iterator[int]) -> Iterator[str]:
    decode = tokenizer.decode
    # `told`: tokens whose text is out, of which the last piece is kept: what follows may hang on it.
    told, fresh = [], []
    for token in made:
        fresh.append(token)
        before, text = decode(told), decode([*told, *fresh])
        if not text.endswith("\ufffd"):
            yield text[len(before) :]
            told, fresh = fresh, []
    if fresh:
        yield decode([*told, *fresh])[len(decode(told)) :]
