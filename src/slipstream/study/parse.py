"""Reading a study file (its form is told in `sweep.py`). Invariant: a mistake is named where it stands."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from slipstream.config.load import parse_value, read_toml
from slipstream.errors import UserError, did_you_mean
from slipstream.study.cells import roles_of
from slipstream.study.sweep import TUNING, Axis, Choice, Combine, Node, Study, Tree, Tune, merge, names

# Below the file's own base: what a run of a study does not need.
DEFAULTS: Tree = {
    "pipeline": {"schedule": "emulate"},
    "train": {"sample_tokens": 0, "report": False, "timeline_at": 0, "log_every": 50},
    "checkpoint": {"every": 0, "keep": 0},
    "health": {"hash_every": 0},
}


def load_study(path: str | Path, overrides: Sequence[str] = ()) -> Study:
    """Read a study file; `overrides` (key=value) change its base."""
    tree = read_toml(path, hint="Name a study: the files in studies/ are some.")
    unknown = set(tree) - {"name", "about", "base", "axes", "runs", "table"}
    if unknown:
        raise UserError(
            f"'{path}' has {names(unknown)}; a study has name, about, base, axes, runs and table."
        )
    if "runs" not in tree:
        raise UserError(f"'{path}' has no [runs]: say which axes are combined, for example product = [...].")
    base = merge(DEFAULTS, _table(tree, "base"))
    for text in overrides:
        key, equals, value = text.partition("=")
        if not equals:
            raise UserError(f"'{text}' is not an override; write key=value, for example data.path=data/text.")
        base = merge(base, _nest(key.strip(), parse_value(value.strip())))
    name = str(tree.get("name", Path(path).stem))
    if not name or Path(name).name != name:
        raise UserError(f"name = '{name}' in '{path}' cannot name files: leave out '/', and say something.")
    blocks = _table(tree, "axes")
    axes = {block: _axis(block, _table(blocks, block, "axes.")) for block in blocks}
    study = Study(
        name=name,
        about=str(tree.get("about", "")).strip(),
        base=base,
        runs=_node(tree["runs"], axes),
        table=_placed(_table(tree, "table"), Path(path).parent),
    )
    roles_of(study)  # a mistake there is said before the runs, not after
    return study


def _table(tree: Tree, key: str, prefix: str = "") -> Tree:
    found = tree.get(key, {})
    if not isinstance(found, dict):
        raise UserError(
            f"{prefix}{key} = {found!r}: it is a table; write [{prefix}{key}] and its keys below."
        )
    return found


def _placed(table: Tree, folder: Path) -> Tree:
    """[table] with the places of its `lengths` seen from where the file lies."""
    if "lengths" not in table:
        return table
    named = [table["lengths"]] if isinstance(table["lengths"], str) else table["lengths"]
    places = _words(named, "lengths", "../docs/results/a-length.jsonl.gz")
    return {**table, "lengths": [str(folder / place) for place in places]}


def _words(found: Any, key: str, *like: str) -> list[str]:
    if not isinstance(found, list) or not all(isinstance(word, str) for word in found):
        example = json.dumps(like or ("seed", "mode"))
        raise UserError(f"{key} = {found!r}: it is a list of names, for example {key} = {example}.")
    return found


def _axis(block: str, settings: Tree) -> Axis:
    unknown = set(settings) - {"name", "key", "values"}
    if unknown or "values" not in settings:
        problem = f"has {names(unknown)}" if unknown else "has no values"
        raise UserError(
            f"[axes.{block}] {problem}. An axis has values, a key unless they are named, and a name."
        )
    name, key, values = str(settings.get("name", block)), settings.get("key"), settings["values"]
    if isinstance(values, dict) and values:
        if key is not None or not all(isinstance(tree, dict) for tree in values.values()):
            raise UserError(
                f"[axes.{block}] names its values: each is a table of keys, and there is no `key`."
            )
        return Axis(name, tuple(Choice(name, label, _undotted(tree)) for label, tree in values.items()))
    if not isinstance(key, str) or not isinstance(values, list) or not values:
        raise UserError(f"[axes.{block}] needs a key and a list of values, or a table of named values.")
    return Axis(name, tuple(Choice(name, _label(value), _nest(key, value)) for value in values))


def _node(spec: Any, axes: Mapping[str, Axis]) -> Node:
    if isinstance(spec, str):
        return _selected(spec, axes)
    if not isinstance(spec, dict):
        raise UserError(f"{spec!r} is no part of [runs]: write the name of an axis, or a table.")
    if "tune" in spec:
        missing = {"tune", "by", "over", "then"} - set(spec)
        if missing or set(spec) - {"tune", "by", "over", "then", "like", "tune_with"}:
            raise UserError(
                f"A tune of [runs] needs tune, by, over and then (and like, tune_with); it has {names(spec)}."
            )
        over, then = _node(spec["over"], axes), _node(spec["then"], axes)
        cheaper = _tune_with(spec["tune_with"]) if "tune_with" in spec else None
        by, like = _words(spec["by"], "by"), _table(spec, "like")
        if stray := [axis for axis in like if axis not in by]:
            raise UserError(f"like names {names(stray)}, and tune is by {names(by)}.")
        borrowed = {axis: _table(like, axis, "like.") for axis in like}
        for axis, names_of in borrowed.items():
            if not all(isinstance(label, str) for label in names_of.values()):
                raise UserError(
                    f'like.{axis} names values of the axis, for example {axis} = {{ ef = "delay" }}.'
                )
        return Tune(str(spec["tune"]), tuple(by), over, then, borrowed, cheaper)
    if len(spec) != 1 or not set(spec) <= {"product", "zip", "chain"}:
        raise UserError(f"A table of [runs] has one of product, zip, chain or tune; this has {names(spec)}.")
    ((how, parts),) = spec.items()
    if not isinstance(parts, list):
        raise UserError(
            f"{how} = {parts!r}: it is a list of axes and tables, for example {how} = ['seed', 'mode']."
        )
    return Combine(how, tuple(_node(part, axes) for part in parts))


def _tune_with(spec: Any) -> Choice:
    """The keys of a grid's runs as one choice, labelled by what it sets."""
    if not isinstance(spec, dict) or not spec:
        raise UserError("tune_with is a table of keys for the runs of `over`, for example train.steps = 600.")
    tree = _undotted(spec)
    return Choice(TUNING, ", ".join(f"{key}={_label(value)}" for key, value in _leaves(tree)), tree)


