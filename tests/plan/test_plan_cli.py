"""The command: JSON alone on stdout, a table and a TOML for people, errors without a traceback, no torch."""

from __future__ import annotations

import json
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
        (["--memory", "nan"], "memory_bytes must be above 0"),
        (["--bandwidth", "nan"], "inter_bandwidth must be above 0"),
        (["--sequence", "0"], "--sequence"),
        (["--jitter", "-1"], "--jitter"),
        (["--latency", "-5"], "--latency"),
        (["--toml", "/nowhere/run.toml"], "cannot be written"),
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
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, timeout=250)
