"""The command line: errors without a traceback, exit codes, JSON and nothing else, the pulse of every command."""

from __future__ import annotations

import errno
import io
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path

import pytest
from tests.train.conftest import TINY, make_data

import warm
from slipstream.cli import main
from slipstream.cli.train import parse
from slipstream.config import resolve
from slipstream.models.sizes import PRESETS, parameters
from slipstream.train.closing import next_steps


def run(*arguments: str, **options) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "slipstream", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, **options)


def exit_code(arguments: list[str]) -> int:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    return caught.value.code


def test_a_users_mistake_prints_no_traceback_and_exits_with_2(capsys):
    assert exit_code(["train", "train.stpes=3", "optim.lr=fast"]) == 2
    error = capsys.readouterr().err
    assert "2 problems in the configuration" in error
    assert "Did you mean train.steps?" in error
    assert "optim.lr = 'fast'" in error
    assert "Traceback" not in error


def test_a_value_may_be_longer_than_a_file_name(capsys):
    assert exit_code(["train", f"train.sample_prompt={'x' * 5000}", "--dry-run"]) == 0
    assert "x" * 5000 in capsys.readouterr().out


def test_what_no_terminal_can_show_is_shown_escaped(tmp_path, monkeypatch):
    """Half a surrogate pair, which JSON may hold."""
    data = make_data(tmp_path / "data")
    (data / "meta.json").write_text(json.dumps({"documents": "\ud800"}))
    said = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(said, encoding="utf-8", write_through=True))
    assert exit_code(["data", "show", str(data)]) == 0
    assert "\\ud800" in said.getvalue().decode()


def test_a_missing_file_and_an_unknown_command(capsys):
    assert exit_code(["train", "nowhere.toml"]) == 2
    assert "There is no file 'nowhere.toml'" in capsys.readouterr().err
    assert exit_code(["trian"]) == 2
    assert "Did you mean 'train'?" in capsys.readouterr().err


def test_a_place_that_cannot_be_used_is_said_in_one_line(capsys, tmp_path):
    taken = tmp_path / "taken"
    taken.write_text("")
    commands = {
        "cannot be written": ["bench", "--rounds", "1", "--out", str(taken / "x.json")],
        "is a folder. Name a file": ["bench", "--rounds", "1", "--out", str(tmp_path)],
        f"{taken}: File exists": [
            "study", "run", "studies/toy.toml", "--out", str(taken),
        ],
    }  # fmt: skip
    for expected, arguments in commands.items():
        assert exit_code(arguments) == 2
        told = " ".join(capsys.readouterr().err.split())
        assert told.startswith("error:"), told
        assert expected in told, told


def test_a_seed_beyond_64_bits_is_refused(capsys):
    assert exit_code(["generate", "x", "--seed", str(2**64)]) == 2
    assert "--seed" in capsys.readouterr().err


