"""Which runs `--only PATTERN` means: those with it in their name, `*` for anything.

A pattern that ends with a whole `axis=value` means that value alone, and not what begins like it: `mode=ef` is not
`mode=ef 1/3`. What stands before a `*` may go on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from slipstream.study.sweep import Point, name_of


def matching(
    points: Sequence[Point], pattern: str | None, labels: Mapping[str, Sequence[str]]
) -> list[Point]:
    """In their order; all of them without a pattern. `labels`: the values of each axis, also of runs yet to come."""
    if pattern is None:
        return list(points)
    last = [
        (axis, label)
        for axis, values in labels.items()
        for label in values
        if _ends_with(pattern, name_of({axis: label}))
    ]
    return [point for point in points if _means(point, pattern, last)]


def _ends_with(pattern: str, value: str) -> bool:
    before = pattern.removesuffix(value)
    return before != pattern and (not before or before[-1] in " *?]")


def _means(point: Point, pattern: str, last: Sequence[tuple[str, str]]) -> bool:
    """As it stands too, since a value may have brackets."""
    if not last:
        return pattern in point.name or fnmatchcase(point.name, f"*{pattern}*")
    found = list(point.labels.items())
    names = [name_of(dict(found[:count])) for count in range(1, len(found) + 1) if found[count - 1] in last]
    return any(name.endswith(pattern) or fnmatchcase(name, f"*{pattern}") for name in names)
