"""More steps than before, the best state, an early end, a profile, samples: what a run does when it is asked to."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from slipstream.errors import UserError
from slipstream.train import checkpoint
from slipstream.train.folder import extension
from slipstream.train.health import Best

EMULATE = "pipeline.schedule=emulate"


def test_a_run_is_extended_and_says_what_becomes_of_the_learning_rate(runs, capsys):
    runs.train("run", EMULATE)
    runs.train("run", EMULATE, "train.steps=20")
    told = capsys.readouterr().out
    assert "Extended from 12 to 20 steps. The learning rate is that of a cosine schedule" in told
    assert "it goes from 10% to 40% of its peak at step 12" in told
    assert runs.steps("run") == list(range(1, 21))
    assert [event["step"] for event in runs.events("run", "finish")] == [20]
    with pytest.raises(
        UserError, match=r"holds a run of 20 steps.* cannot become\s+shorter\. Set train\.steps=20"
    ):
        runs.train("run", EMULATE)


def test_a_constant_learning_rate_makes_an_extended_run_the_longer_run(runs):
    constant = [EMULATE, "optim.schedule=constant", "optim.warmup=2"]
    runs.train("run", *constant, "train.steps=8")
    runs.train("run", *constant, "train.steps=16")
    runs.train("long", *constant, "train.steps=16")
    from tests.train.conftest import assert_equal_weights

    assert_equal_weights(runs.weights("run"), runs.weights("long"))
    stored, asked = (runs.config("x", *constant, f"train.steps={steps}") for steps in (8, 16))
    assert extension(stored, asked, 8).endswith("The learning rate goes on at 100% of its peak.")


def test_a_change_to_nothing_is_said_in_words(runs):
    runs.train("run", EMULATE, "optim.weight_decay=0.2", "train.steps=2")
    with pytest.raises(UserError) as refused:
        runs.train("run", EMULATE, "train.steps=2")
    assert "optim.weight_decay: the run has 0.2, and now it is not set" in str(refused.value)
    assert "None" not in str(refused.value)


def test_best():
    best = Best.after([(1, 3.0), (2, 2.0), (3, 2.5)])
    assert (best.step, best.loss, best.since) == (2, 2.0, 1)
    assert not best.see(4, 2.0)
    assert best.see(5, 1.0)
    assert (best.step, best.since) == (5, 0)


@pytest.mark.parametrize("how", [EMULATE, "pipeline.stages=2"])
def test_the_best_state_is_kept_and_a_run_without_progress_ends(runs, how):
    """A learning rate far too high: the loss is best early."""
    wild = [how, "optim.lr=1.0", "optim.schedule=constant", "optim.warmup=0", "optim.max_grad_norm=0",
            "train.steps=100", "train.eval_every=2", "checkpoint.every=2", "checkpoint.keep=1", "checkpoint.best=true",
            "train.patience=3", "health.spike=0"]  # fmt: skip
    outcome = runs.train("run", *wild)
    losses = {event["step"]: event["loss"] for event in runs.events("run", "validation")}
    best = min(losses, key=lambda step: losses[step])
    assert outcome["reason"] == "finished"
    assert outcome["step"] == best + 6 < 100
    root = runs.folder / "run" / "checkpoints"
    assert (root / "best").resolve() == checkpoint.folder_of(root, best).resolve()
    assert checkpoint.verify(root / "best").step == best
    assert {path.name for path in root.iterdir()} == {"best", *(
        checkpoint.folder_of(root, step).name for step in (best, outcome["step"]))}  # fmt: skip
    again = runs.train("run", *wild)
    assert (again["reason"], again["step"]) == ("finished", outcome["step"])
    further = runs.train("run", *wild, "train.patience=4")
    assert further["step"] == outcome["step"] + 2


def test_a_profile_of_three_updates_on_every_rank(runs):
    runs.train("run", "pipeline.stages=2", "train.profile=4")
    for rank in (0, 1):
        trace = json.loads((runs.folder / "run" / "profile" / f"rank-{rank}.json").read_text())
        assert any("linear" in str(event.get("name")) for event in trace["traceEvents"])
        assert "attention" in (runs.folder / "run" / "profile" / f"rank-{rank}.txt").read_text()


def test_a_chunked_loss_trains_to_the_same_weights(runs, reference):
    """In one process and on two stages; the sums are the same but for their order."""
    from tests.train.conftest import assert_equal_weights

    runs.train("one", EMULATE, "train.chunked_loss=true")
    runs.train("pipeline", "pipeline.stages=2", "train.chunked_loss=true")
    assert_equal_weights(runs.weights("pipeline"), runs.weights("one"))
    whole = reference.weights("2bw")
    for (name, a), b in zip(whole.items(), runs.weights("pipeline").values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize(
    "key",
    [
        "train.dtype=bfloat16_autocast",
        "pipeline.schedule=1f1b",
        "pipeline.mismatch=1",
        "model.module=tests.train.own:layers",
    ],
)
def test_where_a_loss_cannot_be_chunked_that_is_said(runs, key):
    keys = [EMULATE, "train.device=auto", "train.chunked_loss=true", key]
    with pytest.raises(UserError, match=r"train\.chunked_loss is for models of ours"):
        runs.config("run", *keys)


def test_the_sample_is_asked_for_and_begins_as_the_text_does(runs, tmp_path, capsys):
    from slipstream.config import load
    from slipstream.data.prepare import Recipe, prepare
    from slipstream.train import session
    from slipstream.train.preflight import prepare as resolved

    texts = [f"Once upon a time {i} little pigs lived in a house.\n" * 8 for i in range(40)]
    prepare(lambda: texts, tmp_path / "shards", Recipe(vocab=300))
    keys = ["model.dim=16", "model.layers=2", "model.heads=2", "model.kv_heads=1", "model.ffn=32", "data.sequence=16",
            "train.steps=2", "train.device=cpu", EMULATE, f"data.path={tmp_path / 'shards'}",
            f"run.dir={tmp_path / 'run'}", "train.sample_tokens=8"]  # fmt: skip
    session.run_rank(None, resolved(load(None, keys)).model_dump())
    told = capsys.readouterr().out
    assert "A text by this model" in told
    assert "continuing 'Once upon" in told
    assert "__init__" not in told
    (event,) = [json.loads(line) for line in Path(tmp_path / "run" / "events.jsonl").read_text().splitlines()
                if '"sample"' in line]  # fmt: skip
    assert event["prompt"].startswith("Once upon")
