"""What a delay of one update costs in tokens: a table from measurements, replaceable by the user's own.

    time to loss = tokens of synchronous training * penalty / (tokens per second)
    net gain     = speed-up / penalty

The table ships in penalty.json. An entry is chosen by optimizer and correction, then by the least distance
|log batch ratio| + |log model ratio|; its source is shown with every plan, because it decides the answer. With a
cutover only a share of a group is old: entries measured at that place with other shares are points of a curve from
(0, 1), linear between them (`penalty_at`). What a start leaves of it is in price.py.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.resources import files
from itertools import pairwise
from math import inf, log
from pathlib import Path
from typing import Any

from slipstream.errors import UserError
from slipstream.formats import parse_json

_ABOUT = (
    "Token penalty of one update of delay: how many times the tokens of synchronous training are needed to reach its "
    "loss. Entries are matched by optimizer and correction, then by the nearest batch and model."
)


@dataclass(frozen=True)
class Penalty:
    """`penalty` times the tokens reach the synchronous loss, measured at this batch and model size."""

    optimizer: str
    correction: str
    penalty: float
    batch_tokens: float
    parameters: float
    source: str = ""
    gap: float | None = None
    old: float = 1.0  # the share of a group's microbatches that are late: c / m, 1 is 2BW as published

    def __post_init__(self) -> None:
        texts = (self.optimizer, self.correction, self.source)
        figures = (
            self.penalty,
            self.batch_tokens,
            self.parameters,
            self.old,
            0 if self.gap is None else self.gap,
        )
        if not all(isinstance(text, str) for text in texts) or not all(map(_is_number, figures)):
            raise UserError(f"A token penalty entry holds texts and numbers; this one is {self!r:.200}.")
        if not (1.0 <= self.penalty < inf and 1 <= self.batch_tokens < inf and 1 <= self.parameters < inf):
            raise UserError(
                f"A token penalty entry is out of range: penalty {self.penalty} (at least 1), batch_tokens "
                f"{self.batch_tokens} and parameters {self.parameters} (at least 1)."
            )
        if not 0 < self.old <= 1:
            raise UserError(f"A token penalty entry is out of range: old {self.old} (above 0, at most 1).")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def load_penalties(path: str | Path | None = None) -> tuple[Penalty, ...]:
    """The package's table, or the user's file in the same form."""
    if path is None:
        text = files("slipstream.plan").joinpath("penalty.json").read_text(encoding="utf-8")
    else:
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            raise UserError(f"The penalty table {path} cannot be read: {why}.") from None
    try:
        entries = parse_json(text)["entries"]
        return tuple(Penalty(**entry) for entry in entries)
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"The penalty table {path} is not in the expected form ({error}). It needs "
            '{"entries": [{"optimizer", "correction", "batch_tokens", "parameters", "penalty", "source"}]}.'
        ) from None


def write_penalties(path: Path, measured: Sequence[Penalty]) -> list[Penalty]:
    """Put `measured` at the head of the table at `path` (made if there is none); the entries they replace.

    An entry is replaced by one for the same optimizer, correction, old part, batch and model, to 5 % in size.
    """
    table: dict[str, Any] = {"about": _ABOUT, "entries": []}
    if path.exists():
        load_penalties(path)  # refuses what is no table
        table = json.loads(path.read_text(encoding="utf-8"))
    held = [Penalty(**entry) for entry in table["entries"]]
    replaced = [entry for entry in held if any(same_place(entry, new) for new in measured)]
    entries = [*measured, *(entry for entry in held if entry not in replaced)]
    lines = [_entry_text(entry) for entry in entries]
    head = [f"  {json.dumps(key)}: {json.dumps(value)}," for key, value in table.items() if key != "entries"]
    text = "\n".join(["{", *head, '  "entries": [', ",\n".join(lines), "  ]", "}", ""])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return replaced


def same_place(one: Penalty, other: Penalty) -> bool:
    return _same_setting(one, other) and abs(one.old - other.old) < 0.02


def _same_setting(one: Penalty, other: Penalty) -> bool:
    return (one.optimizer, one.correction) == (other.optimizer, other.correction) and same_sizes(one, other)


def same_sizes(one: Penalty, other: Penalty) -> bool:
    sizes = ((one.batch_tokens, other.batch_tokens), (one.parameters, other.parameters))
    return all(abs(log(a / b)) < log(1.05) for a, b in sizes)


def penalty_at(table: Sequence[Penalty], entry: Penalty, old: float) -> float:
    """The penalty where a share `old` of each group is late: between the points measured where `entry` was; 1 at 0."""
    points = {0.0: 1.0, **{found.old: found.penalty for found in table if _same_setting(found, entry)}}
    points[entry.old] = entry.penalty
    known = sorted(points.items())
    for (low, below), (high, above) in pairwise(known):
        if old <= high:
            return below + (above - below) * (old - low) / (high - low)
    return known[-1][1]


def _entry_text(entry: Penalty) -> str:
    """Figures on one line, their source on the next."""
    values = {key: value for key, value in asdict(entry).items() if value is not None and key != "source"}
    if values["old"] == 1:
        del values["old"]
    figures = ", ".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in values.items())
    return f'    {{{figures},\n     "source": {json.dumps(entry.source, ensure_ascii=False)}}}'


def find_penalty(
    table: Sequence[Penalty], optimizer: str, correction: str, batch_tokens: float, parameters: float
) -> Penalty:
    """The entry of whole groups nearest to the job; an optimizer or correction without one is an error, not a guess."""
    whole = [entry for entry in table if entry.old == 1]
    mine = [entry for entry in whole if (entry.optimizer, entry.correction) == (optimizer, correction)]
    if not mine:
        of_it = [entry for entry in whole if entry.optimizer == optimizer]
        known = sorted({f"{entry.optimizer} with {entry.correction}" for entry in of_it or whole})
        of_these = "Choose one of these, or give your own table" if known else "Give another table"
        raise UserError(
            f"The penalty table has no entry for {optimizer} with correction {correction}. It has: "
            f"{'; '.join(known) or 'nothing'}. {of_these} with --penalty FILE."
        )

    def distance(entry: Penalty) -> float:
        return abs(log(entry.batch_tokens / batch_tokens)) + abs(log(entry.parameters / parameters))

    return min(mine, key=distance)