def test_a_full_disk_is_said_in_one_line(capsys, monkeypatch):
    """Noticed at a write, which does not tell the file's name."""

    def full(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("slipstream.cli._dispatch", full)
    with pytest.raises(SystemExit) as ended:
        main(["study"])
    assert ended.value.code == 2
    assert (
        capsys.readouterr().err == "error: No space left on device. Name another place, or make room there.\n"
    )


def test_a_setting_that_is_written_as_an_option_is_told_how(capsys):
    assert exit_code(["train", "--steps", "10"]) == 2
    assert "train.steps=VALUE" in capsys.readouterr().err


def test_dry_run_shows_what_the_optimizer_will_have(capsys):
    assert exit_code(["train", "--dry-run", "model.preset=llama-42m", "optim.momentum=0.9"]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("# optimizer: "))
    assert line.startswith("# optimizer: muon, lr 0.002, weight_decay 0.1, momentum 0.9,")
    assert "adamw_lr 0.002" in line
    assert exit_code(["train", "--dry-run", "optim.name=adamw_capped", "optim.options.cpa=1"]) == 2
    told = capsys.readouterr()
    assert "adamw_capped has no option 'cpa'. Did you mean 'cap'?" in told.err
    assert told.out == ""


def test_the_settings_in_a_runs_folder_are_of_that_run(tmp_path, monkeypatch, capsys):
    """Also where the folder has been moved, or is looked at from elsewhere; unless another folder is named."""
    run = tmp_path / "runs" / "a b"
    run.mkdir(parents=True)
    (run / "config.toml").write_text('[run]\ndir = "runs/before"\n')
    monkeypatch.chdir(tmp_path)
    here = str(run / "config.toml")
    assert parse([here]).run.dir == "runs/before", "no run began here"
    (run / "lock").write_text("123")
    assert parse([here]).run.dir == str(run)
    assert parse([here, "run.dir=other"]).run.dir == "other"
    assert parse(["runs/a b/config.toml"]).run.dir == "runs/a b"
    (tmp_path / "runs" / "before").symlink_to(run)
    assert parse([here]).run.dir == "runs/before", "the same folder"


def test_what_to_do_next_can_be_pasted(tmp_path):
    run = tmp_path / "a b"
    (run / "checkpoints").mkdir(parents=True)
    (run / "tokenizer.json").write_text("{}")
    config = resolve(parse([f"run.dir={run}"]))
    lines = next_steps(config).splitlines()
    commands = [shlex.split(line[13:]) for line in lines if "slipstream " in line]
    assert ["slipstream", "generate", str(run), "your prompt"] in commands
    assert ["slipstream", "export", str(run), f"{run}-hf"] in commands
    assert [
        "slipstream",
        "train",
        str(run / "config.toml"),
        f"train.steps={2 * config.train.steps}",
    ] in commands
    assert ["slipstream", "runs", str(tmp_path)] in commands


def test_dry_run_prints_a_run_that_can_be_started(capsys, tmp_path):
    assert exit_code(["train", "--dry-run", "optim.lr=3e-4", "pipeline.stages=4"]) == 0
    printed = capsys.readouterr().out
    assert f"# parameters: {parameters(PRESETS['cpu-default']):,}" in printed
    assert "lr = 0.0003" in printed
    (tmp_path / "run.toml").write_text(printed)
    assert exit_code(["train", str(tmp_path / "run.toml"), "--dry-run"]) == 0
    assert capsys.readouterr().out == printed


def test_a_key_set_apart_by_spaces_is_said_to_be_one(capsys):
    assert exit_code(["train", "train.steps", "=", "10"]) == 2
    assert "Write train.steps=VALUE, without spaces." in capsys.readouterr().err


def test_config_is_found_in_capitals_and_names_types_in_words(capsys):
    assert exit_code(["config", "COMPILE"]) == 0
    assert "(bool | layers | stage" in " ".join(capsys.readouterr().out.split())


def test_config_says_when_no_key_matches(capsys):
    assert exit_code(["config", "optim.learning_rate"]) == 2
    assert "contains 'optim.learning_rate'. Did you mean" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("word", "key"),
    [
        ("learning", "optim.lr"),
        ("precision", "train.dtype"),
        ("wandb", "train.trackers"),
        ("Early", "train.patience"),
    ],
)
def test_config_searches_what_is_said_of_a_key(capsys, word, key):
    assert exit_code(["config", word]) == 0
    assert key in capsys.readouterr().out


