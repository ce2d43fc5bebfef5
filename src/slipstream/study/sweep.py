"""A study file -> the runs it asks for; docs/study.md tells its form.

Invariant: a run is identified by what decides its numbers alone. Two points with the same resolved config are one run,
within a study and between studies that share a folder.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from slipstream.config import Config, from_tree, resolve
from slipstream.config.settings import Reach
from slipstream.config.write import describe, flat
from slipstream.errors import UserError

Tree = dict[str, Any]
Losses = Mapping[str, float | None]  # final validation loss by digest; None: the run failed

_MEASURED = ("train.eval_every", "train.eval_batches")  # decide the curve, though not the trajectory
_PLACE = ("run.dir", "train.device")
TUNING = "tuning"  # the axis that tells runs of a cheaper grid from the others


@dataclass(frozen=True)
class Choice:
    """One value of one axis."""

    axis: str
    label: str
    tree: Tree = field(compare=False, hash=False)


Combination = tuple[Choice, ...]


@dataclass(frozen=True)
class Axis:
    name: str
    choices: tuple[Choice, ...]


@dataclass(frozen=True)
class Tune:
    """`then` takes the value of `axis` that did best in `over`, separately for each combination of `by`.

    The runs of `then` are known once those of `over` have ended.
    """

    axis: str
    by: tuple[str, ...]
    over: Node
    then: Node
    like: Mapping[str, Mapping[str, str]]  # axis -> label -> the label whose choice it borrows
    # Of `over` alone, on the axis TUNING: no table takes such a run for a whole one.
    tune_with: Choice | None = None


@dataclass(frozen=True)
class Combine:
    how: str  # "product", "zip" or "chain"
    parts: tuple[Node, ...]


Node = Axis | Combine | Tune


@dataclass(frozen=True)
class Point:
    """One run: its label on each axis, and its resolved config (run.dir not yet set)."""

    labels: Mapping[str, str]
    config: Config
    digest: str

    @property
    def name(self) -> str:
        return name_of(self.labels)

    @property
    def folder(self) -> str:
        words = "-".join(self.labels.values()) or "run"
        safe = "".join(letter if letter.isalnum() or letter in "-._" else "_" for letter in words)
        return f"{safe[:80]}-{self.digest}"


@dataclass(frozen=True)
class Expansion:
    """The runs known so far, each once, and how many wait for a choice of `tune`. `named`: the same by every name they
    have, since a run that occurs twice belongs to both of its groups."""

    points: tuple[Point, ...]
    waiting: int
    notes: tuple[str, ...]
    named: tuple[Point, ...]


@dataclass(frozen=True)
class Study:
    name: str
    about: str
    base: Tree
    runs: Node
    table: Tree

    def labels(self) -> dict[str, list[str]]:
        """Every axis that occurs in its runs, with the values used."""
        found: dict[str, list[str]] = {}
        for axis in _axes(self.runs):
            held = found.setdefault(axis.name, [])
            held += [choice.label for choice in axis.choices if choice.label not in held]
        return found

    def expand(self, losses: Losses) -> Expansion:
        """Every run that can be named, given what has ended; equal runs once, in the order of the file."""
        state = _Expansion(self.base, losses)
        named: dict[frozenset[tuple[str, str]], Point] = {}
        for combination in state.combinations(self.runs):
            point = state.point(combination)
            if named.setdefault(frozenset(point.labels.items()), point).digest != point.digest:
                raise UserError(
                    f"Two different runs are both called {point.name}. Give their values other names."
                )
        return Expansion(
            each_once(named.values()), state.waiting, tuple(dict.fromkeys(state.notes)), tuple(named.values())
        )


def each_once(points: Iterable[Point]) -> tuple[Point, ...]:
    """Equal runs by their first name."""
    found: dict[str, Point] = {}
    for point in points:
        found.setdefault(point.digest, point)
    return tuple(found.values())


class _Expansion:
    """One walk over the expression with the results known now."""

    def __init__(self, base: Tree, losses: Losses) -> None:
        self.base, self.losses = base, losses
        self.waiting = 0
        self.notes: list[str] = []

    def combinations(self, node: Node) -> Iterator[Combination]:
        match node:
            case Axis():
                yield from ((choice,) for choice in node.choices)
            case Combine(how="chain"):
                for part in node.parts:
                    yield from self.combinations(part)
            case Combine(how="zip"):
                lists = [list(self.combinations(part)) for part in node.parts]
                if len({len(items) for items in lists}) > 1:
                    raise UserError(f"zip needs parts of one length, not {[len(items) for items in lists]}.")
                yield from (_join(items) for items in zip(*lists, strict=True))
            case Combine():
                for items in product(*(list(self.combinations(part)) for part in node.parts)):
                    yield _join(items)
            case Tune():
                yield from self._tuned(node)

    def point(self, combination: Combination) -> Point:
        tree = self.base
        for choice in combination:
            tree = merge(tree, choice.tree)
        labels = {choice.axis: choice.label for choice in combination}
        try:
            config = resolve(from_tree(tree))
        except UserError as error:
            raise UserError(f"The run {name_of(labels)} of this study cannot work. {error}") from None
        if config.pipeline.schedule != "emulate":
            raise UserError(
                f"The run {name_of(labels)} of this study has pipeline.schedule = '{config.pipeline.schedule}'. "
                "A study runs each run in one process: drop it, or set it to emulate."
            )
        return Point(labels, config, digest(config))

    def _tuned(self, node: Tune) -> Iterator[Combination]:
        tried: dict[tuple[str, ...], list[tuple[Choice, float | None]]] = {}
        unknown: set[tuple[str, ...]] = set()
        cheaper = () if node.tune_with is None else (node.tune_with,)
        for grid in self.combinations(node.over):
            combination = (*grid, *cheaper)
            yield combination
            group, found = _labels(combination, node.by), self.point(combination).digest
            choice = _choice(combination, node.axis)
            if found in self.losses:
                tried.setdefault(group, []).append((choice, self.losses[found]))
            else:
                unknown.add(group)
        for combination in self.combinations(node.then):
            group = _labels(combination, node.by, node.like)
            if group in unknown:
                self.waiting += 1
                continue
            best = self._best(node, group, tried.get(group, []))
            if best is not None:
                yield (*combination, best)

    def _best(
        self, node: Tune, group: tuple[str, ...], tried: list[tuple[Choice, float | None]]
    ) -> Choice | None:
        where = name_of(dict(zip(node.by, group, strict=True)))
        if not tried:
            raise UserError(f"tune = '{node.axis}' has no run in `over` for {where}. Add it, or use `like`.")
        by_label: dict[str, list[float]] = {}
        for choice, loss in tried:
            by_label.setdefault(choice.label, []).append(math.inf if loss is None else loss)
        means = {label: sum(found) / len(found) for label, found in by_label.items()}
        label = min(means, key=lambda name: means[name])
        if not math.isfinite(means[label]):
            self.notes.append(f"No {node.axis} of the grid trains {where}: left out.")
            return None
        grid = sorted(means, key=lambda name: by_value(name)[0])  # words stay in the order of the file
        if len(means) > 2 and label in (grid[0], grid[-1]):
            self.notes.append(f"The best {node.axis} of {where}, {label}, lies at the edge of its grid.")
        return next(choice for choice, _ in tried if choice.label == label)


def _axes(node: Node) -> Iterator[Axis]:
    if isinstance(node, Axis):
        yield node
    else:
        for part in node.parts if isinstance(node, Combine) else (node.over, node.then):
            yield from _axes(part)


def digest(config: Config) -> str:
    """What decides a run's numbers, as a short name. Keys of the layout and of the output do not count."""
    counted = {key.name for key in describe() if key.reach is Reach.TRAJECTORY} | set(_MEASURED)
    values = {name: value for name, value in settings(config).items() if name in counted}
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:10]


