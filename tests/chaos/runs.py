"""One run of a case: its processes are started, a fault is seen through, and everything that belongs to it is gone."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import warm
from chaos.faults import EVERY, STEPS, TIMEOUT_SECONDS, Kind, Layout, Spec
from chaos.network import Line
from slipstream.distributed.answers import STACKS

VOCAB = 64
MARGIN_SECONDS = 90.0  # beyond the timeout: a busy machine is no hang
TORCHRUN_SECONDS = 30.0  # how long torchrun waits for the ranks it told to stop
STACKS_SECONDS = 5.0
PAUSE_SECONDS = 0.015
SETTINGS = [
    f"model.vocab={VOCAB}", "model.dim=16", "model.layers=4", "model.heads=2", "model.kv_heads=1", "model.ffn=32",
    "data.sequence=16", "pipeline.microbatches=4", "pipeline.microbatch_size=2", "pipeline.cutover=2",
    f"train.steps={STEPS}", "train.eval_every=6", "train.eval_batches=1", "train.device=cpu", "train.report=false",
    "train.timeline_at=0", f"train.timeout_seconds={TIMEOUT_SECONDS}", "train.disk_seconds=5",
    f"checkpoint.every={EVERY}", "checkpoint.keep=3", "optim.lr=0.01", "health.hash_every=5",
]  # fmt: skip


@dataclass
class Ended:
    codes: list[int | None]
    said: str
    fault: float | None
    gone_seconds: float | None  # None: it was not gone in time


def processes() -> list[int]:
    """Everything that was started for a run and is still there."""
    server = warm._server[0].pid
    try:
        found = Path(f"/proc/{server}/task/{server}/children").read_text().split()
    except FileNotFoundError:  # not every kernel lists them
        found = [
            entry
            for entry in os.listdir("/proc")
            if entry.isdigit() and _stat(int(entry))[1:2] == [str(server)]
        ]
    return [int(pid) for pid in found]


def run(
    folder: Path, layout: Layout, spec: Spec, kind: Kind | None = None, line: Line | None = None
) -> Ended:
    """Start it, see the fault through, and wait until everything that belongs to it is gone."""
    place = folder / f"attempt-{len(list(folder.glob('attempt-*')))}"
    place.mkdir()
    arguments = [
        *SETTINGS, f"run.dir={folder / 'run'}", f"data.path={folder / 'data'}", f"pipeline.stages={layout.stages}",
        f"pipeline.data_ranks={layout.data_ranks}",
    ]  # fmt: skip
    spec = {"ranks": [], **spec, "place": str(place), "pause_seconds": PAUSE_SECONDS, "arguments": arguments}
    by_ranks = kind is not None and kind.started_by == "ranks"
    with ExitStack() as stack:
        output = stack.enter_context((place / "said").open("w"))
        taken = (
            stack.enter_context(socket.create_server(("127.0.0.1", 0))) if by_ranks and line is None else None
        )
        specs = _ranks(spec, layout, line, taken) if by_ranks else [spec]
        started = []
        for number, one in enumerate(specs):
            path = place / f"spec-{number}.json"
            path.write_text(json.dumps(one))
            words = [sys.executable, "-m", "chaos.process", str(path)]
            started.append(warm.Popen(words, stdout=output, stderr=subprocess.STDOUT, cwd=folder))
        began = time.time()
        if taken is not None:
            (place / "fault").write_text(str(began))
        _from_outside(spec, kind, place, started, line)
        gone = _wait(place, began, started if by_ranks else [])
        codes = [_code(process) for process in started]
    fault = float((place / "fault").read_text()) if (place / "fault").exists() else None
    since = None if gone is None else gone - (fault or began)
    return Ended(codes, (place / "said").read_text(errors="replace"), fault, since)


def _code(process: warm.Popen) -> int | None:
    """Its server tells of a process a moment after it is gone."""
    try:
        return process.wait(MARGIN_SECONDS)
    except subprocess.TimeoutExpired:
        return None


def _ranks(spec: Spec, layout: Layout, line: Line | None, taken: socket.socket | None) -> list[Spec]:
    """One specification a rank; the first half of them on one side of the line."""
    if taken is not None:
        address, port = taken.getsockname()[:2]
    else:
        assert line is not None
        address, port = line.addresses[0], 29400
    half = -(-layout.ranks // 2)
    found = []
    for rank in range(layout.ranks):
        side = 0 if line is None or rank < half else 1
        there = layout.ranks if line is None else (half if side == 0 else layout.ranks - half)
        environment = {
            "RANK": rank, "WORLD_SIZE": layout.ranks, "LOCAL_RANK": rank - side * half, "LOCAL_WORLD_SIZE": there,
            "MASTER_ADDR": address, "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo" if line is None else line.interface,
            "SLIPSTREAM_MACHINE": side,
        }  # fmt: skip
        one = spec | {"rank": rank, "environment": {key: str(value) for key, value in environment.items()}}
        found.append(one if line is None else one | {"namespace": line.names[side]})
    return found


def _from_outside(spec: Spec, kind: Kind | None, place: Path, started: list, line: Line | None) -> None:
    if spec.get("kind") == "early":
        time.sleep(spec["after_seconds"])
        (place / "fault").write_text(str(time.time()))
        started[0].send_signal(getattr(signal, spec["signal"]))
    elif kind is not None and line is not None and "line" in kind.extra:
        deadline = time.monotonic() + MARGIN_SECONDS
        while not (place / "now").exists() and time.monotonic() < deadline and processes():
            time.sleep(0.01)
        (place / "fault").write_text(str(time.time()))
        if kind.extra["line"] == "slow":
            line.delay_seconds = 0.05
            return
        line.cut = True
        if "repaired_after" in kind.extra:
            time.sleep(kind.extra["repaired_after"])
            line.cut = False


def _wait(place: Path, began: float, ranks: list) -> float | None:
    """When the last process was gone; None where some had to be ended here. `ranks` are ended as torchrun does it."""
    failed = None
    while left := processes():
        if failed is None and any(rank.poll() for rank in ranks):
            failed = time.monotonic()
            for rank in ranks:
                rank.terminate()
        if failed is not None and time.monotonic() - failed > TORCHRUN_SECONDS:
            for rank in ranks:
                rank.kill()
        fault = float((place / "fault").read_text() or began) if (place / "fault").exists() else None
        now = time.time()
        stopped = [pid for pid in left if _stopped(pid)]
        # A process that a case has stopped for good cannot go by itself: a person, or the launcher, ends it.
        if fault is not None and now - fault > 2 * TIMEOUT_SECONDS + MARGIN_SECONDS:
            break
        if fault is None and now - began > 2 * MARGIN_SECONDS:
            break
        if stopped == left and now - (fault or began) > 2 * TIMEOUT_SECONDS:
            for pid in stopped:
                _kill(pid)
        time.sleep(0.02)
    if not left:
        return time.time()
    for pid in left:  # where they stand is said beside the rest
        with suppress(ProcessLookupError):
            os.kill(pid, STACKS)
    time.sleep(STACKS_SECONDS)
    end_all()
    return None


def end_all() -> None:
    """Whatever is left of a run, by force."""
    while left := processes():
        for pid in left:
            _kill(pid)
        time.sleep(0.02)


def _stopped(pid: int) -> bool:
    return _stat(pid)[:1] == ["T"]


def _stat(pid: int) -> list[str]:
    """The state of a process, its parent, and so on; nothing of one that is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
