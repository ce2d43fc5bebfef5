"""Training speed on one device: our trainer with delay and without it, beside transformers' Llama.

Contenders train the same shapes on the same synthetic tokens, one after the other, each in a process of its own,
so that none inherits another's memory or compiled code (`train_contenders.py`). One that fails is listed so.

    tokens/s = timed updates x tokens per update / seconds between two moments when the device had nothing to do
    MFU      = tokens/s x training FLOPs per token (`models.sizes`) / peak of the device, one formula for all
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from slipstream.bench.checks import check_device, make_room
from slipstream.bench.train_contenders import Setting, shape_of
from slipstream.data.shards import token_dtype, write_shard
from slipstream.errors import UserError
from slipstream.metrics.breakdown import Breakdown
from slipstream.metrics.throughput import peak_flops
from slipstream.models.sizes import PRESETS, flops_per_token

CONTENDERS = {
    "ours": "slipstream, delay 1, error feedback",
    "ours_sync": "slipstream, no delay",
    "hf_compiled": "transformers + AdamW, compiled",
    "hf_eager": "transformers + AdamW, eager",
    "hf_bf16": "transformers + AdamW, bfloat16 weights, compiled",
    "titan_compiled": "torchtitan's Llama + AdamW, compiled",
}
USUAL = ("ours", "ours_sync", "hf_compiled", "hf_eager")
_SHARD_TOKENS = 1 << 21


def run(
    setting: Setting,
    contenders: Sequence[str] = USUAL,
    timeout_seconds: float = 300.0,
    progress: Callable[[str], None] = lambda text: None,
    out: Path | None = None,
) -> dict[str, Any]:
    """Measure each contender; everything `--json` prints, also into `out` after each contender."""
    check(setting, contenders)
    make_room(out)
    name = torch.cuda.get_device_name() if setting.device == "cuda" else "cpu"
    result: dict[str, Any] = asdict(setting) | {
        "tokens_per_step": setting.tokens_per_step,
        "device_name": name,
        "torch": torch.__version__,
        "contenders": {},
    }
    with tempfile.TemporaryDirectory(prefix="slipstream-bench-") as folder:
        data = Path(folder) / "data"
        write_tokens(data, setting)
        for contender in contenders:
            progress(f"{CONTENDERS[contender]} ...")
            row = _in_a_process(contender, setting, data, Path(folder) / contender, timeout_seconds)
            if "error" not in row:
                row |= speed(setting, row["step_seconds"])
            result["contenders"][contender] = row
            result |= _ratios(result["contenders"])
            progress(f"{CONTENDERS[contender]}: {_in_words(row)}")
            if out is not None:
                out.write_text(json.dumps(result, indent=1) + "\n")
    return result


def speed(setting: Setting, step_seconds: float) -> dict[str, float | None]:
    tokens_per_second, shape = setting.tokens_per_step / step_seconds, shape_of(setting)
    peak = peak_flops(torch.cuda.get_device_name()) if setting.device == "cuda" else None
    mfu = None
    if shape is not None and peak is not None:
        mfu = tokens_per_second * flops_per_token(shape, setting.sequence) / peak
    return {"tokens_per_second": tokens_per_second, "mfu": mfu}


def check(setting: Setting, contenders: Sequence[str]) -> None:
    """Refuse what cannot run before anything is started."""
    if setting.model not in PRESETS:
        raise UserError(f"There is no model preset '{setting.model}'. Presets: {', '.join(PRESETS)}.")
    unknown = [name for name in contenders if name not in CONTENDERS]
    if unknown or not contenders:
        what = f"is called {' or '.join(map(repr, unknown))}" if unknown else "is named"
        raise UserError(f"No contender {what}. Set --contenders to some of {','.join(CONTENDERS)}.")
    check_device(setting.device)
    for option, least in (("microbatches", 1), ("rows", 1), ("steps", 1), ("warmup", 1), ("profile", 0)):
        if getattr(setting, option) < least:
            raise UserError(f"--{option} is {getattr(setting, option)}; it must be at least {least}.")
    if setting.rival_rows is not None and (
        setting.rival_rows < 1 or setting.rows * setting.microbatches % setting.rival_rows
    ):
        raise UserError(
            f"--rival-rows is {setting.rival_rows}; it must divide the {setting.rows * setting.microbatches} "
            "sequences of an update."
        )
    if len(set(contenders)) < len(contenders):
        raise UserError(f"--contenders {','.join(contenders)}: name each of them once.")
    shape = shape_of(setting)  # refuses what no contender could run with
    rivals = [name for name in contenders if not name.startswith("ours")]
    if rivals and (shape is None or shape.experts or shape.qk_norm):
        raise UserError(
            "The rivals are dense Llamas without a norm of queries and keys. Set --contenders ours,ours_sync."
        )


def write_tokens(folder: Path, setting: Setting) -> None:
    """Random tokens, as unequal in frequency as words are: an embedding's gradient notices."""
    folder.mkdir(parents=True)
    vocab = (shape_of(setting) or PRESETS[setting.model]).vocab
    shares = 1.0 / (np.arange(vocab) + 3.0)
    random = np.random.default_rng(0)
    least = 2 * setting.rows * setting.microbatches * (setting.sequence + 1)
    for split, count in (("train", max(least, _SHARD_TOKENS)), ("val", least)):
        tokens = random.choice(vocab, size=count, p=shares / shares.sum())
        write_shard(folder / f"{split}_000.bin", tokens.astype(token_dtype(vocab)))