def settings(config: Config) -> dict[str, Any]:
    """The dotted keys of a resolved run, without where it was and without what is off by default.

    So neither a new default nor a new key that is off changes the name of an old run.
    """
    defaults = flat(Config())
    return {
        name: value
        for name, value in flat(config).items()
        if name not in _PLACE and value not in (None, {}, []) and (value or value != defaults[name])
    }


def _join(parts: Sequence[Combination]) -> Combination:
    joined = tuple(choice for part in parts for choice in part)
    names = [choice.axis for choice in joined]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise UserError(
            f"The axis '{twice}' occurs twice in one run. Chain its parts instead of multiplying them."
        )
    return joined


def _labels(
    combination: Combination, by: Sequence[str], like: Mapping[str, Mapping[str, str]] | None = None
) -> tuple[str, ...]:
    found = {choice.axis: choice.label for choice in combination}
    if missing := [axis for axis in by if axis not in found]:
        raise UserError(f"tune is by {names(by)}, and a run has no {names(missing)}: {name_of(found)}.")
    return tuple((like or {}).get(axis, {}).get(found[axis], found[axis]) for axis in by)


def _choice(combination: Combination, axis: str) -> Choice:
    for choice in combination:
        if choice.axis == axis:
            return choice
    raise UserError(f"tune = '{axis}' is not an axis of its `over`.")


def merge(base: Tree, change: Tree) -> Tree:
    """`base` with the values of `change`, table by table."""
    merged = dict(base)
    for key, value in change.items():
        held = merged.get(key, value)
        if isinstance(value, dict) != isinstance(held, dict):
            plain = held if isinstance(value, dict) else value
            raise UserError(
                f"'{key}' is {plain!r} in one place of this study and a table of keys in another."
            )
        merged[key] = merge(held, value) if isinstance(value, dict) else value
    return merged


def name_of(labels: Mapping[str, str]) -> str:
    return " ".join(f"{axis}={label}" for axis, label in labels.items())


def by_value(label: str) -> tuple[float, str]:
    """A key to sort labels by: numbers by size, then words in the order of letters."""
    try:
        return float(label), label
    except ValueError:
        return math.inf, label


def names(items: Any) -> str:
    return ", ".join(f"'{item}'" for item in items)
