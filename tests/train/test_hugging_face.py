"""Models of transformers in the trainer: the same laws as for ours, across stages, after a resume, and exported."""

from __future__ import annotations

import json

import pytest
import torch
from tests.models.hugging_face_configs import described
from tests.train.conftest import TINY, Runs, assert_equal_weights

from slipstream.cli import main
from slipstream.config import load, resolve
from slipstream.errors import UserError
from slipstream.train import preflight
from slipstream.train.generate import load_trained
from slipstream.train.sources import data_folder, datasets

transformers = pytest.importorskip("transformers", reason="needs transformers: pip install 'slipstream[hf]'")
KEYS = [key for key in TINY if not key.startswith("model.") or key.startswith("model.vocab")]
FEW = ["train.steps=4", "optim.schedule=constant", "optim.warmup=1"]
WHOLE = ["pipeline.schedule=emulate", "pipeline.cutover=4"]  # c = m
CUT = ["pipeline.stages=2", "pipeline.cutover=4"]
BALANCED = {"output_router_logits": True, "router_aux_loss_coef": 0.5}


@pytest.fixture
def theirs(tmp_path, data, pool) -> Runs:
    class Theirs(Runs):
        def config(self, name, *overrides):
            paths = [f"run.dir={self.folder / name}", f"data.path={self.data}"]
            return resolve(load(None, [*KEYS, *FEW, *paths, *overrides]))

        def model(self, name, **more):
            """The override that names such a model."""
            path = self.folder / f"{name.replace(' ', '_')}.json"
            path.write_text(json.dumps(described(name, **more)))
            return f"model.hf={path}"

        def exported(self, name):
            folder = self.folder / f"{name}-hf"
            with pytest.raises(SystemExit) as ended:
                main(["export", str(self.folder / name), str(folder)])
            assert ended.value.code == 0
            return folder

    return Theirs(tmp_path, data, pool)


@pytest.mark.parametrize("name", ["tied llama", "qwen3", "mixtral"])
def test_the_weights_do_not_depend_on_the_stages(theirs, name):
    theirs.train("one", theirs.model(name), *WHOLE)
    theirs.train("two", theirs.model(name), *CUT)
    assert_equal_weights(theirs.weights("one"), theirs.weights("two"))
    losses = [[event["loss"] for event in theirs.events(run, "step")] for run in ("one", "two")]
    assert losses[0] == losses[1]
    assert losses[0][-1] < losses[0][0]


def test_a_balance_loss_does_not_depend_on_the_stages(theirs):
    model = theirs.model("mixtral", **BALANCED)
    theirs.train("one", model, *WHOLE)
    theirs.train("two", model, *CUT)
    theirs.train("recomputed", model, *CUT, "train.activation_checkpointing=true")
    assert_equal_weights(theirs.weights("one"), theirs.weights("two"))
    assert_equal_weights(theirs.weights("one"), theirs.weights("recomputed"))
    with pytest.raises(UserError, match=r"data_ranks: the run has 1, asked for 2; the balance loss"):
        theirs.train("two", model, *CUT, "train.steps=6", "pipeline.data_ranks=2")


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("train.fuse=true", r"is no mean over rows, as train\.fuse needs it"),
        ("train.compile=true", r"train\.compile = True\)\. Set train\.compile=layers"),
        ("train.compile=stage", r"train\.compile = stage\)\. Set train\.compile=layers"),
    ],
)
def test_what_a_balance_loss_does_not_go_with_is_refused(theirs, key, words):
    with pytest.raises(UserError, match=words):
        theirs.train("run", theirs.model("mixtral", **BALANCED), *WHOLE, key)


@pytest.mark.parametrize("more", [{}, BALANCED], ids=["cross entropy", "with a balance loss"])
def test_the_first_update_is_what_torch_does_with_transformers_own_loss(theirs, more):
    """One update of one microbatch, AdamW: the model's own forward with labels, its backward, torch's optimizer."""
    # With a large eps the step is all but linear in the gradient; with a small one its sign would count alone.
    adamw = [
        "optim.name=adamw",
        "optim.lr=1",
        "optim.weight_decay=0.0",
        "optim.max_grad_norm=0",
        "optim.options={eps=1.0}",
    ]
    lone = ["pipeline.microbatches=1", "pipeline.schedule=emulate", "train.steps=1", "optim.warmup=0"]
    model = theirs.model("qwen3_moe", **more)
    config = theirs.config("run", model, *lone, *adamw)
    theirs.train("run", model, *lone, *adamw)
    torch.manual_seed(config.train.seed)
    expected = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(**described("qwen3_moe", **more)), dtype=torch.float32
    )
    inputs, targets = datasets(config, data_folder(config))[0].batch(0)
    found = expected(input_ids=inputs, labels=inputs, shift_labels=targets.contiguous())
    found.loss.backward()
    balance = more["router_aux_loss_coef"] * found.aux_loss.item() if more else 0.0
    assert theirs.events("run", "step")[0]["loss"] == pytest.approx(found.loss.item() - balance, abs=1e-6)
    used = theirs.weights("run")
    betas = config.optim.betas or (0.9, 0.95)
    torch.optim.AdamW(expected.parameters(), lr=1.0, betas=tuple(betas), eps=1.0, weight_decay=0.0).step()
    for name, parameter in expected.named_parameters():
        torch.testing.assert_close(used[f"hf.{name}"], parameter.data, rtol=0, atol=1e-6, msg=name)


