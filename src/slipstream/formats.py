"""JSON and TOML text as plain values, and numbers as short texts. Invariant: whatever is wrong with a text that is read
is a `ValueError`.

The readers of Python's library call themselves for each bracket inside a bracket: a file of nothing else ends in a
`RecursionError`, which no reader of a file expects.
"""

from __future__ import annotations

import json
import tomllib
from typing import Any


def parse_json(text: str | bytes) -> Any:
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("brackets are nested too deeply") from None


def parse_toml(text: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("brackets are nested too deeply") from None


def toml_value(value: Any) -> str:
    """As TOML writes it, which has no null."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(toml_value, value)) + "]"
    if isinstance(value, dict):
        pairs = (f"{json.dumps(key, ensure_ascii=False)} = {toml_value(item)}" for key, item in value.items())
        return "{" + ", ".join(pairs) + "}"
    return repr(value)


def si(value: float | None) -> str:
    """1234567 -> '1.23M'."""
    if value is None:
        return "–"
    for limit, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:.3g}{letter}"
    return f"{value:.4g}"
