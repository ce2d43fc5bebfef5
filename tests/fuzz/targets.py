"""What is handed in, and to whom: valid files, how one of them is damaged, and the command that reads them.

Each target has a folder of valid files (`make`), a way to change some of them (`change`) and the commands that a person
would give (`use`), called in this process as the command line calls them. `reads_only`: nothing of what was there may
be written.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from fuzz import mutate
from fuzz.valid import (
    ROOT,
    TEXT,
    TINY,
    VOCAB,
    make_config,
    make_export,
    make_plan_files,
    make_results,
    make_run,
    make_shards,
    make_study,
    make_texts,
    nothing,
    tiny,
)
from slipstream.cli import main
from slipstream.config.load import keys, read_toml
from slipstream.data.tokenizer import Tokenizer
from slipstream.data.tokens import TokenDataset
from slipstream.train.manifest import sealed
from slipstream.train.session import run_rank


@dataclass(frozen=True)
class Target:
    name: str
    make: Callable[[Path], None]
    change: Callable[[random.Random, Path], None]
    use: Callable[[random.Random, Path], None]
    share: int  # of a hundred or so inputs
    reads_only: bool = True


def command(*words: object) -> None:
    main([str(word) for word in words])


# How they are damaged -----------------------------------------------------------------------------------


def any_file(rng: random.Random, folder: Path, pattern: str = "*") -> Path:
    return rng.choice(sorted(path for path in folder.rglob(pattern) if path.is_file()))


def damage(rng: random.Random, path: Path) -> None:
    """One file: the place it has, its bytes, or what a tree in it says."""
    kind = rng.randrange(12)
    if kind == 0:
        mutate.place(rng, path)
    elif kind < 6 and path.suffix == ".json":
        mutate.write_json(path, mutate.tree(rng, json.loads(path.read_text(encoding="utf-8"))))
    elif kind < 6 and path.suffix == ".toml":
        changed = mutate.toml(mutate.tree(rng, read_toml(path)))
        path.write_bytes(changed.encode("utf-8", "surrogatepass"))
    elif kind < 6 and path.suffix == ".jsonl":
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        changed = mutate.tree(rng, lines, most=6)
        rows = changed if isinstance(changed, list) else [changed]
        path.write_bytes(b"".join(json.dumps(row).encode() + b"\n" for row in rows))
    else:
        path.write_bytes(mutate.raw(rng, path.read_bytes()))


def damage_any(*patterns: str) -> Callable[[random.Random, Path], None]:
    def change(rng: random.Random, folder: Path) -> None:
        damage(rng, any_file(rng, folder, rng.choice(patterns)))

    return change


def damage_export(rng: random.Random, folder: Path) -> None:
    path = folder / "results" / "a-moe.jsonl.gz"
    if rng.randrange(3) == 0:
        return damage(rng, path)
    rows = [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]
    for row in rows:
        row["training"] = row["training"][:2]
    changed = mutate.tree(rng, rows, most=4)
    lines = "".join(json.dumps(row) + "\n" for row in (changed if isinstance(changed, list) else [changed]))
    path.write_bytes(gzip.compress(lines.encode(), 1, mtime=0))
    return None


def damage_checkpoint(rng: random.Random, folder: Path) -> None:
    """As it happens to a disk; or as somebody does it who can seal what he has changed."""
    newest = max((folder / "run" / "checkpoints").glob("step-*"))
    if rng.randrange(4) == 0:
        return damage(rng, any_file(rng, newest))
    manifest = newest / "manifest.json"
    body = json.loads(manifest.read_text())
    kind = rng.randrange(4)
    if kind <= 1:
        del body["seal"]
        body = mutate.tree(rng, body)
    elif kind == 2:
        piece = newest / "stage-000.json"
        mutate.write_json(piece, mutate.tree(rng, json.loads(piece.read_text())))
    else:
        damage_tensors(rng, newest / "stage-000.safetensors")
    if isinstance(body, dict):
        body.pop("seal", None)
        if kind > 1:
            for name, value in body["files"].items():
                data = (newest / name).read_bytes()
                value.update(bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
        body = sealed(body)
    mutate.write_json(manifest, body)
    return None


def damage_tensors(rng: random.Random, path: Path) -> None:
    if rng.randrange(3) == 0:
        return path.write_bytes(mutate.raw(rng, path.read_bytes())) and None
    tensors = load_file(path)
    for _ in range(rng.randint(1, 3)):
        name = rng.choice(sorted(tensors))
        kind = rng.randrange(6)
        tensor = tensors.pop(name)
        if kind == 0 and tensor.is_floating_point():
            tensors[name] = torch.full_like(tensor, rng.choice((float("nan"), float("inf"), 1e38)))
        elif kind == 1:
            tensors[name] = tensor.to(rng.choice((torch.float64, torch.bfloat16, torch.int64, torch.bool)))
        elif kind == 2:
            tensors[name] = tensor.reshape(-1)[: tensor.numel() // 2].clone()
        elif kind == 3:
            tensors[rng.choice(("master/x", "x", "banks/q/r", name + "/y", "master"))] = tensor
        elif kind == 4:
            tensors[name] = torch.zeros(3, 1, 2)
        if not tensors:
            break
    save_file(tensors, path)
    return None


# What a person then does --------------------------------------------------------------------------------


def use_config(rng: random.Random, folder: Path) -> None:
    command("train", folder / "changed.toml", "--dry-run")


def use_overrides(rng: random.Random, folder: Path) -> None:
    known = list(keys())
    words = []
    for _ in range(rng.randint(1, 4)):
        key = rng.choice(known) if rng.random() < 0.9 else mutate.word(rng)
        text = mutate.toml(mutate.value(rng))[4:-1] if rng.random() < 0.4 else mutate.word(rng)
        words.append(f"{key}={text}".replace("\x00", ""))
    if rng.random() < 0.1:
        words.append(mutate.word(rng))
    command("train", "--dry-run", *words)


def use_study(rng: random.Random, folder: Path) -> None:
    (folder / "results").mkdir(exist_ok=True)
    command("study", "list", folder / "changed.toml", "--results", folder / "results")


def use_results(rng: random.Random, folder: Path) -> None:
    out, results = folder / "out", folder / "results"
    words = rng.choice((["list"], ["table", "--out", out], ["export", "--out", out]))
    command(
        "study", words[0], folder / "study.toml", "data.path=/tmp/wiki16k", "--results", results, *words[1:]
    )


def use_shards(rng: random.Random, folder: Path) -> None:
    if rng.random() < 0.3:
        command("data", "show", folder)
        return
    data = TokenDataset(folder, rng.choice(("train", "valid")), 8, 4, 0, vocab=VOCAB)
    data.batch(rng.choice((0, 1, 10**6)))
    data.fingerprint()


def use_tokenizer(rng: random.Random, folder: Path) -> None:
    tokenizer = Tokenizer.load(folder / "tokenizer.json")
    tokenizer.decode(tokenizer.encode(TEXT[:200])[:50])
    assert tokenizer.vocab_size > 0


def use_texts(rng: random.Random, folder: Path) -> None:
    words = ["--tokenizer", folder / "tokenizer.json"] if rng.random() < 0.8 else ["--vocab", "300"]
    command("data", "prepare", folder / "texts", "--out", folder / "out", *words)


def use_checkpoint(rng: random.Random, folder: Path) -> None:
    if rng.random() < 0.5:
        command("generate", folder / "run", "The", "--tokens", 2)
    else:
        command("export", folder / "run", folder / "out")


def resume(rng: random.Random, folder: Path) -> None:
    run_rank(None, tiny(folder, "train.steps=6").model_dump())


def fork(rng: random.Random, folder: Path) -> None:
    changed = ["train.steps=6", f"run.fork_from={folder / 'run'}", f"run.dir={folder / 'fork'}"]
    run_rank(None, tiny(folder, *changed, rng.choice(("optim.lr=0.1", "optim.name=adamw"))).model_dump())


def use_hugging_face(rng: random.Random, folder: Path) -> None:
    if rng.random() < 0.4:
        command("plan", "--model", folder / "hf", "--devices", 4, "--top", 2, "--batch-tokens", "64k")
        return
    start = [
        *TINY[6:],
        f"model.init_from={folder / 'hf'}",
        "optim.name=adamw",
        "train.steps=1",
        "checkpoint.keep=0",
    ]
    start = [word for word in start if not word.startswith("checkpoint.every")]
    if rng.random() < 0.6:
        command("train", "--dry-run", *start, f"data.path={folder / 'data'}")
    else:
        command("train", *start, f"data.path={folder / 'data'}", f"run.dir={folder / 'run'}")


def use_plan(rng: random.Random, folder: Path) -> None:
    words = ["--model", "cpu-default", "--devices", 4, "--top", 2, "--batch-tokens", "8k", "--sequence", 128]
    words += ["--device", folder / "device.toml", "--penalty", folder / "penalty.json", "--stages", 2]
    if rng.random() < 0.5:
        words += ["--profile-file", folder / "profile.json"]
    command("plan", *words, *(["--json"] if rng.random() < 0.3 else []))


def use_log(rng: random.Random, folder: Path) -> None:
    run = folder / "run"
    kind = rng.randrange(5)
    if kind == 0:
        command("report", run, "--out", folder / "out.html")
    elif kind == 1:
        command("runs", folder, *(["--json"] if rng.random() < 0.5 else []))
    elif kind == 2:
        shutil.copytree(run, folder / "other", symlinks=True)
        command("runs", run, folder / "other", *(["--diff"] if rng.random() < 0.5 else []))
    elif kind == 3:
        command("watch", run, "--once")
    else:
        (folder / "results").mkdir()
        shutil.copytree(run, folder / "results" / "run", symlinks=True)
        command("study", "list", ROOT / "studies" / "toy.toml", "--results", folder / "results")


COMMANDS = {
    "schedule": ["--stages", "--microbatches", "--groups", "--forward", "--backward", "--update", "--link",
                 "--in-flight", "--cutover", "--chunks", "--every", "--compare"],
    "plan": ["--model", "--devices", "--device", "--batch-tokens", "--sequence", "--optimizer", "--correction",
             "--tokens", "--schedule", "--stages", "--microbatches", "--microbatch-size", "--memory", "--efficiency",
             "--per-node", "--latency", "--bandwidth", "--jitter", "--penalty", "--top", "--profile-file"],
    "config": ["--json"], "runs": ["--tag", "--diff", "--json"], "watch": ["--once", "--interval"],
    "report": ["--out"], "data": ["prepare", "show", "--out", "--vocab", "--valid-fraction", "--separator"],
    "study": ["list", "table", "export", "--results", "--out"], "export": ["--dtype", "--json"],
    "generate": ["--tokens", "--temperature", "--top-k", "--seed"], "completion": [], "__complete": [],
    "train": ["--dry-run"],
}  # fmt: skip
GOOD = (
    "2bw",
    "1f1b",
    "zbv",
    "interleaved_1f1b",
    "paci",
    "4",
    "8",
    "h100",
    "cpu-default",
    "muon",
    "4M",
    "1,2,3,4",
    "x",
)


def use_words(rng: random.Random, folder: Path) -> None:
    """Options of every command with values of every kind."""
    name = rng.choice(sorted(COMMANDS))
    words: list[object] = [rng.choice(GOOD)] if rng.random() < 0.6 else []
    for option in rng.sample(COMMANDS[name], rng.randint(0, min(3, len(COMMANDS[name])))):
        words.append(option)
        if rng.random() < 0.9:
            words.append(mutate.word(rng) if rng.random() < 0.6 else rng.choice(GOOD))
    if name == "train" and "--dry-run" not in words:
        words.append("--dry-run")
    if name == "watch" and "--once" not in words:
        words.append("--once")
    command(name, *words)


def change_one(rng: random.Random, folder: Path) -> None:
    chosen = any_file(rng, folder, "*.toml")
    damage(rng, chosen)
    if chosen.exists() or chosen.is_symlink():
        chosen.rename(folder / "changed.toml")


def untouched(rng: random.Random, folder: Path) -> None: ...


LOGS = ("events.jsonl", "config.toml", "environment.json")
TARGETS = (
    Target("config files", make_config, change_one, use_config, 12),
    Target("overrides", nothing, untouched, use_overrides, 14),
    Target("command lines", nothing, untouched, use_words, 10),
    Target("study files", make_study, change_one, use_study, 6),
    Target("study results", make_results, damage_export, use_results, 4),
    Target("shards", make_shards, damage_any("*.bin", "meta.json"), use_shards, 12),
    Target("tokenizers", make_shards, damage_any("tokenizer.json"), use_tokenizer, 8),
    Target("texts", make_texts, damage_any("*.txt", "*.jsonl", "*.gz", "*.xz", "*.parquet", "*.zst"), use_texts, 8),
    Target("checkpoints", make_run, damage_checkpoint, use_checkpoint, 8),
    Target("checkpoints, resumed", make_run, damage_checkpoint, resume, 2, reads_only=False),
    Target("checkpoints, forked", make_run, damage_checkpoint, fork, 1, reads_only=False),
    Target("exports", make_export, damage_any("hf/*.json", "hf/*.safetensors"), use_hugging_face, 4),
    Target("device, penalty and profile files", make_plan_files, damage_any("*.toml", "*.json"), use_plan, 6),
    Target("event logs", make_run, damage_any(*(f"run/{name}" for name in LOGS)), use_log, 8),
)  # fmt: skip
