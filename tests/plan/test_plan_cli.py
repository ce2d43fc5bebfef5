"""The command: JSON alone on stdout, a table and a TOML for people, errors without a traceback, no torch."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib

import pytest

from slipstream.cli import main
from slipstream.config import from_tree, resolve

ARGUMENTS = [
    "plan",
    "--model",
    "smollm2-360m",
    "--devices",
    "8",
    "--batch-tokens",
    "256k",
    "--sequence",
    "2048",
]


def run(*arguments: str) -> None:
    with pytest.raises(SystemExit) as leaving:
        main([*ARGUMENTS, *arguments])
    assert not leaving.value.code


def test_json_is_alone_on_stdout(capsys):
    run("--json")
    captured = capsys.readouterr()
    tree = json.loads(captured.out)
    assert tree["devices"] == 8
    assert captured.err == ""


def test_the_terminal_shows_table_reasons_picture_and_toml(capsys, tmp_path):
    run("--stages", "4", "--toml", str(tmp_path / "run.toml"))
    text = capsys.readouterr().out
    for word in ("schedule", "tok/s", "2bw", "delay", "Memory: rank", "To run it", "[pipeline]", "stage 0"):
        assert word in text
    assert tomllib.loads((tmp_path / "run.toml").read_text())["pipeline"]["stages"] == 4


def test_the_picture_shows_which_microbatches_are_old(capsys):
    run("--stages", "2", "--schedule", "2bw", "--microbatch-size", "16")
    text = " ".join(capsys.readouterr().out.split())
    (told,) = re.findall(r"cutover (\d)\.", text)
    assert int(told) < 8
    assert f" c{told} " in text, "and in its row"
    first_stage = text[text.index("stage 0") : text.index("stage 1")]
    assert re.findall(r"b(\d)", first_stage) == list(map(str, range(int(told)))), first_stage
    assert "Small letters: reads old weights" in text


@pytest.mark.parametrize(
    "options", [[], ["--float32"], ["--devices", "1"], ["--schedule", "1f1b"], ["--devices", "3"]]
)
def test_every_toml_is_a_run_that_train_accepts(capsys, options):
    run("--json", *options)
    tomls = [layout["toml"] for layout in json.loads(capsys.readouterr().out)["layouts"]]
    assert any(tomls)
    for text in filter(None, tomls):
        resolve(from_tree(tomllib.loads(text)))


def test_a_placement_that_train_does_not_make_is_marked_and_has_no_toml(capsys):
    """Ranks of one pipeline are neighbours there, so its stages share a node before its data ranks do."""
    options = [
        "--model",
        "smollm2-1.7b",
        "--devices",
        "32",
        "--stages",
        "2",
        "--bandwidth",
        "20",
        "--top",
        "40",
    ]
    run(*options, "--json")
    layouts = json.loads(capsys.readouterr().out)["layouts"]
    assert not all(layout["pipeline_inside"] for layout in layouts)
    assert not any(layout["toml"] for layout in layouts if not layout["pipeline_inside"])
    schedules = {layout["schedule"] for layout in layouts if layout["toml"]}
    assert schedules >= {"1f1b", "gpipe", "zbv", "pipedream_2bw"}  # the best that runs is always there
    run(*options)
    assert "spread" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--microbatch-size", "0"], "--microbatch-size"),
        (["--top", "0"], "--top"),
        (["--efficiency", "2"], "at most 1"),
        (["--memory", "nan"], "--memory must be above 0"),
        (["--bandwidth", "nan"], "--bandwidth must be above 0"),
        (["--memory", "0"], "--memory must be above 0"),
        (["--sequence", "0"], "--sequence"),
        (["--jitter", "nan"], "--jitter must be 0 or more"),
        (
            ["--devices", "1", "--sequence", "128", "--batch-tokens", "64M"],
            "Take --batch-tokens 16777216 or less",
        ),
        (["--jitter", "-1"], "--jitter"),
        (["--latency", "-5"], "--latency"),
        (["--toml", "/proc/nowhere/run.toml"], "cannot be written"),
    ],
)
def test_a_value_out_of_range_is_named(capsys, options, words):
    with pytest.raises(SystemExit) as leaving:
        main([*ARGUMENTS, *options])
    assert leaving.value.code == 2
    assert words in capsys.readouterr().err


def test_a_device_may_have_any_name(capsys, tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('name = "H200 [/MIG]"\npeak_flops = 1e14\nmemory_bytes = 8e10\n')
    run("--device", str(path), "--stages", "4")
    assert "H200 [/MIG]" in capsys.readouterr().out


def test_a_mistake_is_one_message_and_exit_code_2(capsys):
    with pytest.raises(SystemExit) as leaving:
        main([*ARGUMENTS, "--model", "smollm2-36m"])
    assert leaving.value.code == 2
    assert "smollm2-360m" in capsys.readouterr().err


def test_planning_never_imports_torch():
    program = (
        "import sys; from slipstream.cli import main\n"
        f"try:\n    main({ARGUMENTS!r} + ['--json'])\n"
        "except SystemExit: pass\n"
        "assert 'torch' not in sys.modules, 'torch was imported'"
    )
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, timeout=120)


def test_the_size_of_a_microbatch_is_that_of_a_run(capsys):
    """Over all data ranks, as pipeline.microbatch_size: what is asked for is what the TOML says."""
    run("--stages", "2", "--microbatch-size", "16", "--json")
    layouts = json.loads(capsys.readouterr().out)["layouts"]
    assert {layout["microbatch_size"] * layout["data_ranks"] for layout in layouts} == {16}
    tomls = [tomllib.loads(layout["toml"]) for layout in layouts if layout["toml"]]
    assert {tree["pipeline"]["microbatch_size"] for tree in tomls} == {16}


def planned(capsys, *options: str) -> dict:
    with pytest.raises(SystemExit) as leaving:
        main(["plan", "--devices", "8", "--batch-tokens", "256k", "--sequence", "2048", "--json", *options])
    assert not leaving.value.code
    return json.loads(capsys.readouterr().out)


def test_a_model_is_read_from_its_config_json_and_from_a_run(capsys, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({
        "architectures": ["LlamaForCausalLM"], "vocab_size": 49152, "hidden_size": 960, "num_hidden_layers": 32,
        "num_attention_heads": 15, "num_key_value_heads": 5, "intermediate_size": 2560, "tie_word_embeddings": True,
        "rope_theta": 100000.0, "rope_scaling": {"rope_type": "llama3", "factor": 8.0},
    }))  # fmt: skip
    (tmp_path / "run.toml").write_text('[model]\npreset = "smollm2-135m"\ndim = 960\nlayers = 32\nheads = 15\n'
                                       "kv_heads = 5\nffn = 2560\n")  # fmt: skip
    known = planned(capsys, "--model", "smollm2-360m", "--stages", "4")
    for model in (tmp_path, tmp_path / "config.json", tmp_path / "run.toml"):
        found = planned(capsys, "--model", str(model), "--stages", "4")
        assert [layout["tokens_per_second"] for layout in found["layouts"]] == [
            layout["tokens_per_second"] for layout in known["layouts"]
        ]
        text = next(layout["toml"] for layout in found["layouts"] if layout["toml"])
        assert resolve(from_tree(tomllib.loads(text))).model.dim == 960


def test_narrow_sums_and_momentum_leave_room_and_are_written_down(capsys):
    given = ["--model", "smollm2-360m", "--devices", "4", "--stages", "4", "--batch-tokens", "256k"]
    found = {way: planned(capsys, *given, "--schedule", "2bw", *way) for way in ((), ("--narrow",))}
    text = next(layout["toml"] for layout in found["--narrow",]["layouts"] if layout["toml"])
    config = resolve(from_tree(tomllib.loads(text)))
    assert config.train.gradient_dtype == config.optim.options["state_dtype"] == "bfloat16"
    most = [max(rank["state"] for rank in plan["layouts"][0]["memory"]) for plan in found.values()]
    assert most[1] < most[0]
    with pytest.raises(SystemExit):
        main(["plan", "--narrow", "--optimizer", "adamw"])
    assert "--narrow is for Muon with banks in bf16" in " ".join(capsys.readouterr().err.split())


def test_rows_that_cannot_be_run_say_why_and_a_penalty_from_elsewhere_is_marked(capsys):
    with pytest.raises(SystemExit):
        main(["plan", "--model", "llama3-8b", "--device", "h200", "--devices", "64"])
    told = " ".join(capsys.readouterr().out.split())
    assert "Not run by `slipstream train` yet, and ranked for comparison:" in told
    assert "the optimizer is sharded under 2bw only" in told
    assert "Our own nearest figure is" in told
    large = ["--model", "llama3-70b", "--device", "h200", "--batch-tokens", "1M"]
    with pytest.raises(SystemExit):
        main(["plan", *large, "--devices", "128", "--stages", "32", "--schedule", "2bw"])
    told = " ".join(capsys.readouterr().out.split())
    assert "That penalty was not measured at this size:" in told
