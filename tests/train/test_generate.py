"""Text from a model: the memory of keys and values changes nothing but the time it takes."""

from __future__ import annotations

import dataclasses
from typing import cast

import pytest
import torch
from tests.train.test_export import SHAPES, scrambled

from slipstream.data.tokenizer import Tokenizer
from slipstream.errors import UserError
from slipstream.models.sizes import PRESETS
from slipstream.models.stages import build_model
from slipstream.train.generate import Decoder, Trained, sample, write

TOKENS = torch.randint(0, 97, (24,), generator=torch.Generator().manual_seed(3)).tolist()


def direct(model, context: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([context]))[0, -1]


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("prompt", [1, 7])
def test_logits_are_those_of_the_whole_context(name, prompt):
    model = scrambled(SHAPES[name]).double()
    decoder = Decoder(model, len(TOKENS))
    logits = decoder.feed(TOKENS[:prompt])
    for end in range(prompt, len(TOKENS)):
        expected = direct(model, TOKENS[:end])
        assert expected.std() > 0.1
        torch.testing.assert_close(logits, expected, rtol=1e-9, atol=1e-9)
        logits = decoder.feed([TOKENS[end]])


def test_the_next_document_sees_nothing_of_the_last():
    config = dataclasses.replace(SHAPES["llama tied"], document_mask=True, end_of_document=5)
    model = scrambled(config).double()
    decoder = Decoder(model, 16)
    for end, token in enumerate([5, 8, 9, 5, 11, 12], start=1):
        logits = decoder.feed([token])
        expected = direct(model, [5, 8, 9, 5, 11, 12][:end])
        torch.testing.assert_close(
            logits, expected, rtol=0, atol=1e-6
        )  # angles at other positions, in float32
    by_hand = list(sample(model, [8, 9, 5, 11], 4, sequence=16, temperature=0))
    context = [8, 9, 5, 11]
    for token in by_hand:
        assert token == int(direct(model, context).argmax())
        context.append(token)


def test_greedy_text_is_that_of_the_model_and_the_window_halves_when_it_is_full():
    model = scrambled(SHAPES["llama tied"]).double()
    made = list(sample(model, TOKENS[:5], 20, sequence=8, temperature=0))
    window = TOKENS[:5]
    for token in made:
        assert token == int(direct(model, window).argmax())
        window = [*window, token]
        if len(window) > 8:
            window = window[-4:]
    assert len(made) == 20


def test_an_end_mark_a_seed_and_bad_settings():
    model = scrambled(SHAPES["llama tied"])
    options = {"sequence": 16, "temperature": 1.0, "top_k": 0}
    one = list(sample(model, [1, 2], 30, seed=4, **options))
    assert list(sample(model, [1, 2], 30, seed=4, **options)) == one
    assert list(sample(model, [1, 2], 30, seed=5, **options)) != one
    assert list(sample(model, [1, 2], 30, seed=4, end=one[9], **options)) == one[: one.index(one[9])]
    with pytest.raises(UserError, match="must not be negative"):
        list(sample(model, [1], 3, sequence=8, temperature=-1))


def test_extreme_temperatures_are_the_likeliest_token_and_any_of_the_likeliest():
    model = scrambled(SHAPES["llama tied"])
    greedy = list(sample(model, [1, 2], 8, sequence=16, temperature=0))
    for cold in (1e-45, 1e-38, 1e-12):
        assert list(sample(model, [1, 2], 8, sequence=16, temperature=cold)) == greedy
    for hot in (1e300, float("inf")):
        first = {
            next(sample(model, [1, 2], 1, sequence=16, temperature=hot, top_k=3, seed=seed))
            for seed in range(40)
        }
        assert first == set(Decoder(model, 2).feed([1, 2]).topk(3).indices.tolist())


def test_a_prompt_that_is_no_text_is_refused():
    trained = Trained(scrambled(SHAPES["llama tied"]), cast("Tokenizer", None), 1, 16)
    with pytest.raises(UserError, match="not UTF-8"):
        write(trained, "a\udcff", 3, temperature=0, top_k=0, seed=0)


def test_each_token_passes_the_model_once_or_twice_not_with_its_whole_window():
    model = build_model(PRESETS["cpu-default"], seed=0).eval()
    passed = []
    norm = next(module for name, module in model.named_modules() if name.endswith("mlp_norm"))
    norm.register_forward_pre_hook(lambda module, args: passed.append(args[0].shape[1]))
    assert len(list(sample(model, [1, 2, 3], 200, sequence=128))) == 200
    # A full window starts again from its second half: 203 tokens, and 64 of them again for each full window.
    assert 202 <= sum(passed) <= 203 + 2 * 64


def test_pieces_are_whole_characters_and_make_the_text():
    """Also where a character takes several tokens, and where a tokenizer writes spaces at the front of words."""
    from slipstream.train import generate

    class Bytes:
        """One token a byte."""

        end_of_document = 0

        def encode(self, text):
            return list(text.encode())

        def decode(self, ids):
            return bytes(ids).decode("utf-8", "replace")

    class Words(Bytes):
        """A token is a word, and a text does not begin with the space before its first one."""

        def decode(self, ids):
            return "".join(f" {chr(96 + i)}" for i in ids).removeprefix(" ")

    for tokenizer, ids, text in (
        (Bytes(), list("naïve — 東京".encode()), "naïve — 東京"),
        (Words(), [1, 2, 3], "a b c"),
        (Bytes(), [0xE6, 0x9D], "\ufffd"),
    ):
        made = list(generate._in_pieces(tokenizer, iter(ids)))
        assert "".join(made) == text
        assert not any(piece.endswith("\ufffd") for piece in made[:-1])
