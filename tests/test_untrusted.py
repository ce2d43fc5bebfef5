"""Nothing that is only read may run code: not a checkpoint, a shard, a tokenizer, an export, a log or a name.

A run's own TOML is another matter: it may name Python objects (`model.module`), so it is trusted like a program. The
page docs/security.md says which is which.
"""

from __future__ import annotations

import ast
import json
import os
import pickle
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from fuzz.valid import ROOT, make_export, make_shards
from slipstream.cli import main
from train.test_forged import newest, seal

SOURCES = ROOT / "src" / "slipstream"
# Where bytes are unpickled: between processes of one user, over sockets that nobody else can open.
UNPICKLING = {"distributed/answers.py", "distributed/slots.py"}
EVIL = "evil_module_of_a_stranger"


class Bomb:
    """Unpickled, it leaves a file behind."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self):
        return Path.touch, (self.mark,)


@pytest.fixture
def run(made, tmp_path, monkeypatch) -> Path:
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    (tmp_path / f"{EVIL}.py").write_text(
        f"import pathlib; pathlib.Path({str(tmp_path / 'mark')!r}).touch()\n"
    )
    return tmp_path


def command(*words: object) -> int:
    try:
        main([str(word) for word in words])
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


def called(names: Sequence[str]) -> dict[str, set[str]]:
    """The modules that call something of each name."""
    last = {name.rpartition(".")[2] for name in names}  # to unparse few of all the calls
    found: dict[str, set[str]] = {name: set() for name in names}
    for path in SOURCES.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.Call)
                and getattr(node.func, "attr", getattr(node.func, "id", "")) in last
            ):
                name = ast.unparse(node.func)
                if name in found:
                    found[name].add(str(path.relative_to(SOURCES)))
    return found


def test_only_the_wires_of_one_user_are_unpickled():
    never = ("pickle.load", "torch.load", "eval", "exec", "os.system", "yaml.load", "marshal.loads")
    found = called(["pickle.loads", *never])
    assert found["pickle.loads"] == UNPICKLING
    for name in never:
        assert not found[name], name


def test_a_pickle_in_the_place_of_weights_is_not_opened(run):
    bomb = pickle.dumps(Bomb(run / "mark"))
    (newest(run) / "stage-000.safetensors").write_bytes(bomb)
    seal(newest(run))
    assert command("generate", run / "run", "x", "--tokens", 1) == 2
    assert command("export", run / "run", run / "out") == 2
    assert not (run / "mark").exists()


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.safetensors", "training_args.bin"])
def test_a_pickle_in_an_export_is_not_opened(tmp_path, name, capsys):
    make_export(tmp_path)
    if name.startswith("pytorch"):
        (tmp_path / "hf" / "model.safetensors").unlink()
    (tmp_path / "hf" / name).write_bytes(pickle.dumps(Bomb(tmp_path / "mark")))
    (tmp_path / "hf" / "modeling_evil.py").write_text(f"open({str(tmp_path / 'mark')!r}, 'w')")
    config = tmp_path / "hf" / "config.json"
    body = json.loads(config.read_text())
    config.write_text(json.dumps(body | {"auto_map": {"AutoModelForCausalLM": "modeling_evil.Evil"}}))
    words = [
        f"model.init_from={tmp_path / 'hf'}",
        "optim.name=adamw",
        "pipeline.schedule=emulate",
        "train.steps=1",
    ]
    words += [
        f"data.path={tmp_path / 'data'}",
        f"run.dir={tmp_path / 'run'}",
        "data.sequence=8",
        "train.quiet=true",
    ]
    words += [
        "pipeline.microbatches=2",
        "pipeline.microbatch_size=1",
        "train.eval_batches=1",
        "train.device=cpu",
    ]
    code = command("train", *words)
    assert code == (0 if name == "training_args.bin" else 2), capsys.readouterr().err
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize("name", ["train_0.bin", "meta.json", "tokenizer.json"])
def test_a_pickle_among_the_data_is_not_opened(tmp_path, name):
    make_shards(tmp_path / "data")
    (tmp_path / "data" / name).write_bytes(pickle.dumps(Bomb(tmp_path / "mark")))
    command("data", "show", tmp_path / "data")
    (tmp_path / "a.txt").write_text("A text. " * 200)
    command("data", "prepare", tmp_path / "a.txt", "--out", tmp_path / "o", "--tokenizer", tmp_path / "data")
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize("key", ["model.module", "data.module", "train.callback", "optim.correction"])
def test_a_module_that_a_checkpoint_names_is_not_imported(run, key):
    section, name = key.split(".")

    def change(body):
        body["meta"]["config"][section][name] = f"{EVIL}:layers"
        if key == "model.module":
            body["meta"]["model"] = {"module": f"{EVIL}:layers"}

    seal(newest(run), change)
    lines = (run / "run" / "config.toml").read_text().splitlines()
    kept = [line for line in lines if not line.startswith((f"{name} =", f"# {name} ="))]
    kept.insert(kept.index(f"[{section}]") + 1, f'{name} = "{EVIL}:layers"')
    (run / "run" / "config.toml").write_text("\n".join(kept))
    command("generate", run / "run", "x", "--tokens", 1)
    command("export", run / "run", run / "out")
    command("report", run / "run", "--out", run / "out.html")
    command("runs", run)
    command("watch", run / "run", "--once")
    assert not (run / "mark").exists()


@pytest.mark.parametrize("key", ["model.module", "data.module", "train.callback", "optim.correction"])
def test_a_dry_run_imports_nothing_that_a_config_names(run, key):
    section, name = key.split(".")
    (run / "sent.toml").write_text(f'[{section}]\n{name} = "{EVIL}:layers"\n')
    assert command("train", run / "sent.toml", "--dry-run") == 0
    assert not (run / "mark").exists()


ATTACKS = [
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "{{7*7}}",
    "[link=file:///etc/passwd]x[/link]",
]


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_name_is_text_on_the_page_and_in_the_terminal(run, attack, capsys):
    """In the log, in the settings, in what a model wrote, and as the name of the folder."""
    log = run / "run" / "events.jsonl"
    extra = [
        {"event": "sample", "step": 4, "prompt": attack, "text": attack},
        {"event": "error", "step": 4, "message": attack},
        {"event": "warning", "step": 4, "message": attack},
    ]
    log.write_text(log.read_text() + "".join(json.dumps(one) + "\n" for one in extra))
    text = (run / "run" / "config.toml").read_text()
    (run / "run" / "config.toml").write_text(text.replace("# name =", f"name = {json.dumps(attack)}  #"))
    folder = run / attack.replace("/", "_")
    os.rename(run / "run", folder)
    assert command("report", folder, "--out", run / "out.html") == 0
    page = (run / "out.html").read_text()
    assert page.count("<script") == 2, "the page's own two"
    assert "<img" not in page
    assert attack not in page or "<" not in attack
    assert "{{7*7}}" in page or "7*7" not in attack, "a page is no template"
    assert command("runs", run) == 0
    assert command("watch", folder, "--once") == 0
    assert "\x1b]8;" not in capsys.readouterr().out  # a terminal's own links
