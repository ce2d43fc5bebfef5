"""Oracle: the real transformers classes compute our logits, in both directions."""

from __future__ import annotations

import json

import pytest
import tokenizers
import torch

from models.hugging_face_configs import described
from slipstream.data.tokenizer import Tokenizer
from slipstream.errors import UserError
from slipstream.models import hugging_face, llama
from slipstream.models.config_json import read_config
from slipstream.models.sizes import ModelConfig
from slipstream.models.stages import build_model, build_stage
from slipstream.train import export

transformers = pytest.importorskip("transformers")

SHAPES = {
    "llama tied": ModelConfig(vocab=97, dim=48, layers=3, heads=4, kv_heads=2, ffn=80),
    "llama untied": ModelConfig(
        vocab=97, dim=48, layers=2, heads=4, kv_heads=4, ffn=80, tied=False, rope_theta=5e5
    ),
    "qwen3": ModelConfig(vocab=97, dim=48, layers=2, heads=4, kv_heads=2, ffn=80, qk_norm=True),
    "mixtral": ModelConfig(
        vocab=97, dim=48, layers=2, heads=4, kv_heads=2, ffn=32, tied=False, experts=4, experts_per_token=2
    ),
}


def scrambled(config: ModelConfig):
    """A model with every tensor large and different, norms too, so that a swapped name changes the logits."""
    model = build_model(config, seed=1)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for tensor in model.parameters():
            noise = torch.randn(tensor.shape, generator=generator)
            tensor.copy_(1 + 0.3 * noise if tensor.ndim == 1 else 0.15 * noise)
    return model


@pytest.mark.parametrize("name", SHAPES)
def test_transformers_loads_the_folder_and_agrees(name, tmp_path):
    config = SHAPES[name]
    model = scrambled(config)
    export.export(dict(model.named_parameters()), config, tmp_path / "out", sequence=64)
    theirs, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", output_loading_info=True, dtype=torch.float32
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert type(theirs).__name__ == json.loads((tmp_path / "out/config.json").read_text())["architectures"][0]
    tokens = torch.randint(0, 97, (2, 33), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        ours = model(tokens)
        assert ours.std() > 0.1
        assert torch.allclose(theirs(tokens).logits, ours, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", SHAPES)
def test_logits_of_joined_products_are_those_of_transformers(name, tmp_path, monkeypatch):
    """As compiled code computes them, without compiling."""
    model, tokens = scrambled(SHAPES[name]), torch.arange(40).view(2, 20)
    export.export(dict(model.named_parameters()), SHAPES[name], tmp_path / "out", sequence=64)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    joined = []
    own = llama.Attention._joined
    monkeypatch.setattr(llama.Attention, "_joined", lambda *args: joined.append(1) or own(*args))
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    with torch.no_grad():
        ours = model(tokens)
        monkeypatch.undo()
        assert torch.allclose(theirs(tokens).logits, ours, atol=1e-5, rtol=1e-5)
    assert len(joined) == (0 if SHAPES[name].qk_norm else SHAPES[name].layers)


@pytest.mark.parametrize("name", SHAPES)
def test_a_folder_written_by_transformers_reads_back(name, tmp_path):
    """model.init_from: the library's own save, our read, equal logits."""
    config = SHAPES[name]
    export.export(dict(scrambled(config).named_parameters()), config, tmp_path / "ours", sequence=64)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype=torch.float32)
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    read = read_config(tmp_path / "theirs")
    assert (read.tied, read.rope_theta, read.experts, read.qk_norm) == (
        config.tied,
        config.rope_theta,
        config.experts,
        config.qk_norm,
    )
    model = build_model(read, seed=3)
    model.load_state_dict(export.read_weights(tmp_path / "theirs", read))
    tokens = torch.arange(40).view(2, 20)
    with torch.no_grad():
        assert torch.allclose(model(tokens), theirs(tokens).logits, atol=1e-5, rtol=1e-5)


def test_weights_survive_the_round_trip_bit_for_bit_and_load_into_stages(tmp_path, monkeypatch):
    monkeypatch.setattr(export, "_SHARD_BYTES", 30_000)  # several files and an index
    config = SHAPES["llama tied"]
    model = scrambled(config)
    export.export(dict(model.named_parameters()), config, tmp_path / "out")
    assert (tmp_path / "out/model.safetensors.index.json").exists()
    state = export.read_weights(tmp_path / "out", read_config(tmp_path / "out"))
    for name, tensor in model.named_parameters():
        assert torch.equal(state[name], tensor)
    last = build_stage(config, 2, 3, embedding=False, head=True, seed=0)
    last.load_state_dict({name: state[name] for name in last.state_dict()})
    assert torch.equal(last.head.weight, model.embedding.weight)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert torch.equal(loaded.model.embed_tokens.weight, model.embedding.weight)


def test_the_tokenizer_travels(tmp_path):
    tokenizer = Tokenizer.train(["the quick brown fox"] * 9, 280)
    tokenizer.save(tmp_path / "tokenizer.json")
    config = ModelConfig(vocab=tokenizer.vocab_size, dim=16, layers=1, heads=2, kv_heads=1, ffn=16)
    state = dict(build_model(config, 0).named_parameters())
    export.export(state, config, tmp_path / "out", tokenizer=tmp_path / "tokenizer.json")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert theirs("the fox, naïve")["input_ids"] == tokenizer.encode("the fox, naïve")
    assert theirs.eos_token_id == tokenizer.end_of_document


@pytest.mark.parametrize("end", ["</s>", "<eos>"])
def test_a_tokenizer_of_ones_own_ends_documents_with_its_own_token(tmp_path, end):
    """Another one would be added to it, beyond the embedding of the model."""
    inner = tokenizers.Tokenizer(tokenizers.models.BPE())
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=300, special_tokens=["<s>", end])
    inner.train_from_iterator(["the quick brown fox"] * 9, trainer)
    inner.post_processor = tokenizers.processors.TemplateProcessing("<s> $A", None, [("<s>", 0)])
    inner.enable_truncation(2)
    inner.save(str(tmp_path / "tokenizer.json"))
    vocab = Tokenizer.load(tmp_path).vocab_size
    config = ModelConfig(vocab=vocab, dim=16, layers=1, heads=2, kv_heads=1, ffn=16)
    state = dict(build_model(config, 0).named_parameters())
    export.export(state, config, tmp_path / "out", tokenizer=tmp_path / "tokenizer.json")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    described = transformers.AutoConfig.from_pretrained(tmp_path / "out")
    assert len(theirs) == vocab
    trained_on = Tokenizer.load(tmp_path).encode("the quick brown")
    assert theirs("the quick brown")["input_ids"] == trained_on, "no <s> in front, which no text had"
    assert len(trained_on) > 2
    assert theirs.eos_token == end
    assert theirs.eos_token_id == theirs.bos_token_id == described.eos_token_id == 1


