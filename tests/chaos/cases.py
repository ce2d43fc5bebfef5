"""One case of the campaign: a layout and a fault drawn from a seed and a number, and what became of the run.

It starts the run, lets the fault happen, waits until every process is gone, starts the same command again (often with
another P) and looks at what there is in the end. Outcomes: "equal" (the weights of the undisturbed run to the bit,
every step recorded once) with or without a restart; everything else is a finding.
"""

from __future__ import annotations

import json
import random
import re
import shutil
import subprocess
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from chaos import network
from chaos.faults import KINDS, STEPS, Kind, Layout, Spec
from chaos.network import Line
from chaos.runs import VOCAB, Ended, run
from slipstream.data.shards import write_shard
from slipstream.errors import UserError
from slipstream.train.checkpoint import committed, verify
from slipstream.train.master import load_master

NOT_POSSIBLE = "not possible here"


@dataclass
class Case:
    """What happened, for the record."""

    seed: int
    number: int
    kind: str
    stages: int
    data_ranks: int
    stages_after: int
    spec: Spec
    outcome: str = ""
    said: str = ""
    step_at_stop: int | None = None  # newest committed checkpoint when the run had stopped
    resumed_at: int | None = None
    gone_seconds: float | None = None  # from the fault until every process was gone
    again_seconds: float | None = None  # from the next start until its first step
    seconds: float | None = None  # all of it
    torch: str = torch.__version__
    findings: list[str] = field(default_factory=list)


def make_data(folder: Path) -> None:
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    for split in ("train", "val"):
        write_shard(
            folder / f"{split}_000.bin", (np.cumsum(rng.integers(0, 4, 20_000)) % VOCAB).astype("<u2")
        )


def draw(seed: int, number: int, each: bool = False) -> tuple[Case, Kind]:
    """The same on every machine, whatever is possible there. `each`: the kinds in turn instead of by chance."""
    rng = random.Random(f"chaos {seed} {number}")
    kind = KINDS[number % len(KINDS)] if each else rng.choices(KINDS, [one.weight for one in KINDS])[0]
    layouts = [Layout(p, d) for p in (1, 2, 3, 4) for d in (1, 2) if p * d >= kind.fewest_ranks]
    layout = rng.choices(layouts, [1 / one.ranks**0.8 for one in layouts])[0]
    after = rng.choice((layout.stages, layout.stages, rng.randint(1, 4)))
    spec = kind.arm(rng, layout)
    return Case(seed, number, kind.name, layout.stages, layout.data_ranks, after, spec), kind


def possible() -> set[str]:
    """Which of what faults need (`Kind.needs`) this machine gives this user."""
    found = {""}
    if network.available():
        found.add("line")
    with tempfile.TemporaryDirectory() as place, ExitStack() as stack:
        try:
            _mount(Path(place) / "disk", stack)
            found.add("disk")
        except (OSError, subprocess.CalledProcessError):
            pass
    return found


