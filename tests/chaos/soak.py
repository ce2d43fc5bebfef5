"""One long run, and what its processes hold from minute to minute: memory, open files, threads, speed.

    python -m chaos.soak --seconds 7200 --folder /tmp/soak --out soak.jsonl          start it, and watch
    python -m chaos.soak --table soak.jsonl                                          the first and the last quarter

A tiny model on two stages and two data ranks, with checkpoints, validation and reports, as `slipstream train` starts
it; on a GPU with `train.device=cuda` and larger sizes after the options. One line of JSON a minute: for the launcher
and each rank its memory (and what of it is its own), files and threads, the peaks of memory by stage, and how many
tokens were trained since the run began. At the end it is asked to stop, as a cluster does.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from chaos.cases import make_data
from chaos.runs import VOCAB

SETTINGS = [
    f"model.vocab={VOCAB}", "model.dim=32", "model.layers=4", "model.heads=2", "model.kv_heads=1", "model.ffn=64",
    "data.sequence=32", "pipeline.stages=2", "pipeline.data_ranks=2", "pipeline.microbatches=4",
    "pipeline.microbatch_size=2", "train.steps=100000000", "train.eval_every=50", "train.eval_batches=2",
    "train.device=cpu", "checkpoint.every=25", "checkpoint.keep=3", "health.hash_every=50", "train.timeout_seconds=600",
    "optim.schedule=constant",
]  # fmt: skip
STOP_SECONDS = 300.0


def main() -> None:
    parser = argparse.ArgumentParser(description="One long run, and what its processes hold.")
    parser.add_argument("settings", nargs="*", help="of the run, after those given here")
    parser.add_argument("--seconds", type=float, default=7200.0)
    parser.add_argument("--every", type=float, default=60.0)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--table", type=Path, default=None)
    given = parser.parse_args()
    if given.table is not None:
        print(table([json.loads(line) for line in given.table.read_text().splitlines()]))
        return
    if given.folder is None or given.out is None:
        parser.error("give --folder and --out")
    if not (given.folder / "data").exists():
        make_data(given.folder / "data")  # and the folder itself
    words = [
        sys.executable,
        "-m",
        "slipstream",
        "train",
        *SETTINGS,
        *given.settings,
        f"run.dir={given.folder / 'run'}",
    ]
    with (given.folder / "said").open("a") as said:
        run = subprocess.Popen([*words, f"data.path={given.folder / 'data'}"], stdout=said, stderr=said)
        watch(run, given)
        run.send_signal(signal.SIGTERM)
        print(f"It ended with {run.wait(STOP_SECONDS)}; its words are in {given.folder / 'said'}.")


def watch(run: subprocess.Popen, given: argparse.Namespace) -> None:
    began = time.monotonic()
    while (now := time.monotonic() - began) < given.seconds and run.poll() is None:
        step = newest_step(given.folder / "run")
        line = {
            "second": round(now, 1),
            "tokens": step.get("tokens", 0),
            "peaks": step.get("memory_bytes", []),
        }
        line["processes"] = [held(pid) for pid in (run.pid, *children(run.pid))]
        line["load"] = os.getloadavg()[0]
        with given.out.open("a") as file:
            file.write(json.dumps(line) + "\n")
        time.sleep(max(0.0, min(given.every, given.seconds - (time.monotonic() - began))))


def children(pid: int) -> list[int]:
    try:
        return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def held(pid: int) -> dict[str, Any]:
    place = Path(f"/proc/{pid}")
    try:
        status = dict(line.split(":", 1) for line in (place / "status").read_text().splitlines())
        rollup = dict(line.split(":", 1) for line in (place / "smaps_rollup").read_text().splitlines()[1:])
        own = sum(int(rollup[key].split()[0]) for key in ("Private_Clean", "Private_Dirty"))
        seconds = sum(map(int, (place / "stat").read_text().rpartition(")")[2].split()[11:13]))
        return {
            "pid": pid, "rss_kib": int(status["VmRSS"].split()[0]), "own_kib": own, "threads": int(status["Threads"]),
            "files": len(os.listdir(place / "fd")), "cpu_seconds": seconds / os.sysconf("SC_CLK_TCK"),
        }  # fmt: skip
    except (OSError, KeyError):
        return {"pid": pid}  # it went while it was looked at


def newest_step(folder: Path) -> dict[str, Any]:
    """As the log has it."""
    try:
        with (folder / "events.jsonl").open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 65536))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return {}
    for line in reversed(lines):
        if line.startswith("{") and line.endswith("}") and (event := json.loads(line))["event"] == "step":
            return event
    return {}


def table(lines: list[dict[str, Any]]) -> str:
    """The first and the last quarter of the time after the first five minutes, as Markdown."""
    whole = max(len(line["processes"]) for line in lines)  # a run that is ending has fewer
    lines = [line for line in lines if line["second"] >= 300 and len(line["processes"]) == whole]
    quarter = max(2, len(lines) // 4)
    first, last = lines[:quarter], lines[-quarter:]
    rows = [f"| | {_span(first)} | {_span(last)} |", "|---|---|---|"]

    def row(name: str, of: Any) -> None:
        rows.append(f"| {name} | {of(first)} | {of(last)} |")

    for at, name in enumerate(
        ["launcher", *(f"rank {rank}" for rank in range(len(lines[0]["processes"]) - 1))]
    ):
        for key, words, unit in (
            ("own_kib", "own memory, MiB", 1024),
            ("files", "files", 1),
            ("threads", "threads", 1),
        ):
            row(f"{name}: {words}", lambda part, a=at, k=key, u=unit: f"{_median(part, a, k) / u:.6g}")
    for stage in range(len(lines[0].get("peaks", []))):
        row(f"stage {stage}: peak, MiB", lambda part, s=stage: f"{part[-1]['peaks'][s] / 2**20:.6g}")
    row("tokens/s", lambda part: f"{_per(part, 'second'):.0f}")
    row("tokens per processor second", lambda part: f"{_per(part, 'cpu'):.0f}")
    return "\n".join(rows)


def _span(part: list[dict[str, Any]]) -> str:
    return f"minutes {part[0]['second'] / 60:.0f} to {part[-1]['second'] / 60:.0f}"


def _median(part: list[dict[str, Any]], at: int, key: str) -> float:
    return statistics.median(line["processes"][at].get(key, 0) for line in part)


def _per(part: list[dict[str, Any]], what: str) -> float:
    def clock(line: dict[str, Any]) -> float:
        if what == "second":
            return line["second"]
        return sum(one.get("cpu_seconds", 0.0) for one in line["processes"])

    return (part[-1]["tokens"] - part[0]["tokens"]) / (clock(part[-1]) - clock(part[0]))


if __name__ == "__main__":
    main()
