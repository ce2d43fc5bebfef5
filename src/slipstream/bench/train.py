"""Training speed on one device: our trainer with delay and without it, beside transformers' Llama.

Contenders train the same shapes on the same synthetic tokens, one after the other, each in a process of its own,
so that none inherits another's memory or compiled code. What one process does is in `train_ours.py` and
`train_transformers.py`; this file starts them and compares. A contender that fails is listed with its error.

    tokens/s = timed updates x tokens per update / seconds between two moments when the device had nothing to do
    MFU      = tokens/s x training FLOPs per token (`models.sizes`) / peak of the device, one formula for all
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from slipstream.bench.checks import check_device, make_room
from slipstream.bench.train_setting import Setting
from slipstream.data.shards import token_dtype, write_shard
from slipstream.errors import UserError
from slipstream.metrics.throughput import peak_flops
from slipstream.models.attention import attention_kernel
from slipstream.models.sizes import PRESETS, flops_per_token

CONTENDERS = {
    "ours": "slipstream, delay 1, error feedback",
    "ours_sync": "slipstream, no delay",
    "hf_compiled": "transformers + AdamW, compiled",
    "hf_eager": "transformers + AdamW, eager",
    "hf_bf16": "transformers + AdamW, bfloat16 weights, compiled",
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
    on_gpu = setting.device == "cuda"
    name = torch.cuda.get_device_name() if on_gpu else "cpu"
    result: dict[str, Any] = asdict(setting) | {
        "tokens_per_step": setting.tokens_per_step,
        "device_name": name,
        "torch": torch.__version__,
        "contenders": {},
    }
    peak = peak_flops(name) if on_gpu else None
    flops = flops_per_token(PRESETS[setting.model], setting.sequence)
    with tempfile.TemporaryDirectory(prefix="slipstream-bench-") as folder:
        data = Path(folder) / "data"
        write_tokens(data, setting)
        for contender in contenders:
            progress(f"{CONTENDERS[contender]} ...")
            row = _in_a_process(contender, setting, data, Path(folder) / contender, timeout_seconds)
            if "error" not in row:
                row["tokens_per_second"] = setting.tokens_per_step / row["step_seconds"]
                row["mfu"] = row["tokens_per_second"] * flops / peak if peak else None
            result["contenders"][contender] = row
            result |= _ratios(result["contenders"])
            progress(f"{CONTENDERS[contender]}: {_in_words(row)}")
            if out is not None:
                out.write_text(json.dumps(result, indent=1) + "\n")
    return result


def check(setting: Setting, contenders: Sequence[str]) -> None:
    """Refuse what cannot run before anything is started."""
    if setting.model not in PRESETS:
        raise UserError(f"There is no model preset '{setting.model}'. Presets: {', '.join(PRESETS)}.")
    unknown = [name for name in contenders if name not in CONTENDERS]
    if unknown or not contenders:
        what = (
            f"No contender is called {' or '.join(map(repr, unknown))}"
            if unknown
            else "No contender is named"
        )
        raise UserError(f"{what}. Set --contenders to some of {','.join(CONTENDERS)}.")
    check_device(setting.device)
    for option in ("microbatches", "rows", "steps", "warmup"):
        if getattr(setting, option) < 1:
            raise UserError(f"--{option} is {getattr(setting, option)}; it must be at least 1.")
    if setting.rival_rows is not None and (
        setting.rival_rows < 1 or setting.rows * setting.microbatches % setting.rival_rows
    ):
        raise UserError(
            f"--rival-rows is {setting.rival_rows}; it must divide the {setting.rows * setting.microbatches} "
            "sequences of an update."
        )
    if len(set(contenders)) < len(contenders):
        raise UserError(f"--contenders {','.join(contenders)}: name each of them once.")
    from slipstream.bench.train_ours import config_of

    config_of(setting, Path("data"), Path("run"), delayed=True)  # refuses what no contender could run with
    if PRESETS[setting.model].experts and any(name.startswith("hf_") for name in contenders):
        raise UserError("The transformers contenders are dense. Set --contenders ours,ours_sync.")


def write_tokens(folder: Path, setting: Setting) -> None:
    """Random tokens, as unequal in frequency as words are: an embedding's gradient notices."""
    folder.mkdir(parents=True)
    vocab = PRESETS[setting.model].vocab
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
    answer = folder / "answer.json"
    task = {"contender": contender, "setting": asdict(setting), "data": str(data), "folder": str(folder)}
    try:
        ended = subprocess.run(
            [sys.executable, "-m", "slipstream.bench.train", json.dumps(task | {"answer": str(answer)})],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            timeout=timeout_seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"error": f"not done after {timeout_seconds:g} s"}
    if not answer.exists():
        lines = ended.stderr.strip().splitlines()
        return {"error": lines[-1] if lines else f"exit code {ended.returncode}"}
    return json.loads(answer.read_text())


def _perform(task: dict[str, Any]) -> dict[str, Any]:
    """In the process of its own: one contender."""
    from slipstream.bench import train_ours, train_transformers

    setting = Setting(**task["setting"] | {"overrides": tuple(task["setting"]["overrides"])})
    data, folder, contender = Path(task["data"]), Path(task["folder"]), task["contender"]
    try:
        if contender.startswith("ours"):
            found = train_ours.measure(setting, data, folder, delayed=contender == "ours")
        else:
            # The rival gets the attention kernel that our trainer is given.
            config = train_ours.config_of(setting, data, folder, delayed=True)
            with attention_kernel(config.train.attention):
                found = train_transformers.measure(
                    setting, data, compiled=contender != "hf_eager", narrow=contender == "hf_bf16"
                )
    except UserError as error:
        return {"error": str(error)}
    except torch.OutOfMemoryError as error:
        return {"error": f"out of memory with {setting.rows} rows: {str(error).splitlines()[0]}"}
    return asdict(found)


def _in_words(row: dict[str, Any]) -> str:
    if "error" in row:
        return f"failed: {row['error']}"
    mfu = "" if row["mfu"] is None else f", MFU {row['mfu']:.1%}"
    return f"{row['tokens_per_second']:,.0f} tokens/s{mfu}"


def _ratios(rows: dict[str, dict[str, Any]]) -> dict[str, float | None]:
    """The speed of ours over that of each other."""

    def over(other: str) -> float | None:
        ours, theirs = (rows.get(name, {}).get("tokens_per_second") for name in ("ours", other))
        return ours / theirs if ours and theirs else None

    return {f"ours_over_{name}": over(name) for name in CONTENDERS if name != "ours"}


if __name__ == "__main__":
    _task = json.loads(sys.argv[1])
    Path(_task["answer"]).write_text(json.dumps(_perform(_task)))