def test_output_that_nobody_reads_ends_a_command_without_a_traceback():
    process = subprocess.Popen(
        [sys.executable, "-m", "slipstream", "config"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    process.stdout.close()
    assert process.wait() in (1, 141)  # rich and click end with 1 themselves
    assert process.stderr.read() == ""


def test_config_lists_every_key(capsys):
    assert exit_code(["config", "--json"]) == 0
    rows = {row["key"]: row for row in json.loads(capsys.readouterr().out)}
    for key in ("run.dir", "train.steps", "train.seed", "checkpoint.every", "pipeline.stages", "pipeline.schedule",
                "pipeline.microbatches", "optim.name", "optim.lr", "optim.correction", "data.path",
                "model.preset", "model.init_from"):  # fmt: skip
        assert rows[key]["meaning"]
    assert rows["pipeline.stages"]["on_resume"] == "layout"
    assert exit_code(["config", "checkpoint"]) == 0
    text = capsys.readouterr().out
    assert "checkpoint.every = 100" in text
    assert "optim.lr" not in text


def test_commands_that_need_no_torch_do_not_import_it():
    code = (
        "import sys; from slipstream.cli import main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit: pass\n"
        "assert 'torch' not in sys.modules"
    )
    for arguments in (["--help"], ["config"], ["train", "--dry-run"], ["train", "--help"]):
        done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> list[str]:
    return [*TINY, f"data.path={make_data(tmp_path_factory.mktemp('data'))}"]


def test_train_generate_and_train_again(tmp_path, capfd):
    """The real command, on the embedded corpus: it starts its ranks, trains, samples, and says what it wrote."""
    small = [
        "model.dim=32",
        "model.layers=2",
        "model.ffn=64",
        "data.sequence=32",
        "train.steps=3",
        "checkpoint.every=2",
        "train.eval_batches=1",
        "pipeline.stages=1",  # one cold start less: two ranks start cold in `train/test_signals.py`
    ]
    place = f"run.dir={tmp_path / 'run'}"
    done = run("train", place, *small)
    assert done.returncode == 0, done.stderr
    assert "for guessing every token by its frequency" in done.stdout
    assert "A text by this model" not in done.stdout  # not asked for
    assert "step 3/3" in done.stdout
    assert str(tmp_path / "run" / "report.html") in done.stdout
    for name in ("report.html", "events.jsonl", "config.toml", "environment.json", "tokenizer.json"):
        assert (tmp_path / "run" / name).is_file()
    typed = json.loads((tmp_path / "run" / "environment.json").read_text())["command"]
    assert typed == shlex.join(["slipstream", "train", place, *small])
    capfd.readouterr()
    assert exit_code(["generate", str(tmp_path / "run"), "import ", "--tokens", "8", "--json"]) == 0
    answer = json.loads(capfd.readouterr().out)
    assert (answer["step"], answer["prompt"]) == (3, "import ")
    assert exit_code(["generate", str(tmp_path / "run"), "import ", "--tokens", "8"]) == 0
    assert capfd.readouterr().out == "import " + answer["text"] + "\n"
    assert exit_code(["train", str(tmp_path / "run" / "config.toml")]) == 0
    assert "This run is finished: 3 steps" in capfd.readouterr().out


def events(folder: Path) -> list[dict]:
    path = folder / "events.jsonl"
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]


def wait_for_step(folder: Path, step: int) -> None:
    deadline = time.monotonic() + 600  # a cold start on a machine that is busy to its limit
    while time.monotonic() < deadline:
        if any(event["event"] == "step" and event["step"] >= step for event in events(folder)):
            return
        time.sleep(0.02)
    raise AssertionError(f"step {step} was never reached")


def test_ctrl_c_saves_and_exits_cleanly_and_a_killed_launcher_leaves_nothing(tiny, tmp_path):
    popen = import_module("slipstream.distributed.launch").subprocess.Popen
    folder = tmp_path / "run"
    command = [sys.executable, "-m", "slipstream", "train", *tiny, f"run.dir={folder}", "train.steps=100000"]
    command += ["checkpoint.every=50"]
    process = popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    wait_for_step(folder, 5)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=200)
    assert process.returncode == 75, out  # stopped, not finished
    assert out.index("Ctrl-C again ends it at once") < out.index("saved. The same command resumes it.")
    stopped = [event["step"] for event in events(folder) if event["event"] == "checkpoint"][-1]
    assert f"Stopped at step {stopped}" in out

    process = popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    wait_for_step(folder, stopped + 5)
    workers = warm.children(process.pid)
    assert len(workers) == 2
    process.kill()
    process.wait()
    deadline = time.monotonic() + 100
    while any(Path(f"/proc/{pid}").exists() for pid in workers):
        assert time.monotonic() < deadline, "workers outlived their launcher"
        time.sleep(0.05)
    steps = [event["step"] for event in events(folder) if event["event"] == "step"]
    assert steps == list(range(1, len(steps) + 1))


@pytest.mark.slow
def test_torchrun_restarts_resume_by_themselves(tiny, tmp_path):
    folder, plain = tmp_path / "run", tmp_path / "plain"
    settings = [*tiny, "train.steps=300", "checkpoint.every=20"]
    assert run("train", *settings, f"run.dir={plain}", "pipeline.schedule=emulate").returncode == 0
    environment = dict(os.environ, OMP_NUM_THREADS="1")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += ["--max-restarts=3", "-m", "slipstream", "train", *settings, f"run.dir={folder}"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    )
    wait_for_step(folder, 50)
    os.kill(warm.children(process.pid)[-1], signal.SIGKILL)
    out, _ = process.communicate(timeout=200)
    assert process.returncode == 0, out
    from tests.train.conftest import assert_equal_weights

    from slipstream.train.master import load_master

    assert_equal_weights(load_master(folder).weights, load_master(plain).weights)
    steps = [event["step"] for event in events(folder) if event["event"] == "step"]
    assert steps == list(range(1, 301))