def test_what_cannot_be_exported_or_read_is_refused_by_name(tmp_path):
    routed = ModelConfig(
        vocab=9, dim=8, layers=1, heads=2, kv_heads=1, ffn=8, qk_norm=True, experts=2, experts_per_token=1
    )
    with pytest.raises(UserError, match="QK-norm"):
        export.export(dict(build_model(routed, 0).named_parameters()), routed, tmp_path / "a")
    assert not (tmp_path / "a").exists()

    config = SHAPES["llama tied"]
    state = dict(build_model(config, 0).named_parameters())
    export.export(state, config, tmp_path / "b")
    with pytest.raises(UserError, match="already exists"):
        export.export(state, config, tmp_path / "b")
    with pytest.raises(UserError, match=r"norm\.weight is missing"):
        export.export({k: v for k, v in state.items() if k != "norm.weight"}, config, tmp_path / "c")
    assert [path.name for path in tmp_path.iterdir()] == ["b"]  # a failure leaves nothing behind

    described = json.loads((tmp_path / "b/config.json").read_text())
    for change, message in (
        ({"attention_bias": True}, "attention_bias"),
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope_type"),
    ):
        (tmp_path / "b/config.json").write_text(json.dumps(described | change))
        with pytest.raises(UserError, match=message):
            read_config(tmp_path / "b")
    (tmp_path / "b/config.json").write_text(json.dumps(described))
    (tmp_path / "b/model.safetensors").write_bytes(b"not a tensor file")
    with pytest.raises(UserError, match="cannot be read"):
        export.read_weights(tmp_path / "b", config)


@pytest.mark.parametrize("theirs", [2, [1, 2], None])
def test_a_model_of_transformers_ends_with_what_its_texts_ended_with(tmp_path, theirs):
    """Whatever the file says that its shape is from: there another tokenizer's ids are meant."""
    tokenizer = Tokenizer.train(["the quick brown fox"] * 9, 280)
    tokenizer.save(tmp_path / "tokenizer.json")
    given = described("llama", eos_token_id=theirs)
    vocab = tokenizer.vocab_size
    weights = hugging_face.HuggingFaceStage(
        parts := hugging_face.Parts(hugging_face.build(given, vocab), "here"), range(len(parts.layers))
    ).state_dict()
    options = {"vocab": vocab, "sequence": 64, "dtype": torch.float32}
    for name, path in (("with", tmp_path / "tokenizer.json"), ("without", None)):
        export.write_transformers(weights, given, tmp_path / name, tokenizer=path, **options)
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name)
        found = model.config.eos_token_id, model.generation_config.eos_token_id
        assert found == ((tokenizer.end_of_document,) * 2 if path else (theirs,) * 2)
        begins = {model.config.bos_token_id, model.generation_config.bos_token_id}
        assert not path or begins == {tokenizer.end_of_document}


def test_the_tokenizer_of_a_model_of_ones_own_is_copied_as_it_is(tmp_path):
    (tmp_path / "tokenizer.json").write_text('["a", "b"]')
    weights = {"w": torch.ones(2)}
    export.write_own(weights, tmp_path / "out", tokenizer=tmp_path / "tokenizer.json", dtype=torch.float32)
    assert (tmp_path / "out/tokenizer.json").read_text() == '["a", "b"]'


@pytest.mark.parametrize("place", ["loop", "/proc/nowhere/out"])
def test_a_place_that_cannot_be_written_is_named(tmp_path, place):
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    config = ModelConfig(vocab=9, dim=8, layers=1, heads=2, kv_heads=1, ffn=8)
    state = dict(build_model(config, 0).named_parameters())
    with pytest.raises(UserError, match=r"(leads back to itself|cannot be written).* Choose another folder"):
        export.export(state, config, tmp_path / place)
