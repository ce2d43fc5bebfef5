"""What a case does inside the ranks: the job of a run with one fault armed on one of them.

`perform` stands where `train.session.run_rank` stands. It notes the rank's process, arms the fault, and runs the same
code. A fault that is due at a step goes off in a thread, a little later: while that step or the next is computed.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from slipstream.models.stages import Stage
from slipstream.train import checkpoint, session, state, trainer, writer

_clock = time.time  # the real one: a fault may put another in its place


def perform(world: Any, spec: dict[str, Any], *args: Any, **options: Any) -> Any:
    rank = 0 if world is None else world.rank
    place = Path(spec["place"])
    (place / f"rank-{rank}").write_text(str(os.getpid()))
    _slow_down(spec)
    if spec.get("kind") in ARMS and rank in spec["ranks"]:
        ARMS[spec["kind"]](spec, place)
    return session.run_rank(world, *args, **options)


def mark(place: Path, once: bool = True) -> None:
    """Now. What a fault does comes after this."""
    path = place / "fault"
    if not (once and path.exists()):
        path.write_text(str(_clock()))


def _slow_down(spec: dict[str, Any]) -> None:
    """A step takes at least a moment: the runs are so small that a fault would come after their end."""
    usual, pause = trainer.submit, spec["pause_seconds"]

    def submit(parts: Any, step: int, batch: Any) -> None:
        time.sleep(pause)
        usual(parts, step, batch)

    trainer.submit = submit


def _at_step(spec: dict[str, Any], then: Callable[[], None], *, at_once: bool = False) -> None:
    usual = trainer.submit

    def later() -> None:
        time.sleep(spec["delay_seconds"])
        then()

    def submit(parts: Any, step: int, batch: Any) -> None:
        if step == spec["step"]:
            then() if at_once else threading.Thread(target=later, daemon=True).start()
        usual(parts, step, batch)

    trainer.submit = submit


def _target(spec: dict[str, Any], place: Path) -> int:
    name = "launcher" if spec["target"] == "launcher" else f"rank-{spec['target']}"
    return int((place / name).read_text())


def _signal(spec: dict[str, Any], place: Path) -> None:
    number = getattr(signal, spec["signal"])

    def send() -> None:
        pid = _target(spec, place)
        mark(place)
        os.kill(pid, number)
        if number == signal.SIGSTOP and spec.get("pause_for"):
            _continue_later(pid, spec["pause_for"])
        for again in range(spec.get("again", 0)):
            time.sleep(1.2 + again)
            os.kill(pid, number)

    _at_step(spec, send)


def _continue_later(pid: int, seconds: float) -> None:
    """By a process of its own: this one may be what was stopped."""
    subprocess.Popen(["sh", "-c", f"sleep {seconds}; kill -CONT {pid}"])


def _pause(spec: dict[str, Any], place: Path) -> None:
    """SIGSTOP, and SIGCONT by a process that is started first."""

    def send() -> None:
        pid = _target(spec, place)
        mark(place)
        subprocess.Popen(["sh", "-c", f"kill -STOP {pid}; sleep {spec['pause_for']}; kill -CONT {pid}"])

    _at_step(spec, send)


def _die_in_rename(spec: dict[str, Any], place: Path) -> None:
    """The writer, at the `nth` rename of the wished kind: before it, or after it and before the folder is synced."""
    usual, left = Path.rename, spec["nth"]

    def rename(self: Path, target: Any) -> Path:
        nonlocal left
        name = Path(target).name
        mine = name.startswith("step-") if spec["of"] == "commit" else name.startswith("stage-")
        left -= mine
        if mine and left == 0:
            if spec["after"]:
                usual(self, target)
            mark(place)
            os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(60)
        return usual(self, target)

    Path.rename = rename


def _fill(spec: dict[str, Any], place: Path) -> None:
    """A file takes what is left of the disk; where `pause_for` is given it is removed again."""
    filler = Path(spec["disk"]) / "filler"

    def fill() -> None:
        mark(place)
        try:
            with filler.open("wb") as file:
                while True:
                    file.write(b"\x00" * 4096)
                    file.flush()
        except OSError:
            pass
        if spec.get("pause_for"):
            time.sleep(spec["pause_for"])
            filler.unlink()

    _at_step(spec, fill)


def _read_only(spec: dict[str, Any], place: Path) -> None:
    """The disk of the checkpoints; it can be done while no file of it is being written."""

    def remount() -> None:
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline:
            words = ["mount", "-o", "remount,ro", spec["disk"]]
            if subprocess.run(words, capture_output=True).returncode == 0:
                return mark(place)
            time.sleep(0.01)
        return None

    _at_step(spec, remount, at_once=True)


def _slow_disk(spec: dict[str, Any], place: Path) -> None:
    usual = state.sync

    def sync(path: Path) -> None:
        mark(place)
        time.sleep(spec["delay_seconds"])
        usual(path)

    state.sync = checkpoint.sync = writer.sync = sync


def _no_memory(spec: dict[str, Any], place: Path) -> None:
    """No more address space than is in use now."""

    def refuse() -> None:
        mark(place)
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used, used))
        torch.empty(64 << 20)  # so much is asked for at once

    _at_step(spec, refuse, at_once=True)


def _in_forward(spec: dict[str, Any], place: Path, effect: Callable[[Any], Any]) -> None:
    due = False

    def now() -> None:
        nonlocal due
        due = True

    def hook(module: nn.Module, inputs: Any, output: Any) -> Any:
        nonlocal due
        if not due or not isinstance(module, Stage) or not torch.is_grad_enabled():
            return None
        due = False
        mark(place)
        return effect(output)

    nn.modules.module.register_module_forward_hook(hook)
    _at_step(spec, now, at_once=True)


def _raise(spec: dict[str, Any], place: Path) -> None:
    def effect(output: Any) -> Any:
        raise RuntimeError("a forward of this case raises")

    _in_forward(spec, place, effect)


def _not_finite(spec: dict[str, Any], place: Path) -> None:
    def effect(output: Any) -> Any:
        return _times_nan(output)

    _in_forward(spec, place, effect)


def _times_nan(output: Any) -> Any:
    if isinstance(output, torch.Tensor):
        return output * float("nan") if output.is_floating_point() else output
    if isinstance(output, tuple):
        return tuple(_times_nan(part) for part in output)
    return output


def _clock_jumps(spec: dict[str, Any], place: Path) -> None:
    def jump() -> None:
        mark(place)
        time.time = lambda: _clock() + spec["jump_seconds"]
        time.time_ns = lambda: int((_clock() + spec["jump_seconds"]) * 1e9)

    _at_step(spec, jump, at_once=True)


def _cut_data(spec: dict[str, Any], place: Path) -> None:
    """Under the feet of the run that has it mapped."""

    def cut() -> None:
        mark(place)
        os.truncate(spec["file"], 2000)

    _at_step(spec, cut)


def _tell(spec: dict[str, Any], place: Path) -> None:
    """The campaign does it: it waits for this file."""
    _at_step(spec, lambda: (place / "now").touch())


def _remove_folder(spec: dict[str, Any], place: Path) -> None:
    def remove() -> None:
        mark(place)
        subprocess.run(["rm", "-rf", spec["folder"]], check=False)

    _at_step(spec, remove)


ARMS: dict[str, Callable[[dict[str, Any], Path], None]] = {
    "signal": _signal,
    "pause": _pause,
    "rename": _die_in_rename,
    "fill": _fill,
    "read-only": _read_only,
    "slow-disk": _slow_disk,
    "memory": _no_memory,
    "raise": _raise,
    "nan": _not_finite,
    "clock": _clock_jumps,
    "cut-data": _cut_data,
    "tell": _tell,
    "remove-folder": _remove_folder,
}


def read(path: str) -> dict[str, Any]:
    return json.loads(Path(path).read_text())
