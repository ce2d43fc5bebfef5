"""The model and the device a plan is for are those that were named, and the run that it writes trains them."""

from __future__ import annotations

import json
import tomllib

import pytest

from slipstream.cli import main
from slipstream.cli.plan_model import find_model
from slipstream.config import from_tree, load, resolve
from slipstream.errors import ConfigError, UserError
from slipstream.models.sizes import PRESETS, parameters
from slipstream.optimizers import OPTIMIZERS
from slipstream.plan.devices import PRESETS as DEVICES
from slipstream.plan.devices import Cluster, device_called, find_device
from slipstream.plan.layout import Job, ModelSettings
from slipstream.plan.memory import NEWTON_SCHULZ
from slipstream.plan.parts import Timing
from slipstream.plan.planner import plan as search
from slipstream.plan.profile import PARTS, Link, Measured, Profile

LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 32000, "hidden_size": 2048,
    "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 5632,
    "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False, "hidden_act": "silu",
    "max_position_embeddings": 4096,
}  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "a [b] model"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(LLAMA))
    return path


def planned(capsys, *arguments: str) -> str:
    with pytest.raises(SystemExit) as leaving:
        main(["plan", "--devices", "4", "--batch-tokens", "256k", "--sequence", "2048", *arguments])
    told = capsys.readouterr()
    assert not leaving.value.code, told.err
    return told.out


@pytest.mark.parametrize("key", ["hf", "init_from"])
def test_a_run_with_a_model_from_a_folder_is_planned_for_that_model(tmp_path, folder, capsys, key):
    run = tmp_path / "run.toml"
    run.write_text(f"[model]\n{key} = {json.dumps(str(folder))}\n")
    found, wanted = find_model(str(run)).config, find_model(str(folder)).config
    assert parameters(found) == parameters(wanted) > 5e8
    layouts = json.loads(planned(capsys, "--model", str(run), "--stages", "4", "--json"))["layouts"]
    for text in filter(None, (layout["toml"] for layout in layouts)):
        assert tomllib.loads(text)["model"] == {key: str(folder)}
    inside = [edge for layout in layouts for edge in layout["boundaries"] if edge != int(edge)]
    assert bool(inside) == (key == "init_from"), "layers of transformers' own are not cut"


def test_a_vocabulary_of_ones_own_counts(tmp_path, folder):
    run = tmp_path / "run.toml"
    run.write_text(f"[model]\nhf = {json.dumps(str(folder))}\nvocab = 8192\n")
    assert find_model(str(run)).config.vocab == 8192


@pytest.mark.parametrize("model", ['preset = "llama-42m"', "hf = {folder}"])
def test_a_vocabulary_of_the_data_counts(tmp_path, folder, model):
    """The run that is written has it without the data, whose place it does not name."""
    shards, run = tmp_path / "shards", tmp_path / "run.toml"
    shards.mkdir()
    (shards / "meta.json").write_text('{"vocab": 300}')
    data = json.dumps(str(shards))
    run.write_text(f"[model]\n{model.format(folder=json.dumps(str(folder)))}\n[data]\npath = {data}\n")
    found = find_model(str(run))
    assert found.config.vocab == found.settings.values["vocab"] == 300
    run.write_text(f"[model]\nvocab = 4096\n[data]\npath = {data}\n")
    assert find_model(str(run)).config.vocab == 4096


def test_what_a_run_refuses_is_not_planned(tmp_path, folder):
    run = tmp_path / "run.toml"
    run.write_text(f"[model]\nhf = {json.dumps(str(folder))}\ndim = 100\n")
    with pytest.raises(UserError, match=r"model\.dim cannot take effect"):
        find_model(str(run))


