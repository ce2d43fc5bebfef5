"""A run's held-out text as tasks of lm_eval: the same windows, the same loss, and what lm_eval itself reports."""

from __future__ import annotations

import io
import json
from contextlib import redirect_stdout

import numpy as np
import pytest
import torch
from tests.models.hugging_face_configs import described
from tests.train.conftest import TINY, Runs

from slipstream.cli.export import export as export_command
from slipstream.config import load, resolve
from slipstream.data.shards import write_shard
from slipstream.data.tokenizer import Tokenizer
from slipstream.data.tokens import TokenDataset
from slipstream.errors import UserError
from slipstream.models.stages import build_model
from slipstream.train import session
from slipstream.train.master import load_master
from slipstream.train.tasks import own_loss, write_tasks

SEQUENCE, WINDOWS = 32, 16
WORDS = ["slip", "stream", "bank", "master", "delay", "group", "stage", "update", "flush"]
KINDS = ("windows", "documents", "choice")


def text(seed: int, words: int, blank: str) -> str:
    """Words in a few fixed orders, so that there is something to learn."""
    random = np.random.default_rng(seed)
    start, stride = random.integers(0, len(WORDS)), random.integers(1, 3)
    return blank.join(WORDS[(start + stride * index) % len(WORDS)] for index in range(words))


def write_data(folder, vocab, blank):
    folder.mkdir(parents=True)
    documents = [text(seed, 6 + seed % 9, blank) for seed in range(300)]
    tokenizer = Tokenizer.train(documents, vocab)
    tokenizer.save(folder / "tokenizer.json")
    ends = [tokenizer.end_of_document]
    for split, chosen in (("train", documents[:240]), ("val", documents[240:])):
        stream = [token for document in chosen for token in tokenizer.encode(document) + ends]
        write_shard(folder / f"{split}_000.bin", np.array(stream, dtype="<u2"))
    meta = {"vocab": tokenizer.vocab_size, "end_of_document": tokenizer.end_of_document}
    (folder / "meta.json").write_text(json.dumps(meta))
    return tokenizer


