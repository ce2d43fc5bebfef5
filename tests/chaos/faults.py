"""The kinds of faults: how each is armed, and what the rule promises of it.

`promise`: "goes on" (the run ends as if nothing had happened), "stops" (it ends with an error whose text matches
`names`, and the same command goes on) or "either". Whatever the promise, the weights in the end are those of the
undisturbed run, to the bit, and no checkpoint that was committed is lost.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

STEPS = 12
EVERY = 2  # steps between checkpoints
TIMEOUT_SECONDS = 10.0
NAN_STEPS = (4, 8)  # each has an undisturbed run of its own to be compared with

Spec = dict[str, Any]


@dataclass(frozen=True)
class Layout:
    stages: int
    data_ranks: int

    @property
    def ranks(self) -> int:
        return self.stages * self.data_ranks


@dataclass(frozen=True)
class Kind:
    name: str
    promise: str
    arm: Callable[[random.Random, Layout], Spec]
    names: str = ""  # a pattern of what is said when the run stops; "": nobody is left to say it
    damage: Callable[[random.Random, Path], None] | None = (
        None  # done to the case's folder after the run has stopped
    )
    refused: str = ""  # what the next start says; then the damage is repaired
    disk: str = ""  # "run" or "checkpoints": a disk of its own
    started_by: str = "launcher"  # or "ranks": each rank as torchrun starts it
    fewest_ranks: int = 1
    weight: int = 2
    loses: bool = False  # what it takes away is more than the newest checkpoint
    traceback: bool = False  # an error of a program's own is shown with its place
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def needs(self) -> str:
        """What only root has, and not everywhere: a "disk" or a "line" of its own; "" for nothing."""
        return "line" if "line" in self.extra else "disk" if self.disk else ""


def _step(rng: random.Random, low: int = 0, high: int = STEPS - 1) -> Spec:
    return {"step": rng.randint(low, high), "delay_seconds": rng.random() * 0.04}


def _signal(name: str, target: str, **more: Any) -> Callable[[random.Random, Layout], Spec]:
    def arm(rng: random.Random, layout: Layout) -> Spec:
        who = "launcher" if target == "launcher" else rng.randrange(layout.ranks)
        by = rng.randrange(layout.ranks)
        drawn = {key: value(rng) if callable(value) else value for key, value in more.items()}
        return {"kind": "signal", "signal": name, "target": who, "ranks": [by], **_step(rng), **drawn}

    return arm


def _pause(target: str) -> Callable[[random.Random, Layout], Spec]:
    def arm(rng: random.Random, layout: Layout) -> Spec:
        return _signal("SIGSTOP", target)(rng, layout) | {
            "kind": "pause",
            "pause_for": 0.3 + 2.0 * rng.random(),
        }

    return arm


def _rename(of: str) -> Callable[[random.Random, Layout], Spec]:
    def arm(rng: random.Random, layout: Layout) -> Spec:
        by = (
            0 if of == "commit" else rng.randrange(layout.stages)
        )  # of the first data rank: the others write nothing
        return {
            "kind": "rename",
            "of": of,
            "nth": rng.randint(1, 4),
            "after": rng.random() < 0.5,
            "ranks": [by],
        }

    return arm


def _anyone(kind: str, **more: Any) -> Callable[[random.Random, Layout], Spec]:
    def arm(rng: random.Random, layout: Layout) -> Spec:
        drawn = {key: value(rng) if callable(value) else value for key, value in more.items()}
        return {"kind": kind, "ranks": [rng.randrange(layout.ranks)], **_step(rng), **drawn}

    return arm


def _nan(rng: random.Random, layout: Layout) -> Spec:
    return {
        "kind": "nan",
        "ranks": [rng.randrange(layout.ranks)],
        "step": rng.choice(NAN_STEPS),
        "delay_seconds": 0,
    }


def _killed_late(rng: random.Random, layout: Layout) -> Spec:
    """So late that there are two checkpoints at least."""
    return _signal("SIGKILL", "launcher")(rng, layout) | {"step": rng.randint(3 * EVERY + 2, STEPS - 1)}


def _early(name: str) -> Callable[[random.Random, Layout], Spec]:
    def arm(rng: random.Random, layout: Layout) -> Spec:
        return {"kind": "early", "signal": name, "ranks": [], "after_seconds": rng.random() * 0.8}

    return arm


def _everyone(kind: str, **more: Any) -> Callable[[random.Random, Layout], Spec]:
    return lambda rng, layout: _anyone(kind, **more)(rng, layout) | {"ranks": list(range(layout.ranks))}


def newest(folder: Path) -> Path:
    return max((folder / "run" / "checkpoints").glob("step-*"))


def _one_of(rng: random.Random, folder: Path) -> Path:
    return rng.choice(sorted(folder.iterdir()))


def _flip(rng: random.Random, path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def _cut(rng: random.Random, path: Path) -> None:
    path.write_bytes(path.read_bytes()[: rng.randrange(path.stat().st_size)])


def _tear(rng: random.Random, path: Path) -> None:
    """As a power cut leaves a file whose length was written and whose last blocks were not."""
    data = path.read_bytes()
    at = rng.randrange(len(data) - 1)
    path.write_bytes(data[:at] + bytes(len(data) - at - 1) + b"\xff")


def _lose(rng: random.Random, path: Path) -> None:
    path.unlink()


def of_checkpoint(how: Callable[[random.Random, Path], None]) -> Callable[[random.Random, Path], None]:
    return lambda rng, folder: how(rng, _one_of(rng, newest(folder)))


def of_data(how: Callable[[random.Random, Path], None]) -> Callable[[random.Random, Path], None]:
    return lambda rng, folder: how(rng, folder / "data" / "train_000.bin")


SIGKILLED = r"killed by SIGKILL"
LATE = r"gave no answer|No answer|told nothing|within|stopped|lost|did not|out of reach|in vain"
REMOVED = r"No such file|removed|gone|cannot be|not a run folder"
FULL = r"No space left|cannot be written"
SAVED = r"Stopped at step \d+, saved|Finished"
CHANGED = r"fingerprint|damaged|no \*train|not a token shard"

KINDS: tuple[Kind, ...] = (
    Kind("SIGKILL of a rank", "stops", _signal("SIGKILL", "rank"), SIGKILLED, weight=6),
    Kind("SIGKILL of the launcher", "stops", _signal("SIGKILL", "launcher"), weight=4),
    Kind("SIGKILL while ranks start", "stops", _early("SIGKILL"), weight=2),
    Kind("SIGSTOP of a rank, for good", "stops", _signal("SIGSTOP", "rank"), LATE, fewest_ranks=2, weight=2),
    Kind("SIGSTOP of a rank, for a moment", "goes on", _pause("rank"), weight=2),
    Kind("SIGSTOP of the launcher, for a moment", "goes on", _pause("launcher"), weight=2),
    Kind("SIGTERM of the launcher", "stops", _signal("SIGTERM", "launcher"), SAVED, weight=3),
    Kind("SIGTERM while ranks start", "stops", _early("SIGTERM"), weight=2),
    Kind("SIGTERM of a rank", "stops", _signal("SIGTERM", "rank"), SAVED, weight=2),
    Kind("SIGTERM twice", "stops", _signal("SIGTERM", "launcher", again=1), r"Stopp|Finished", weight=1),
    Kind("writer killed in its commit", "stops", _rename("commit"), SIGKILLED, weight=4),
    Kind("writer killed in its piece", "stops", _rename("piece"), SIGKILLED, weight=3),
    Kind("disk full", "either", _anyone("fill"), FULL, disk="run", weight=3),
    Kind("disk full for a moment", "either", _anyone("fill", pause_for=lambda rng: rng.random()),
         FULL, disk="run", weight=3),
    Kind("disk read-only", "either", _anyone("read-only", step=lambda rng: rng.randint(3, STEPS - 3)), r"Read-only",
         disk="checkpoints", weight=2),
    Kind("disk slow", "goes on", _everyone("slow-disk", delay_seconds=lambda rng: rng.random() * 0.4), weight=2),
    Kind("run folder removed", "either", _anyone("remove-folder"), REMOVED, loses=True, weight=2),
    Kind("checkpoint: a bit flipped", "stops", _killed_late, "", of_checkpoint(_flip), weight=3),
    Kind("checkpoint: cut short", "stops", _killed_late, "", of_checkpoint(_cut), weight=2),
    Kind("checkpoint: torn", "stops", _killed_late, "", of_checkpoint(_tear), weight=2),
    Kind("checkpoint: a file missing", "stops", _killed_late, "", of_checkpoint(_lose), weight=2),
    Kind("data: a bit flipped", "stops", _killed_late, "", of_data(_flip), CHANGED, weight=2),
    Kind("data: cut short", "stops", _killed_late, "", of_data(_cut), CHANGED, weight=1),
    Kind("data: missing", "stops", _killed_late, "", of_data(_lose), CHANGED, weight=1),
    Kind("data: cut short under the run", "either", _anyone("cut-data"), r"SIGBUS|Bus error|damaged", refused=CHANGED,
         weight=2),
    Kind("memory refused", "stops", _anyone("memory"), r"emory|alloc", weight=3, traceback=True),
    Kind("a forward raises on one rank", "stops", _anyone("raise"), r"a forward of this case raises", traceback=True,
         weight=3),
    Kind("a gradient is not finite", "goes on", _nan, weight=3),
    Kind("the clock jumps", "goes on",
         _everyone("clock", jump_seconds=lambda rng: rng.choice((-1, 1)) * rng.choice((60, 86400, 1e8))), weight=2),
    Kind("port in use", "stops", lambda rng, layout: {"kind": "port", "ranks": []}, r"in use|EADDRINUSE",
         started_by="ranks", fewest_ranks=2, weight=1),
    Kind("link cut", "stops", _anyone("tell"), LATE + r"|onnection", started_by="ranks", fewest_ranks=2,
         weight=2, extra={"line": "cut"}),
    Kind("link cut for a moment", "either", _anyone("tell"), LATE + r"|onnection", started_by="ranks", fewest_ranks=2,
         weight=1, extra={"line": "cut", "repaired_after": 1.0}),
    Kind("link slow", "goes on", _anyone("tell"), started_by="ranks", fewest_ranks=2, weight=1,
         extra={"line": "slow"}),
)  # fmt: skip