def test_a_folder_of_any_name_is_written_so_that_it_can_be_read(tmp_path, folder, capsys):
    path = folder.rename(tmp_path / 'é😀 "model"')
    run = tmp_path / "run.toml"
    run.write_text(f"[model]\nhf = {json.dumps(str(path), ensure_ascii=False)}\n", encoding="utf-8")
    planned(capsys, "--model", str(run), "--toml", str(tmp_path / "new" / "out.toml"))
    assert load(tmp_path / "new" / "out.toml").model.hf == str(path)


def test_a_description_without_heads_is_unreadable(folder):
    (folder / "config.json").write_text(json.dumps(LLAMA | {"num_attention_heads": 0}))
    with pytest.raises(UserError, match=r"config\.json cannot be read: num_attention_heads is 0"):
        find_model(str(folder))


def test_a_model_that_is_code_has_no_shape(tmp_path):
    run = tmp_path / "run.toml"
    run.write_text('[model]\nmodule = "mine:build"\n')
    with pytest.raises(UserError, match=r"mine:build' is code, which does not say its shape"):
        find_model(str(run))


def test_a_preset_that_nobody_knows_is_named(tmp_path):
    run = tmp_path / "run.toml"
    run.write_text('[model]\npreset = "lama-42m"\n')
    with pytest.raises(
        ConfigError, match=r"model\.preset = 'lama-42m' is not one of .* Did you mean 'llama-42m'"
    ):
        find_model(str(run))


def test_what_a_run_would_leave_out_of_a_description_stands_above_it(folder, capsys, tmp_path):
    described = LLAMA | {"rope_scaling": {"rope_type": "llama3", "factor": 32.0}}
    (folder / "config.json").write_text(json.dumps(described))
    text = planned(capsys, "--model", str(folder))
    note = text.partition("# A model of slipstream's")[2].partition("[model]")[0]
    assert "describes another one (rope_type)" in note
    run = tmp_path / "run.toml"  # as the note says
    run.write_text(note.rpartition("FILE.toml, with ")[2].removesuffix(" in it.\n\n"))
    assert find_model(str(run)).settings == ModelSettings({"hf": str(folder)})
    assert "a [b] model: " in " ".join(text.split()), "no markup in a name"
    (folder / "config.json").write_text(json.dumps(LLAMA))
    assert "# A model of slipstream's" not in planned(capsys, "--model", str(folder))


def test_processors_are_planned_as_they_train(capsys, tmp_path):
    """In float32, on `train.device = cpu`, with the cutover that such a run takes."""
    options = ["--device", "cpu", "--model", "llama-42m", "--devices", "8", "--memory", "64"]
    options += ["--stages", "8", "--microbatches", "128", "--schedule", "2bw"]
    (layout, *_) = json.loads(planned(capsys, *options, "--json"))["layouts"]
    assert layout["cutover"] >= 13
    run = resolve(from_tree(tomllib.loads(layout["toml"])))
    assert (run.train.device, run.train.dtype) == ("cpu", "float32")


def test_a_profile_says_which_device_it_is_of(capsys, tmp_path):
    def profile(device: str) -> list[str]:
        path = tmp_path / "profile.json"
        measured = Measured.of(PRESETS["llama-42m"], 2048, "muon")
        timings = dict.fromkeys(PARTS, Timing(1e-3, 1e-3, 2e-3, 2e-3, 1e-3))
        Profile(measured, device, 64e9, timings, Link(1e-4, 1e9)).write(path)
        return ["--model", "llama-42m", "--profile-file", str(path), "--json"]

    of_cpu = json.loads(planned(capsys, *profile("cpu, one core")))
    named = json.loads(planned(capsys, *profile("cpu, one core"), "--device", "cpu"))
    assert of_cpu == named
    layouts = json.loads(planned(capsys, *profile("NVIDIA H100 80GB HBM3")))["layouts"]
    assert any("bfloat16" in (layout["toml"] or "") for layout in layouts)
    with pytest.raises(SystemExit):
        main(["plan", "--sequence", "2048", *profile("Abacus 9")])
    assert "'Abacus 9', which is no preset. Name the nearest with --device" in capsys.readouterr().err


