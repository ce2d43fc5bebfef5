"""TOML files and dotted overrides -> a `Config`. Invariant: every problem is reported at once, each with
its key.

    slipstream train run.toml optim.lr=3e-4 pipeline.schedule=1f1b

An override's value is read as TOML where it is TOML, else as a plain string; an empty value restores the
default.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from slipstream.config.settings import Config
from slipstream.config.write import describe
from slipstream.errors import ConfigError, UserError, did_you_mean
from slipstream.formats import parse_toml


def load(path: str | Path | None = None, overrides: Sequence[str] = ()) -> Config:
    """Read a TOML file (or none) and apply `key=value` overrides."""
    tree = read_toml(path) if path is not None else {}
    return from_tree(tree, overrides)


def from_tree(tree: Mapping[str, Any], overrides: Sequence[str] = ()) -> Config:
    """Build a config from a nested mapping and overrides; all problems come as one ConfigError."""
    merged = {key: dict(value) if isinstance(value, Mapping) else value for key, value in tree.items()}
    problems = [problem for text in overrides if (problem := _apply(merged, text)) is not None]
    if impossible := list(_impossible(merged)):
        raise ConfigError([*problems, *impossible])
    try:
        config = Config.model_validate(merged)
    except ValidationError as error:
        problems.extend(_explained(error.errors()))
        raise ConfigError(problems) from None
    if problems:
        raise ConfigError(problems)
    return config


def _impossible(tree: Any, key: str = "") -> Iterator[str]:
    """Values that no config.toml could hold, anywhere: numbers beyond those of a machine, text that is none."""
    if isinstance(tree, Mapping | list):
        for name, value in tree.items() if isinstance(tree, Mapping) else enumerate(tree):
            yield from _impossible(value, f"{key}.{name}" if key else str(name))
    elif isinstance(tree, int) and abs(tree) >= 1 << 63:
        yield f"{key} is a whole number of {tree.bit_length()} bits; nothing counts that far."
    elif isinstance(tree, str) and any("\ud800" <= letter <= "\udfff" for letter in tree):
        yield f"{key} = {tree!r} is not UTF-8 text. Write it in UTF-8."


def read_toml(
    path: str | Path, hint: str = "Name a TOML file of a run, or none for the default."
) -> dict[str, Any]:
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"There is no file '{path}'. {hint}") from None
    except IsADirectoryError:
        own = Path(path) / "config.toml"
        raise UserError(
            f"'{path}' is a folder. {f'Its settings are in {own}.' if own.is_file() else hint}"
        ) from None
    except (OSError, ValueError) as error:  # also a name that is no name
        raise UserError(f"'{path}' cannot be read: {error}. {hint}") from None
    try:
        return parse_toml(text)
    except ValueError as error:
        raise UserError(f"'{path}' is not valid TOML: {error}.") from None


@cache
def keys() -> tuple[str, ...]:
    """Every dotted key of the tree, in order."""
    return tuple(key.name for key in describe())


def _apply(tree: dict[str, Any], text: str) -> str | None:
    """Write one `key=value` into the tree; the problem in words, if there is one."""
    key, equals, value = text.partition("=")
    key = key.strip()
    if not equals:
        return f"'{text}' is not an override; write key=value, for example train.steps=100."
    parts = key.split(".")
    if key not in keys() and parts[:2] != ["optim", "options"]:
        return _unknown(key)
    node = tree
    for part in parts[:-1]:
        child = node.setdefault(part, {})
        if not isinstance(child, dict):
            return f"{key}: '{part}' holds a value and has no keys of its own."
        node = child
    if value.strip() == "":
        node.pop(parts[-1], None)
        return None
    node[parts[-1]] = parse_value(value.strip())
    return None


def parse_value(text: str) -> Any:
    """3e-4 -> 0.0003, [1, 2] -> [1, 2], true -> True, 2bw -> '2bw'; dates stay text."""
    try:
        value = parse_toml(f"x = {text}")["x"]
    except ValueError:
        return text
    return value if isinstance(value, (bool, int, float, str, list, dict)) else text


_KIND = "input should be "  # how pydantic begins


def _explained(items: Sequence[Any]) -> list[str]:
    """A sentence for each key: what could have been several things is one problem."""
    found: dict[str, list[str]] = {}
    for item in items:
        where, _, what = _explain(item).partition(": ")
        found.setdefault(where, []).append(what)
    return [": ".join(filter(None, (where, _any_of(whats)))) for where, whats in found.items()]


def _any_of(whats: Sequence[str]) -> str:
    """One sentence: the first, and what else it could have been."""
    first, *others = dict.fromkeys(what.partition(", unable")[0].rstrip(".") for what in whats)
    if not others or not all(what.startswith(_KIND) for what in (first, *others)):
        return whats[0]
    *middle, last = (what.removeprefix(_KIND) for what in others)
    return f"{', '.join([first, *middle])} or {last}."


def _explain(item: Any) -> str:
    """One pydantic problem as one sentence with the key and the value seen."""
    location = [part for part in item["loc"] if isinstance(part, str)]
    key = ".".join(location)
    if item["type"] == "extra_forbidden":
        return _unknown(key)
    while key not in keys() and "." in key:  # a union adds the name of each alternative
        key = key.rpartition(".")[0]
    if item["type"] == "literal_error":
        expected = item["ctx"]["expected"]
        choices = [choice.strip(" '") for choice in expected.replace(" or ", ", ").split(",")]
        hint = did_you_mean(str(item["input"]), choices)
        return f"{key} = {item['input']!r} is not one of {expected}.{hint}"
    message = item["msg"][0].lower() + item["msg"][1:]
    hint = ""
    if str(item["input"]).lower() in ("none", "null"):
        hint = f" For its default, write {key}= with nothing behind it."
    elif item["type"] == "dict_type":
        hint = f" Write {key}.NAME=VALUE."
    elif item["type"] == "list_type" and isinstance(item["input"], int | float):
        hint = f" Write {key}=[{item['input']}, ...]."
    return f"{key} = {item['input']!r}: {message}.{hint}"


def nearest(key: str) -> str | None:
    """The key that may have been meant: of its own section, else of whichever has such a name."""
    section, _, name = key.rpartition(".")
    for keys_of in ([full for full in keys() if full.startswith(f"{section}.")], keys()):
        by_name = {full.rpartition(".")[2]: full for full in reversed(keys_of)}
        if near := difflib.get_close_matches(name, by_name, n=1, cutoff=0.7):
            return by_name[near[0]]
    return None


def _unknown(key: str) -> str:
    near = nearest(key)
    hint = f" Did you mean {near}?" if near else ""
    return f"There is no key '{key}'.{hint} `slipstream config` lists them all."
