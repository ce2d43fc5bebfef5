"""Text to token ids and back: a byte-level BPE of Hugging Face `tokenizers`, trained here or loaded.

Every byte has a token of its own, so any text survives encode and decode. A vocabulary of 257 (the bytes
and the end mark) is therefore a plain byte tokenizer.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from slipstream.errors import DataError

END_OF_DOCUMENT = "<|endoftext|>"
SMALLEST_VOCAB = 257
_LONG = 4096  # characters
_KINDS = (r"[^\W_]", r"(?:[^\w\s]|_)", r"\s")  # a word of the tokenizer is of one of them
# All in one pass, and without a step back: a search for long words would look at each from each of its characters.
_ORDINARY = re.compile("(?:" + "|".join(rf"{kind}{{1,{_LONG - 1}}}+(?!{kind})" for kind in _KINDS) + ")*+")
_WORD = re.compile("|".join(rf"{kind}++" for kind in _KINDS))
_AT_ONCE = 1 << 20  # characters


def check_vocab(vocab: int) -> None:
    if vocab < SMALLEST_VOCAB:
        raise DataError(f"A vocabulary of {vocab} cannot hold all bytes. Ask for {SMALLEST_VOCAB} or more.")


def without_long_words(text: str) -> Iterator[str]:
    """The text, cut inside what is no word to anyone (a genome, a line of dashes), since to train a tokenizer on a word
    takes the square of its length; and a very long one in parts, since it takes a hundred bytes for each of its own."""
    start = at = 0
    while at < len(text):
        limit = min(at + _AT_ONCE, len(text))
        at = _end(_ORDINARY, text, at, limit)
        if at < limit:
            end = _end(_WORD, text, at, limit)
            for cut in range(at, end, _LONG):
                if cut > start:
                    yield text[start:cut]
                start = cut
            at = end
        if at == limit < len(text):
            yield text[start:at]
            start = at
    yield text[start:]


def _end(pattern: re.Pattern[str], text: str, start: int, limit: int) -> int:
    found = pattern.match(text, start, limit)
    assert found is not None, (pattern.pattern, text[start : start + 20])
    return found.end()


class Tokenizer:
    """`encode`, `decode`, `vocab_size`, and the id that ends a document."""

    def __init__(self, inner: tokenizers.Tokenizer) -> None:
        self.inner = inner
        inner.encode_special_tokens = True  # an end mark spelled out in a text is text, not an end
        inner.no_truncation()  # a file may carry the length its model was served with: that would cut every document
        inner.no_padding()
        ends = (END_OF_DOCUMENT, "</s>", "<|end_of_text|>", "<eos>")
        ids = [i for i in map(inner.token_to_id, ends) if i is not None]
        if not ids:
            raise DataError(f"The tokenizer has no end-of-document token: none of {', '.join(ends)}.")
        self.end_of_document = ids[0]
        self.end_text = inner.id_to_token(ids[0])

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""
        return max(self.inner.get_vocab().values()) + 1

    def encode(self, text: str) -> list[int]:
        return self.inner.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Uses all cores."""
        return [item.ids for item in self.inner.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode(self, ids: Sequence[int]) -> str:
        return self.inner.decode(list(ids), skip_special_tokens=False)

    def save(self, path: str | Path) -> None:
        self.inner.save(str(path))

    @classmethod
    def load(cls, path: str | Path) -> Tokenizer:
        """From a `tokenizer.json`, or a folder that holds one."""
        path = Path(path)
        path = path / "tokenizer.json" if path.is_dir() else path
        if not path.is_file():
            raise DataError(f"There is no tokenizer at {path}. Give a tokenizer.json, or train one.")
        try:
            return cls(tokenizers.Tokenizer.from_file(str(path)))
        except DataError:
            raise
        except Exception as error:  # the library raises bare Exception for anything it cannot parse
            raise DataError(f"{path} is not a tokenizer that `tokenizers` can read: {error}") from error

    @classmethod
    def train(cls, texts: Iterable[str], vocab: int, show_progress: bool = False) -> Tokenizer:
        """A byte-level BPE of at most `vocab` tokens; id 0 ends a document."""
        check_vocab(vocab)
        inner = tokenizers.Tokenizer(models.BPE())
        inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        inner.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab,
            special_tokens=[END_OF_DOCUMENT],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=show_progress,
        )
        inner.train_from_iterator((part for text in texts for part in without_long_words(text)), trainer)
        return cls(inner)