def test_what_makers_call_their_devices():
    names = {
        "NVIDIA A100-SXM4-80GB": "a100-80g", "NVIDIA A100-SXM4-40GB": "a100-40g", "NVIDIA H200": "h200",
        "NVIDIA GeForce RTX 4090": "rtx4090", "Tesla V100-SXM2-16GB": "v100-16g", "AMD Instinct MI300X": "mi300x",
    }  # fmt: skip
    assert {name: device_called(name).name for name in names} == names
    assert {device_called(name).name for name in DEVICES} == {*DEVICES}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--batch-tokens", "5000"], "not a whole number of sequences"),
        (["--narrow"], "drop --device cpu"),
        (["--schedule", "nope"], "no schedule 'nope'"),
        (["--correction", "nope"], "correction nope"),
        (["--stages", "5"], "5 stages do not divide 2 devices"),
        (["--toml", "/proc/nowhere/run.toml"], "cannot be written"),
    ],
)
def test_nothing_is_measured_for_a_job_that_cannot_be(capsys, monkeypatch, options, words):
    monkeypatch.setattr("slipstream.cli.plan._profile", lambda *_: pytest.fail("measured"))
    monkeypatch.setattr("slipstream.cli.profile.device_title", lambda: "cpu, one core")
    with pytest.raises(SystemExit):
        main(
            ["plan", "--profile", "--model", "llama-42m", "--batch-tokens", "64k", "--devices", "2", *options]
        )
    assert words in capsys.readouterr().err


def test_a_device_that_nobody_knows_is_not_timed_first(capsys, monkeypatch):
    monkeypatch.setattr("slipstream.cli.plan._profile", lambda *_: pytest.fail("measured"))
    monkeypatch.setattr("slipstream.cli.profile.device_title", lambda: "Abacus 9")
    with pytest.raises(SystemExit):
        main(["plan", "--profile", "--model", "llama-42m", "--batch-tokens", "256k", "--devices", "2"])
    assert "'Abacus 9', which is no preset" in capsys.readouterr().err


def test_a_batch_that_is_told_to_work_works():
    for tokens, devices in ((5000, 2), (100_000, 64), (3_000_000, 12), (8191, 1)):
        cluster = Cluster(find_device("h100"), devices)
        with pytest.raises(UserError, match=r"The nearest that works is --batch-tokens (\d+)") as caught:
            Job(PRESETS["llama-42m"], cluster, tokens, 4096)
        told = int(str(caught.value).rpartition(" ")[2].rstrip("."))
        assert search(Job(PRESETS["llama-42m"], cluster, told, 4096)).fitting


def test_newton_schulz_takes_its_time_with_every_optimizer_that_has_it(capsys):
    assert {*NEWTON_SCHULZ} <= {*OPTIMIZERS}

    def seconds(optimizer: str) -> float:
        options = ["--optimizer", optimizer, "--model", "llama3-8b", "--stages", "4", "--schedule", "1f1b"]
        return json.loads(planned(capsys, *options, "--json"))["layouts"][0]["losses"]["update"]

    muon, *others = map(seconds, NEWTON_SCHULZ)
    assert others == pytest.approx([muon] * len(others), rel=0.2)


def test_pipelines_that_do_not_fill_their_nodes_cross_them():
    from slipstream.plan.throughput import place

    h100 = find_device("h100")
    near, far = h100.intra_bandwidth, h100.inter_bandwidth
    found = {(stages, ranks): place(h100, stages, ranks, True).link_bandwidth for stages, ranks in
             ((8, 4), (4, 8), (2, 8), (3, 2), (3, 8), (6, 8), (12, 2))}  # fmt: skip
    wanted = dict.fromkeys(((8, 4), (4, 8), (2, 8), (3, 2)), near) | dict.fromkeys(
        ((3, 8), (6, 8), (12, 2)), far
    )
    assert found == wanted