def _in_a_process(
    contender: str, setting: Setting, data: Path, folder: Path, timeout_seconds: float
) -> dict[str, Any]:
    folder.mkdir()
    task = json.dumps([contender, asdict(setting), str(data), str(folder)])
    try:
        ended = subprocess.run(
            [sys.executable, "-P", "-m", "slipstream.bench.train_contenders", task],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            timeout=timeout_seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"error": f"not done after {timeout_seconds:g} s"}
    answer = folder / "answer.json"
    if not answer.exists():
        lines = ended.stderr.strip().splitlines()
        return {"error": lines[-1] if lines else f"exit code {ended.returncode}"}
    return json.loads(answer.read_text())


def _in_words(row: dict[str, Any]) -> str:
    if "error" in row:
        return f"failed: {row['error']}"
    mfu = "" if row["mfu"] is None else f", MFU {row['mfu']:.1%}"
    return f"{row['tokens_per_second']:,.0f} tokens/s{mfu}"


def _ratios(rows: Mapping[str, dict[str, Any]]) -> dict[str, float | None]:
    """The speed of ours over that of each other."""
    speeds = {name: row.get("tokens_per_second") for name, row in rows.items()}
    ours = speeds.pop("ours", None)
    others = {name: speeds.get(name) for name in CONTENDERS if name != "ours"}
    return {f"ours_over_{name}": ours / speed if ours and speed else None for name, speed in others.items()}


def print_table(console: Console, result: Mapping[str, Any]) -> None:
    title = (
        f"{result['model']}, sequence {result['sequence']}, {result['microbatches']} x {result['rows']} sequences "
        f"per update, {result['device_name']}, torch {result['torch']}"
    )
    table = Table("trainer", "tokens/s", "MFU", "ms per update", "peak GiB", "set-up s", title=title)
    for name, row in result["contenders"].items():
        if "error" in row:
            table.add_row(CONTENDERS[name], "failed", "", "", "", "")
            continue
        table.add_row(
            CONTENDERS[name],
            f"{row['tokens_per_second']:,.0f}",
            "" if row["mfu"] is None else f"{row['mfu']:.1%}",
            f"{row['step_seconds'] * 1e3:.1f}",
            f"{row['peak_memory_bytes'] / 2**30:.1f}",
            f"{row['setup_seconds']:.0f}",
        )
    console.print(table)
    for name, row in result["contenders"].items():
        if "error" in row:
            console.print(f"{CONTENDERS[name]} failed: {row['error']}", markup=False)
        elif row["rows"] != result["rows"]:
            console.print(f"{CONTENDERS[name]}: microbatches of {row['rows']}, larger ones did not fit")
        if row.get("parts"):
            found = Breakdown(row["parts"])
            console.print(f"\n{CONTENDERS[name]}", *found.lines(), sep="\n", markup=False, soft_wrap=True)
    for name in CONTENDERS:
        if ratio := result.get(f"ours_over_{name}"):
            console.print(f"{ratio:.3f} times as fast as {CONTENDERS[name]}")