def test_it_resumes_at_another_depth_and_is_exported(theirs):
    model = theirs.model("tied llama")
    theirs.train("cut", model, *CUT, "train.steps=2")
    theirs.train("cut", model, "pipeline.stages=4", "pipeline.cutover=4")
    theirs.train("same", model, *WHOLE)
    assert_equal_weights(theirs.weights("cut"), theirs.weights("same"))
    loaded = transformers.AutoModelForCausalLM.from_pretrained(theirs.exported("cut"))
    assert type(loaded).__name__ == "LlamaForCausalLM"
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    kept = {name.removeprefix("hf."): tensor for name, tensor in theirs.weights("cut").items()}
    assert_equal_weights({name: p.data for name, p in loaded.named_parameters(remove_duplicate=False)}, kept)


@pytest.mark.parametrize("name", ["mixtral", "qwen3"])
def test_an_exported_model_is_what_was_validated_and_starts_another_run(theirs, name):
    theirs.train("run", theirs.model(name), *WHOLE)
    folder = theirs.exported("run")
    loss = theirs.events("run", "validation")[-1]["loss"]
    config = theirs.config("run", theirs.model(name), *WHOLE)
    inputs, targets = datasets(config, data_folder(config))[1].batch(0)
    logits = transformers.AutoModelForCausalLM.from_pretrained(folder)(input_ids=inputs).logits
    assert torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).item() == pytest.approx(
        loss, abs=1e-6
    )
    start = [f"model.hf={folder}", f"model.init_from={folder}", "optim.name=adamw", "optim.lr=1e-12"]
    theirs.train("again", *start, *WHOLE, "train.steps=1")
    assert theirs.events("again", "validation")[-1]["loss"] == pytest.approx(loss, abs=1e-6)


def test_recomputed_activations_change_nothing(theirs):
    theirs.train("kept", theirs.model("llama"), *WHOLE)
    theirs.train("recomputed", theirs.model("llama"), *CUT, "train.activation_checkpointing=true")
    assert_equal_weights(theirs.weights("kept"), theirs.weights("recomputed"))


@pytest.mark.parametrize("more", [{}, BALANCED], ids=["cross entropy", "with a balance loss"])
def test_flushed_schedules_take_it_too(theirs, more):
    model = theirs.model("mixtral", **more)
    theirs.train("flushed", model, "pipeline.stages=2", "pipeline.schedule=1f1b")
    theirs.train("emulated", model, "pipeline.schedule=emulate", "pipeline.delay=0")
    assert_equal_weights(theirs.weights("flushed"), theirs.weights("emulated"))


def test_another_config_json_under_the_same_name_is_refused(theirs):
    theirs.train("run", theirs.model("llama"), *WHOLE)
    changed = theirs.model("llama", rope_theta=5000.0)
    with pytest.raises(
        UserError, match=r"model\.hf: rope_theta in its config\.json was None, now it is 5000"
    ):
        theirs.train("run", changed, *WHOLE, "train.steps=6")


def test_generate_says_who_can(theirs):
    theirs.train("run", theirs.model("llama"), *WHOLE, "train.steps=1")
    with pytest.raises(UserError, match=r"trained a model of transformers.* then transformers\.pipeline"):
        load_trained(theirs.folder / "run")


def test_too_many_stages_are_named(theirs):
    with pytest.raises(UserError, match=r"model\.hf = '.*' has 4 layers, too few for 5 stages"):
        theirs.train("run", theirs.model("llama"), "pipeline.schedule=emulate", "pipeline.delay=[1,1,1,1,1]")


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (["model.dim=32"], r"model\.dim cannot take effect: model\.hf = 'x' is a model of transformers"),
        (["model.module=a:b"], r"model\.hf = 'x' and model\.module = 'a:b' both name the model"),
        (["data.mask_documents=true"], r"data\.mask_documents cannot take effect: model\.hf"),
        (["model.init_from=y"], r"optim\.name=adamw"),
    ],
)
def test_what_does_not_go_with_it_is_refused(keys, words):
    with pytest.raises(UserError, match=words):
        resolve(load(None, ["model.hf=x", *keys]))


def test_the_vocabulary_is_the_datas_or_that_of_the_weights(theirs, tmp_path):
    model = theirs.model("llama")

    def vocab(*keys):
        return preflight.prepare(load(None, [model, *keys])).model.vocab

    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "meta.json").write_text(json.dumps({"vocab": 48, "end_of_document": 0}))
    shards, start = f"data.path={tmp_path / 'data'}", [f"model.init_from={tmp_path}", "optim.name=adamw"]
    (tmp_path / "config.json").write_text(json.dumps(described("llama")))
    assert vocab() == 64
    assert vocab(shards) == 48
    assert vocab("model.vocab=80") == 80
    assert vocab(shards, *start) == 64
    with pytest.raises(
        UserError, match=r"model\.vocab = 80 contradicts model\.hf, whose config\.json has 64"
    ):
        vocab("model.vocab=80", *start)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "does not exist. Name the folder of a model, or its config.json"),
        ("{", "cannot be read"),
        ("[]", "cannot be read: it holds a list"),
        ('{"vocab_size": 3}', "does not say model_type"),
        ('{"model_type": "llama"}', "does not say vocab_size"),
    ],
)
def test_a_file_that_describes_no_model_is_named(tmp_path, text, words):
    path = tmp_path / "config.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UserError, match=words):
        preflight.prepare(load(None, [f"model.hf={path}"]))