def docs(folder, kind):
    return [json.loads(line) for line in (folder / f"held_out_{kind}.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def exported(tmp_path_factory, pool):
    """A run on text that every window gives back (plain letters, no blanks, a token for each), exported with tasks."""
    place = tmp_path_factory.mktemp("exported")
    runs = Runs(place, place / "text", pool)
    write_data(runs.data, 257, "-")
    result = runs.train(
        "text-run", "pipeline.schedule=emulate", "model.vocab=257", f"data.sequence={SEQUENCE}", "train.eval_batches=2",
        "train.steps=40",
    )  # fmt: skip
    run, folder, tasks = place / "text-run", place / "exported", place / "tasks"
    with redirect_stdout(io.StringIO()) as told:
        export_command(run, folder, "float32", tasks, as_json=True)
    said = json.loads(told.getvalue().splitlines()[-1])
    return run, folder, tasks, said, result["validation_loss"]


def test_the_tasks_ask_what_our_validation_reads(exported):
    run, _, tasks, said, validated = exported
    assert said["left_out"] == 0
    assert said["windows"] == len(docs(tasks, "windows")) == WINDOWS
    assert said["loss"] == pytest.approx(validated, abs=1e-5)
    tokenizer = Tokenizer.load(load_master(run).tokenizer)
    held_out = TokenDataset(run.parent / "text", "valid", SEQUENCE, WINDOWS, shuffle=False)
    inputs, targets = held_out.batch(0)
    for doc, row, target in zip(docs(tasks, "windows"), inputs.tolist(), targets.tolist(), strict=True):
        assert doc["context"] + doc["continuation"] == tokenizer.decode([*row, target[-1]])
        assert (doc["tokens"], doc["bytes"]) == (SEQUENCE, len(doc["continuation"].encode()))


def test_a_model_of_transformers_is_asked_the_same(runs, tmp_path, capsys):
    pytest.importorskip("transformers", reason="needs transformers: pip install 'slipstream[hf]'")
    write_data(tmp_path / "text", 257, "-")
    (tmp_path / "config.json").write_text(json.dumps(described("tied llama")))
    keys = [key for key in TINY if not key.startswith("model.")]
    config = resolve(
        load(None, [
            *keys, f"model.hf={tmp_path / 'config.json'}", "model.vocab=257", f"data.path={tmp_path / 'text'}",
            f"run.dir={tmp_path / 'run'}", f"data.sequence={SEQUENCE}", "train.eval_batches=2",
            "pipeline.schedule=emulate",
        ])
    )  # fmt: skip
    result = session.run_rank(None, config.model_dump())
    capsys.readouterr()
    export_command(tmp_path / "run", tmp_path / "exported", "float32", tmp_path / "tasks", as_json=True)
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert said["windows"] == len(docs(tmp_path / "tasks", "windows")) == WINDOWS
    assert said["loss"] == pytest.approx(result["validation_loss"], abs=1e-5)


def test_a_question_has_one_real_continuation(exported):
    _, _, tasks, *_ = exported
    questions = docs(tasks, "choice")
    assert len(questions) == WINDOWS
    texts = [doc["context"] + doc["continuation"] for doc in docs(tasks, "windows")]
    for question in questions:
        real = question["context"] + question["choices"][question["answer"]]
        assert len(set(question["choices"])) == 4
        assert any(found.startswith(real) for found in texts)


def test_a_window_whose_text_is_cut_otherwise_is_left_out(tmp_path):
    """With a real vocabulary some windows begin with a blank, or in the middle of a letter or a merge."""
    tokenizer = write_data(tmp_path / "data", 280, " ")
    held_out = TokenDataset(tmp_path / "data", "valid", SEQUENCE, 8, shuffle=False)
    written = write_tasks(tmp_path / "tasks", held_out, tokenizer, 40)
    assert 0 < written.left_out < 40
    assert len(written.windows) + written.left_out == 40
    with pytest.raises(UserError, match="already exists"):
        write_tasks(tmp_path / "tasks", held_out, tokenizer, 40)


@pytest.mark.slow
def test_lm_eval_reports_our_validation_loss(exported):
    lm_eval = pytest.importorskip("lm_eval", reason="needs lm_eval: pip install 'slipstream[lm-eval]'")
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    run, folder, tasks, said, validated = exported
    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    model = HFLM(pretrained=str(folder), dtype="float32", device="cpu", batch_size=4)
    names = [f"held_out_{kind}" for kind in KINDS]
    found = lm_eval.simple_evaluate(model=model, tasks=names, task_manager=manager, bootstrap_iters=0)[
        "results"
    ]
    assert found["held_out_windows"]["nats_per_token,none"] == pytest.approx(validated, abs=1e-3)
    assert said["loss"] == pytest.approx(validated, abs=1e-3)
    nats, counted = likelihoods(run, [doc["text"] for doc in docs(tasks, "documents")])
    bits = -sum(nats) / sum(counted) / np.log(2)
    assert found["held_out_documents"]["bits_per_byte,none"] == pytest.approx(bits, abs=1e-3)
    right = sum(best(run, question) == question["answer"] for question in docs(tasks, "choice"))
    assert found["held_out_choice"]["acc,none"] == pytest.approx(right / WINDOWS, abs=1e-9)


def loaded(run):
    master = load_master(run)
    model = build_model(master.model, 0)
    model.load_state_dict(master.weights, strict=False)
    return model, Tokenizer.load(master.tokenizer)


def scored(model, tokens, first):
    """Log-likelihood of tokens[first:] after those before them."""
    with torch.no_grad():
        logits = model(torch.tensor([tokens[:-1]])).float().log_softmax(-1)[0]
    return sum(logits[place - 1, tokens[place]].item() for place in range(first, len(tokens)))


def likelihoods(run, texts):
    """Of documents, each after the mark that ends one, in pieces as long as the model's."""
    model, tokenizer = loaded(run)
    nats = []
    for document in texts:
        tokens, total = tokenizer.encode(document), 0.0
        for start in range(0, len(tokens), SEQUENCE):
            piece = tokens[start : start + SEQUENCE]
            before = [tokenizer.end_of_document, *tokens][: start + 1]
            context = before[-(SEQUENCE - len(piece) + 1) :]  # a short last piece sees what fits before it
            total += scored(model, [*context, *piece], len(context))
        nats.append(total)
    return nats, [len(document.encode()) for document in texts]


def best(run, question):
    model, tokenizer = loaded(run)
    start = len(encoded(tokenizer, question["context"]))
    scores = [scored(model, encoded(tokenizer, question["context"] + c), start) for c in question["choices"]]
    return int(np.argmax(scores))


def encoded(tokenizer, said):
    """With end marks read as such."""
    mark = tokenizer.decode([tokenizer.end_of_document])
    tokens = []
    for index, piece in enumerate(said.split(mark)):
        tokens += [tokenizer.end_of_document] * (index > 0) + tokenizer.encode(piece)
    return tokens


def test_our_loss_is_a_mean_over_tokens():
    class Even(torch.nn.Module):
        def forward(self, tokens):
            return torch.zeros(*tokens.shape, 5)

    assert own_loss(Even(), [[0, 1, 2], [3, 4, 0]]) == pytest.approx(np.log(5))