class References:
    """The undisturbed runs: one for each number of data ranks, and for each update that is skipped."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._known: dict[tuple[int, int | None], dict[str, torch.Tensor]] = {}

    def get(self, data_ranks: int, skipped: int | None) -> dict[str, torch.Tensor]:
        key = data_ranks, skipped
        if key not in self._known:
            folder = self._root / f"reference-{data_ranks}-{skipped}"
            make_data(folder / "data")
            spec: Spec = {"kind": "none"}
            if skipped is not None:
                spec = {"kind": "nan", "ranks": [0], "step": skipped, "delay_seconds": 0}
            ended = run(folder, Layout(1, data_ranks), spec)
            assert ended.codes == [0], ended.said
            self._known[key] = load_master(folder / "run").weights
        return self._known[key]


def perform(case: Case, kind: Kind, folder: Path, references: References) -> None:
    """Fill in what became of it."""
    rng = random.Random(f"damage {case.seed} {case.number}")
    make_data(folder / "data")
    shutil.copytree(folder / "data", folder / "kept")
    layout, after = Layout(case.stages, case.data_ranks), Layout(case.stages_after, case.data_ranks)
    skipped = case.spec["step"] if case.spec["kind"] == "nan" else None
    wanted = references.get(case.data_ranks, skipped)
    spec = case.spec | {
        "disk": str(folder / "run" / "checkpoints") if kind.disk == "checkpoints" else str(folder / "run")
    }
    spec |= {"file": str(folder / "data" / "train_000.bin"), "folder": str(folder / "run")}
    with ExitStack() as stack:
        if kind.disk:
            _mount(Path(spec["disk"]), stack)
        line = stack.enter_context(Line()) if "line" in kind.extra else None
        first = run(folder, layout, spec, kind, line)
        case.gone_seconds = None if first.gone_seconds is None else round(first.gone_seconds, 2)
        case.said = first.said[-1500:] if first.gone_seconds is not None else first.said[-40_000:]
        _judge_first(case, kind, first)
        _mend_disk(kind, Path(spec["disk"]))
        if line is not None:
            line.cut, line.delay_seconds = False, 0.0
        _after(case, kind, folder, after, first, rng, wanted)


def _judge_first(case: Case, kind: Kind, first: Ended) -> None:
    if first.gone_seconds is None:
        case.findings.append("hang: processes were left after the timeout")
    ok = all(code == 0 for code in first.codes)
    happened = first.fault is not None
    if not happened and not ok:
        case.findings.append(f"it failed without the fault: codes {first.codes}")
    if kind.promise == "goes on" and not ok:
        case.findings.append(f"it should have gone on, and ended with {first.codes}")
    if not ok and kind.names and not re.search(kind.names, first.said):
        case.findings.append(f"nothing named what happened: codes {first.codes}")
    if not ok and not kind.traceback and "Traceback (most recent" in first.said:
        case.findings.append("a traceback was printed")
    if ok:
        case.outcome = "equal, without a stop" if happened else "equal, the fault came too late"


def _after(
    case: Case, kind: Kind, folder: Path, after: Layout, first: Ended, rng: random.Random, wanted: dict
) -> None:
    root = folder / "run" / "checkpoints"
    if not all(code == 0 for code in first.codes) or kind.loses:
        found = _good(root)
        case.step_at_stop = found[0] if found else None
        expected = case.step_at_stop
        if kind.damage is not None:
            kind.damage(rng, folder)
            expected = next(iter(_good(root)), None)
        saved = re.search(r"Stopped at step (\d+), saved", first.said)
        if saved and case.step_at_stop != int(saved[1]):
            case.findings.append(f"it said step {saved[1]} was saved; the newest is {case.step_at_stop}")
        if kind.refused and not _refused(case, kind, folder, after):
            return
        if expected is None and found and kind.damage is None:
            case.findings.append("no checkpoint was left")
        began = time.time()
        second = run(folder, after, {"kind": "none"})
        if second.codes != [0]:
            case.findings.append(f"the next start ended with {second.codes}: {second.said[-600:]}")
            case.outcome = "did not go on"
            return
        resumed, first_step = _resumed(folder / "run", began)
        case.resumed_at = resumed
        case.again_seconds = None if first_step is None else round(first_step - began, 2)
        if resumed is not None and resumed != (expected or 0):
            case.findings.append(f"it went on from step {resumed}, and {expected or 0} was saved")
        case.outcome = "equal, after a restart"
    weights = load_master(folder / "run").weights
    if weights.keys() != wanted.keys() or any(
        not torch.equal(weights[name], wanted[name]) for name in wanted
    ):
        case.findings.append("the weights differ from the undisturbed run's")
    steps = [event["step"] for event in _events(folder / "run") if event["event"] == "step"]
    if steps != list(range(1, STEPS + 1)) and not kind.loses:
        case.findings.append(f"the log has the steps {steps}")


def _refused(case: Case, kind: Kind, folder: Path, after: Layout) -> bool:
    """The next start sees the damage and says so; then it is repaired."""
    again = run(folder, after, {"kind": "none"})
    refused = again.codes != [0] and re.search(kind.refused, again.said) and "Traceback" not in again.said
    if not refused:
        case.findings.append(f"the damage was not refused: codes {again.codes}: {again.said[-600:]}")
    shutil.rmtree(folder / "data")
    shutil.copytree(folder / "kept", folder / "data")
    return bool(refused)


def _good(root: Path) -> list[int]:
    """The steps of whole checkpoints, newest first."""
    found = []
    for path in committed(root):
        try:
            found.append(verify(path).step)
        except UserError:
            continue
    return found


def _events(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "events.jsonl").read_text(errors="replace").splitlines()
    return [json.loads(line) for line in lines if line.endswith("}")]


def _resumed(folder: Path, began: float) -> tuple[int | None, float | None]:
    """(the step that the newest start began from, when its first step was recorded)."""
    events = _events(folder)
    starts = [at for at, event in enumerate(events) if event["event"] == "start"]
    if not starts or events[starts[-1]]["time"] < began - 1:
        return None, None
    step = next((event["time"] for event in events[starts[-1] :] if event["event"] == "step"), None)
    return events[starts[-1]]["step"], step


def _mount(disk: Path, stack: ExitStack) -> None:
    disk.mkdir(parents=True, exist_ok=True)
    (disk.parent if disk.name == "checkpoints" else disk).joinpath("lock").touch()  # a run of ours
    words = ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(disk)]
    subprocess.run(words, check=True, capture_output=True)
    stack.callback(subprocess.run, ["umount", "-l", str(disk)], check=False)
    if disk.name != "checkpoints":
        (disk / "lock").touch()


def _mend_disk(kind: Kind, disk: Path) -> None:
    if kind.disk:
        subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=False)
        (disk / "filler").unlink(missing_ok=True)
