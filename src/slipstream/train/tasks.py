"""Tasks for lm_eval (EleutherAI's lm-evaluation-harness) out of a run's held-out text.

| task | what it asks | what it reports |
|---|---|---|
| `held_out_windows` | the windows that our validation reads | `nats_per_token`, our validation loss; `bits_per_byte` |
| `held_out_documents` | whole documents from their beginning | `bits_per_byte`, `byte_perplexity`, `word_perplexity` |
| `held_out_choice` | which of four texts goes on from a beginning, one is the real one | `acc`, `acc_norm` |

lm_eval speaks text, not tokens: a window is asked only if its text is cut into the same tokens again (at its edges a
merge may come out otherwise, or a letter be cut in two). `Written` says which were asked and how many left out.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from slipstream.data.tokenizer import Tokenizer
from slipstream.data.tokens import TokenDataset
from slipstream.errors import UserError

CHOICES = 4
SEED = 0
_SHARED = """\
dataset_path: json
dataset_kwargs:
  data_files: {{test: {data}}}
test_split: test
metadata: {{version: 1.0}}
"""
_WINDOWS = """\
task: held_out_windows
output_type: loglikelihood
doc_to_text: "{{context}}"
doc_to_target: "{{continuation}}"
target_delimiter: ""
process_results: !function held_out_functions.of_window
metric_list:
  - {metric: nats_per_token, aggregation: !function held_out_functions.mean, higher_is_better: false}
  - {metric: bits_per_byte, aggregation: bits_per_byte, higher_is_better: false}
"""
_DOCUMENTS = """\
task: held_out_documents
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list:
  - metric: bits_per_byte
  - metric: byte_perplexity
  - metric: word_perplexity
"""
_CHOICE = """\
task: held_out_choice
output_type: multiple_choice
doc_to_text: "{{context}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
target_delimiter: ""
metric_list:
  - {metric: acc, aggregation: mean, higher_is_better: true}
  - {metric: acc_norm, aggregation: mean, higher_is_better: true}
"""
_FUNCTIONS = '''\
"""What lm_eval reports of a window: written with the tasks, and asked by them."""


def of_window(doc, results):
    likelihood, _ = results[0]
    return {"nats_per_token": (likelihood, doc["tokens"]), "bits_per_byte": (likelihood, doc["bytes"])}


def mean(items):
    return -sum(likelihood for likelihood, _ in items) / sum(tokens for _, tokens in items)
'''


@dataclass(frozen=True)
class Written:
    """`windows`: the tokens [sequence + 1] of those that are asked; `left_out`: those whose text is cut otherwise."""

    windows: list[list[int]]
    left_out: int
    documents: int
    questions: int


def write_tasks(folder: Path, dataset: TokenDataset, tokenizer: Tokenizer, windows: int) -> Written:
    """Write tasks of the first `windows` windows of the split, in its order, into a new folder."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} already exists. Choose another folder for the tasks, or delete it first.")
    rows = _rows(dataset, windows)
    found = [(row, doc) for row in rows if (doc := _window(row, tokenizer)) is not None]
    asked = [doc for _, doc in found]
    if not asked:
        raise UserError(
            "The text of no window is cut into the same tokens again: is the tokenizer the run's own?"
        )
    documents = [{"text": text} for text in _documents(rows, tokenizer)]
    questions = list(_questions(rows, tokenizer))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "held_out_functions.py").write_text(_FUNCTIONS)
    kinds = {
        "windows": (_WINDOWS, asked),
        "documents": (_DOCUMENTS, documents),
        "choice": (_CHOICE, questions),
    }
    for kind, (described, docs) in kinds.items():
        data = (folder / f"held_out_{kind}.jsonl").resolve()
        data.write_text("".join(f"{json.dumps(doc)}\n" for doc in docs))
        shared = _SHARED.format(data=json.dumps(str(data)))
        (folder / f"held_out_{kind}.yaml").write_text(described + shared)
    return Written([row for row, _ in found], len(rows) - len(found), len(documents), len(questions))


def own_loss(model: nn.Module, windows: Sequence[Sequence[int]]) -> float:
    """Nats per token of our model, where lm_eval reports `nats_per_token`."""
    total = 0.0
    with torch.no_grad():
        for row in torch.tensor(windows).split(8):
            logits = model(row[:, :-1]).float()
            total += functional.cross_entropy(
                logits.flatten(0, 1), row[:, 1:].flatten(), reduction="sum"
            ).item()
    return total / (len(windows) * (len(windows[0]) - 1))


def _rows(dataset: TokenDataset, windows: int) -> list[list[int]]:
    """Tokens [sequence + 1] of each window: the last target is the first input of the next."""
    rows: list[list[int]] = []
    for group in range(-(-min(windows, dataset.num_windows) // dataset.batch_size)):
        inputs, targets = dataset.batch(group)
        if bool((targets < 0).any()):
            raise UserError(
                "data.mask_documents leaves targets out, and lm_eval counts every token: the losses would differ. Make "
                "tasks of a run without it."
            )
        rows += np.concatenate([inputs.numpy(), targets.numpy()[:, -1:]], axis=1).tolist()
    return rows[:windows]


def _text(tokens: Sequence[int], tokenizer: Tokenizer) -> str | None:
    """The text of some tokens, or None where lm_eval would cut it otherwise. There an end mark is read as one."""
    text, pieces = tokenizer.decode(tokens), _split(tokens, tokenizer.end_of_document)
    again: list[int] = []
    for piece, decoded in zip(pieces, (tokenizer.decode(piece) for piece in pieces), strict=True):
        if tokenizer.encode(decoded) != piece:
            return None
        again += [*piece, tokenizer.end_of_document]
    return text if again[:-1] == list(tokens) else None


def _split(tokens: Sequence[int], end: int) -> list[list[int]]:
    pieces: list[list[int]] = [[]]
    for token in tokens:
        if token == end:
            pieces.append([])
        else:
            pieces[-1].append(token)
    return pieces


def _window(row: Sequence[int], tokenizer: Tokenizer) -> dict[str, Any] | None:
    text, first, rest = (_text(tokens, tokenizer) for tokens in (row, row[:1], row[1:]))
    if text is None or first is None or rest is None or text != first + rest:
        return None
    if first != first.rstrip():  # lm_eval moves blanks at the end of a context into the continuation
        return None
    return {"context": first, "continuation": rest, "tokens": len(row) - 1, "bytes": len(rest.encode())}


def _documents(rows: Sequence[Sequence[int]], tokenizer: Tokenizer) -> Iterator[str]:
    """Those that begin and end within the windows."""
    stream = [token for row in rows for token in row[:-1]]
    for piece in _split(stream, tokenizer.end_of_document)[1:-1]:
        if piece:
            yield tokenizer.decode(piece)


def _questions(rows: Sequence[Sequence[int]], tokenizer: Tokenizer) -> Iterator[dict[str, Any]]:
    """The first half of a window, how it goes on for an eighth of it, and as much from the same place of others."""
    generator = random.Random(SEED)
    half = len(rows[0]) // 2
    length = max(2, len(rows[0]) // 8)
    pieces = [(_text(row[:half], tokenizer), _text(row[half : half + length], tokenizer)) for row in rows]
    good = [(context, end) for context, end in pieces if context and end and context == context.rstrip()]
    for context, end in good:
        wrong = sorted({other for _, other in good} - {end})
        if len(wrong) < CHOICES - 1:
            return
        others = generator.sample(wrong, CHOICES - 1)
        answer = generator.randrange(CHOICES)
        yield {
            "context": context,
            "choices": [*others[:answer], end, *others[answer:]],
            "answer": answer,
        }
