"""JSON and TOML text as plain values. Invariant: whatever is wrong with the text is a `ValueError`.

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
