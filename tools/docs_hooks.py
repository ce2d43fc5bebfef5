"""For MkDocs: the table of config keys is made from the config tree when the site is built.

`docs/config.md` holds the marker below, and `slipstream config` prints the same on a terminal.
"""

from __future__ import annotations

import sys
from itertools import groupby
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "src"))

from slipstream.config.write import Key, describe

MARKER = "<!-- every key, from the config tree -->"


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Called by MkDocs with every page."""
    return markdown.replace(MARKER, config_tables())


def config_tables() -> str:
    """One table for each section of the tree, one row for each key."""
    parts: list[str] = []
    for section, keys in groupby(describe(), key=lambda key: key.name.partition(".")[0]):
        rows = "\n".join(_row(key) for key in keys)
        parts.append(f"## {section}\n\n| key | default | meaning | on resume |\n|---|---|---|---|\n{rows}\n")
    return "\n".join(parts)


def _row(key: Key) -> str:
    absent = "derived" if "(derived" in key.meaning else "none"
    default = absent if key.default is None else f"`{_shown(key.default)}`"
    resume = "fixed" if key.reach == "trajectory" else "may change"
    cells = [f"`{key.name}`", default, f"{key.meaning}. `{key.type}`", resume]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else str(value)