def _leaves(tree: Tree, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _selected(text: str, axes: Mapping[str, Axis]) -> Axis:
    name, _, wanted = text.partition(":")
    if name not in axes:
        hint = did_you_mean(name, axes)
        raise UserError(f"[runs] names the axis '{name}', and there is none.{hint} There are {names(axes)}.")
    axis = axes[name]
    if not wanted:
        return axis
    known = {choice.label: choice for choice in axis.choices}
    labels = [label.strip() for label in wanted.split(",")]
    if unknown := [label for label in labels if label not in known]:
        raise UserError(f"The axis '{name}' has no value {names(unknown)}. It has {names(known)}.")
    return Axis(axis.name, tuple(known[label] for label in labels))


def _undotted(tree: Tree) -> Tree:
    """Quoted dotted keys and nested tables alike."""
    result: Tree = {}
    for key, value in tree.items():
        result = merge(result, _nest(key, _undotted(value) if isinstance(value, dict) else value))
    return result


def _nest(key: str, value: Any) -> Tree:
    *outer, last = key.split(".")
    tree: Tree = {last: value}
    for part in reversed(outer):
        tree = {part: tree}
    return tree


def _label(value: Any) -> str:
    if isinstance(value, list):
        return ",".join(_label(item) for item in value)
    return f"{value:g}" if isinstance(value, float) else str(value)
