"""The records of campaigns, one line of JSON a case: read, merged, and laid out as the page's table."""

from __future__ import annotations

import json
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from chaos.cases import NOT_POSSIBLE
from chaos.faults import KINDS

OUTCOMES = (
    "equal, without a stop",
    "equal, after a restart",
    "equal, the fault came too late",
    "finding",
    NOT_POSSIBLE,
)


def read(paths: Iterable[Path]) -> list[dict[str, Any]]:
    """Each case once: as it was run last, and as "not possible here" only where it was run nowhere. A line that was
    cut off while it was written is left out."""
    found: dict[tuple[int, int], dict[str, Any]] = {}
    for path in paths:
        for line in path.read_text().splitlines():
            try:
                case = json.loads(line)
            except json.JSONDecodeError:
                continue
            key = case["seed"], case["number"]
            if key not in found or case["outcome"] != NOT_POSSIBLE:
                found[key] = case
    return list(found.values())


def table(cases: list[dict[str, Any]]) -> str:
    """Kinds x outcomes, and the times, as Markdown. "cases" are those that were run."""
    rows: dict[str, Counter[str]] = defaultdict(Counter)
    times: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for case in cases:
        rows[case["kind"]]["finding" if case["findings"] else case["outcome"]] += 1
        if case["gone_seconds"] is not None and case["again_seconds"] is not None:
            times[case["kind"]].append((case["gone_seconds"], case["again_seconds"]))
    shown = [one for one in OUTCOMES if one != NOT_POSSIBLE or any(row[one] for row in rows.values())]
    head = ["fault", "cases", *shown, "s to the end", "s to training again"]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]

    def line(name: str, row: Counter[str], ends: str, again: str) -> None:
        ran = row.total() - row[NOT_POSSIBLE]
        cells = [name, ran, *(row[one] or "" for one in shown), ends, again]
        lines.append("| " + " | ".join(map(str, cells)) + " |")

    for kind in [one.name for one in KINDS if one.name in rows]:
        both = times[kind]
        ends = f"{statistics.median(a for a, _ in both):.1f}" if both else ""
        again = f"{statistics.median(a + b for a, b in both):.1f}" if both else ""
        line(kind, rows[kind], ends, again)
    line("all", sum(rows.values(), Counter()), "", "")
    return "\n".join(lines)
