"""A model of transformers cut into stages computes what transformers computes whole, or is refused by name."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from tests.models.hugging_face_configs import COMMON, MODELS, described

from slipstream.errors import UserError
from slipstream.models.hugging_face import PREFIX, HuggingFaceStage, Parts, build
from slipstream.models.loss import TokenLoss

pytest.importorskip("transformers", reason="needs transformers: pip install 'slipstream[hf]'")
SEQUENCE = 16


def made(name, **more):
    torch.manual_seed(0)
    return build(described(name, **more), COMMON["vocab_size"])


def spans(count, cuts):
    edges = [0, *cuts, count]
    return [range(*edge) for edge in pairwise(edges)]


@pytest.mark.parametrize("cuts", [(), (1,), (2,), (1, 2, 3)], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradients_are_those_of_transformers(name, cuts):
    check_gradients(made(name), name, cuts)


BALANCED = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
ROUTED = {
    "mixtral": {},
    "qwen3_moe": {},
    "qwen3_moe, some layers dense": {
        "mlp_only_layers": [0, 2]
    },  # a first stage and one between have no router
}


@pytest.mark.parametrize("cuts", [(), (1,), (2,), (1, 2, 3)], ids=str)
@pytest.mark.parametrize("case", ROUTED)
def test_the_balance_loss_of_experts_is_that_of_transformers(case, cuts):
    name = case.split(",")[0]
    check_gradients(made(name, **ROUTED[case], **BALANCED), name, cuts)


def test_a_validation_is_without_the_balance_loss():
    parts = Parts(made("mixtral", **BALANCED), "mixtral")
    tokens = torch.arange(SEQUENCE).unsqueeze(0)
    x = tokens
    for span in spans(4, (1, 3)):
        x = HuggingFaceStage(parts, span).eval()(x)
    assert torch.equal(x, parts.model(input_ids=tokens).logits)


def check_gradients(model, name, cuts):
    tokens = torch.randint(0, 64, (2, SEQUENCE + 1), generator=torch.Generator().manual_seed(1))
    inputs, targets = tokens[:, :-1], tokens[:, 1:].contiguous()
    expected = model(input_ids=inputs, labels=inputs, shift_labels=targets)
    expected.loss.backward()
    gradients = {key: p.grad.clone() for key, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    parts = Parts(model, name)
    parts.check_cut()
    stages = [HuggingFaceStage(parts, span) for span in spans(4, cuts)]
    x = inputs
    for stage in stages:
        x = stage(*x) if isinstance(x, tuple) else stage(x)
    loss = TokenLoss()(x, targets)
    loss.backward()
    if (balance := getattr(expected, "aux_loss", None)) is not None:  # its gradient is added, not its value
        loss = loss + model.config.router_aux_loss_coef * balance
    assert loss.item() == pytest.approx(expected.loss.item(), abs=1e-6)
    found = {key.removeprefix(PREFIX): p.grad for stage in stages for key, p in stage.named_parameters()}
    tied = (
        {"lm_head.weight"} if model.config.tie_word_embeddings and cuts else set()
    )  # held twice, one parameter
    assert found.keys() == gradients.keys() | tied
    for key, gradient in gradients.items():
        torch.testing.assert_close(found[key], gradient, rtol=0, atol=1e-6, msg=key)


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_a_stage_has_its_own_parameters_alone(name):
    model = made(name)
    parts = Parts(model, name)
    held = [{key for key, _ in HuggingFaceStage(parts, span).named_parameters()} for span in spans(4, (1, 3))]
    assert set.union(*held) == {PREFIX + key for key, _ in model.named_parameters()}
    assert sum(map(len, held)) == len(set.union(*held))
    assert f"{PREFIX}model.embed_tokens.weight" in held[0]
    assert {f"{PREFIX}lm_head.weight", f"{PREFIX}model.norm.weight"} <= held[-1]


def test_the_last_token_does_not_change_the_logits_before_it():
    parts = Parts(made("qwen3"), "qwen3")
    stages = [HuggingFaceStage(parts, span) for span in spans(4, (2,))]
    tokens = torch.arange(SEQUENCE).unsqueeze(0)
    other = tokens.clone()
    other[0, -1] = 60
    one, two = (stages[1](stages[0](given)) for given in (tokens, other))
    assert torch.equal(one[:, :-1], two[:, :-1])
    assert not torch.equal(one[:, -1], two[:, -1])


REFUSED = {
    "balance loss": (
        {"model_type": "jetmoe", **BALANCED},  # over other numbers than its routers'
        "mixtral",
        r"JetMoeForCausalLM\) adds a balance loss of experts that we do not know .* Set output_router_logits to false",
    ),
    "dropout": ({"attention_dropout": 0.1}, "llama", r"draws random numbers .*to 0 .*: attention_dropout"),
    "noise": ({"router_jitter_noise": 0.1}, "mixtral", r"draws random numbers .*: router_jitter_noise"),
    "sizes": ({"num_key_value_heads": 3}, "llama", r"LlamaForCausalLM\) does not run: "),
    "class": ({"model_type": "no_such_model"}, "llama", r"makes no config of 'no_such_model'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_it_cannot_train_is_refused_by_name(case):
    more, name, words = REFUSED[case]
    with pytest.raises(UserError, match=words):
        Parts(made(name, **more), name)


PLAIN_GPT2 = {
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "n_embd": 32,
    "n_head": 4,
    "n_layer": 4,
}
UNCUT = {
    "positions are learnt": (
        {"model_type": "gpt2", **PLAIN_GPT2},
        "uses wpe between its embedding and its layers",
    ),
    "the embedding is scaled": (
        {"model_type": "granite", "embedding_multiplier": 3.0},
        "computes something else",
    ),
}


@pytest.mark.parametrize("case", UNCUT)
def test_a_model_that_cannot_be_cut_is_one_stage(case):
    more, words = UNCUT[case]
    parts = Parts(made("llama", **more), case)
    whole = HuggingFaceStage(parts, range(4))
    tokens = torch.arange(SEQUENCE).unsqueeze(0)
    assert torch.equal(whole(tokens), parts.model(input_ids=tokens).logits)
    with pytest.raises(UserError, match=words):
        parts.check_cut()


def test_marks_beyond_the_vocabulary_are_left_out():
    model = build(described("llama", eos_token_id=50_000, pad_token_id=63), 64)
    assert (model.config.eos_token_id, model.config.pad_token_id) == (None, 63)


def test_code_in_a_folder_is_not_run(tmp_path):
    """A folder may bring its own classes (`auto_map`); they are not looked at."""
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'mark')!r}, 'w')\nclass Evil: ...\n")
    mapped = {"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"}
    model = build(described("llama", auto_map=mapped), 64)
    model.config.auto_map = mapped
    model.save_pretrained(tmp_path)
    build(described("llama", auto_map=mapped), 64, tmp_path)
    assert not (tmp_path / "mark").exists()
