"""A schedule as a value: one ordered list of actions per rank, with a text form and torch's CSV form.

Invariant: a `Schedule` is complete. Everything a reader needs (generator, validator, simulator, engine,
picture) is in its actions and its few fields; no reader knows a schedule by its name.

Words: rank r of P holds `chunks` slices of the model, so there are P * chunks model stages and
`Action.stage` counts those (as torch does); with one chunk a rank and a stage are the same thing.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from slipstream.errors import UserError


class Kind(StrEnum):
    """What a rank does in one action; the letters are torch's, U is ours."""

    FORWARD = "F"
    BACKWARD = "B"
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"
    UPDATE = "U"


class Weights(StrEnum):
    """Which weights a forward and its backward read on their stage (`staleness.py` gives the rule)."""

    NEWEST = "newest"  # whatever the stage's last update left, read anew by the backward
    STASH = "stash"  # the forward's weights are kept for its backward (PipeDream)
    BANKS = "banks"  # two banks, by the group's number (2BW)


class Action(NamedTuple):
    """One thing one rank does. A tuple, because a long schedule holds a million of them.

    `microbatch` counts within its group and is None for an update. `version` is the weight version read,
    as a count of the stage's updates; for an update it is the version produced.
    """

    kind: Kind
    stage: int
    microbatch: int | None
    group: int
    version: int | None = None

    def __str__(self) -> str:
        """Torch's `2F5`, then our `g1v0`; an update is `2Ug1v2`."""
        microbatch = "" if self.microbatch is None else self.microbatch
        version = "" if self.version is None else f"v{self.version}"
        return f"{self.stage}{self.kind.value}{microbatch}g{self.group}{version}"


@dataclass(frozen=True)
class Schedule:
    """`ranks[r]` is the order of rank r. `stages` is P, the number of ranks (see the module docstring)."""

    name: str
    stages: int
    microbatches: int
    groups: int
    ranks: tuple[tuple[Action, ...], ...]
    chunks: int = 1
    weights: Weights = Weights.NEWEST
    synchronous: bool = True  # every group ends at a barrier
    cutover: int | None = None  # of 2BW: how many microbatches of a group read the bank; None: all

    @property
    def model_stages(self) -> int:
        return self.stages * self.chunks

    @property
    def shared_update(self) -> bool:
        """Whether all stages publish version g+1 together (a barrier, or the global norm of 2BW)."""
        return self.synchronous or self.weights is Weights.BANKS

    def old_part(self, group: int) -> int:
        """How many microbatches of `group` read the bank."""
        return self.microbatches if self.cutover is None else self.cutover

    def placement(self) -> dict[int, int]:
        """Model stage -> the rank that runs it."""
        return {action.stage: rank for rank, actions in enumerate(self.ranks) for action in actions}


_HEADER = "# slipstream schedule"
_ACTION = re.compile(r"(\d+)([FBIWU])(\d*)g(\d+)(?:v(\d+))?")
_TORCH_ACTION = re.compile(r"(\d+)([FBIW])(\d+)")


def to_text(schedule: Schedule) -> str:
    """The whole schedule, one line per rank; `from_text` reads it back."""
    s = schedule
    header = (
        f"{_HEADER} name={s.name} stages={s.stages} microbatches={s.microbatches} groups={s.groups} "
        f"chunks={s.chunks} weights={s.weights.value} synchronous={int(s.synchronous)}"
    ) + ("" if s.cutover is None else f" cutover={s.cutover}")
    return "\n".join([header, *(" ".join(map(str, actions)) for actions in s.ranks)]) + "\n"


def from_text(text: str) -> Schedule:
    """Read `to_text`'s form. The result is not validated: `validate.check` does that."""
    header, *lines = text.removesuffix("\n").split("\n")
    if not header.startswith(_HEADER):
        raise UserError(
            f"This is not a schedule: its first line should begin with '{_HEADER}', not {header!r}."
        )
    try:
        fields = dict(pair.split("=", 1) for pair in header.removeprefix(_HEADER).split())
        return Schedule(
            name=fields["name"],
            stages=int(fields["stages"]),
            microbatches=int(fields["microbatches"]),
            groups=int(fields["groups"]),
            ranks=tuple(tuple(map(_parse_action, line.split())) for line in lines),
            chunks=int(fields["chunks"]),
            weights=Weights(fields["weights"]),
            synchronous=bool(int(fields["synchronous"])),
            cutover=int(fields["cutover"]) if "cutover" in fields else None,
        )
    except (KeyError, ValueError) as error:
        raise UserError(f"The schedule's first line cannot be read: {error}. It was {header!r}.") from None


def _parse_action(word: str) -> Action:
    match = _ACTION.fullmatch(word)
    if match is None:
        raise UserError(
            f"'{word}' is not an action. Write for example 2F5g1v0 (stage, kind, microbatch, group)."
        )
    stage, kind, microbatch, group, version = match.groups()
    if (kind == Kind.UPDATE) != (microbatch == ""):
        raise UserError(f"'{word}' is not an action: an update has no microbatch, everything else has one.")
    return Action(
        Kind(kind),
        int(stage),
        int(microbatch) if microbatch else None,
        int(group),
        None if version is None else int(version),
    )


def to_csv(schedule: Schedule) -> str:
    """The compute order of one group, in the form torch's pipelining loads (`format="compute_only"`).

    Torch has no word for an update, a group or a version, so only a synchronous schedule has this form.
    """
    if not schedule.synchronous:
        raise UserError(
            f"'{schedule.name}' never flushes, so torch's CSV form cannot hold it. "
            "Use the text form, or a synchronous schedule such as 1f1b."
        )
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    for actions in schedule.ranks:
        first = (a for a in actions if a.group == 0 and a.kind is not Kind.UPDATE)
        writer.writerow(f"{a.stage}{a.kind.value}{a.microbatch}" for a in first)
    return buffer.getvalue()


def from_csv(text: str, name: str = "custom") -> Schedule:
    """One group of a synchronous schedule from torch's compute-only CSV; each rank's update is added."""
    rows = [_csv_row(row) for row in csv.reader(io.StringIO(text)) if row]
    if not any(rows):
        raise UserError("The CSV holds no action.")
    model_stages = 1 + max(action.stage for row in rows for action in row)
    if model_stages % len(rows):
        raise UserError(f"The CSV has {len(rows)} ranks and {model_stages} stages: not the same number each.")
    return Schedule(
        name=name,
        stages=len(rows),
        microbatches=1 + max(action.microbatch or 0 for row in rows for action in row),
        groups=1,
        ranks=tuple((*row, *group_updates(row, group=0)) for row in rows),
        chunks=model_stages // len(rows),
    )


def _csv_row(cells: Iterable[str]) -> list[Action]:
    row = []
    for cell in cells:
        # "(2F4;1B3)OVERLAP_F_B" is torch's fused pair: its parts, in order.
        parts = cell.strip().removesuffix("OVERLAP_F_B").strip("()")
        for word in filter(None, parts.split(";")):
            match = _TORCH_ACTION.fullmatch(word.strip())
            if match is None:
                raise UserError(
                    f"'{word}' is not a compute action of torch's CSV form. Write for example 2F5."
                )
            stage, kind, microbatch = match.groups()
            row.append(Action(Kind(kind), int(stage), int(microbatch), 0, 0))
    return row


def group_updates(actions: Iterable[Action], group: int) -> list[Action]:
    """The updates that end `group` on the rank that runs `actions`, one per model stage it holds."""
    stages = sorted({action.stage for action in actions})
    return [Action(Kind.UPDATE, stage, None, group, group + 1) for stage in stages]
