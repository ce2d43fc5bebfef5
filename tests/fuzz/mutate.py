"""Seeded damage: bytes, trees of plain values, TOML text and command lines. The same seed gives the same input.

What is put in place of a value is what has broken readers elsewhere: numbers that no float holds, text that is no text,
markup of terminals and pages, paths that lead out, and values of the wrong kind.
"""

from __future__ import annotations

import copy
import json
import random
from pathlib import Path
from typing import Any

WORDS = (
    "", " ", "x", "0", "-1", "1e999", "nan", "None", "true", "\x00", "\x1b[31m", "\ud800", "é\u202e",
    "../../etc/passwd", "/dev/null", "[/]", "[bold", "[link=http://x]", "<script>alert(1)</script>", "</script>",
    "{{7*7}}", "${x}", "%s%n",
    "{0.__class__}", "a:b", "os:system", "x" * 5000, "\n", "key=value", "'", '"', "\\",
)  # fmt: skip
NUMBERS = (
    0, -1, 1, 2, 3, 7, 255, 2**31, 2**31 - 1, 2**63, 2**64, 10**30, -(10**30), 10**400, 0.5, -0.0, 1e-320, 1e308, 1.5,
    float("nan"), float("inf"), float("-inf"),
)  # fmt: skip


def value(rng: random.Random, depth: int = 2) -> Any:
    kind = rng.randrange(8)
    if kind < 3:
        return rng.choice(NUMBERS)
    if kind < 5:
        return rng.choice(WORDS)
    if kind == 5:
        return rng.choice((None, True, False))
    if depth == 0:
        return [] if kind == 6 else {}
    size = rng.randrange(4)
    if kind == 6:
        return [value(rng, depth - 1) for _ in range(size)]
    return {rng.choice(WORDS): value(rng, depth - 1) for _ in range(size)}


def deep(rng: random.Random) -> Any:
    """Brackets within brackets, further than a reader that calls itself can go."""
    found: Any = 0
    for _ in range(rng.choice((50, 150))):
        found = [found]
    return found


def places(tree: Any, path: tuple = ()) -> list[tuple]:
    """The path of every node below the root."""
    children = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    found = []
    for key, child in children:
        found.append((*path, key))
        found += places(child, (*path, key))
    return found


def tree(rng: random.Random, given: Any, most: int = 3) -> Any:
    """One to `most` nodes replaced, removed, doubled, renamed or changed a little."""
    result = copy.deepcopy(given)
    for _ in range(rng.randint(1, most)):
        known = places(result)
        if not known or rng.random() < 0.02:
            result = value(rng)
            continue
        *outer, last = rng.choice(known)
        node = result
        for key in outer:
            node = node[key]
        kind = rng.randrange(10)
        if kind < 5:
            node[last] = value(rng)
        elif kind == 5:
            node[last] = _near(rng, node[last])
        elif kind == 6:
            del node[last]
        elif kind == 7 and isinstance(node, dict):
            node[rng.choice(WORDS)] = node.pop(last)
        elif kind == 8 and isinstance(node, dict):
            node[rng.choice(WORDS)] = value(rng)
        else:
            other = result
            for key in rng.choice(known)[:-1]:
                other = other[key] if isinstance(other, dict | list) and _has(other, key) else other
            node[last] = copy.deepcopy(other) if rng.random() < 0.5 else deep(rng)
    return result


def _has(node: dict | list, key: Any) -> bool:
    return key in node if isinstance(node, dict) else isinstance(key, int) and key < len(node)


def _near(rng: random.Random, given: Any) -> Any:
    if isinstance(given, bool):
        return not given
    if isinstance(given, int | float):
        return rng.choice(
            (
                -given,
                given + 1,
                given - 1,
                given * 2,
                max(-1e300, min(given, 1e300)) + 0.5,
                str(given),
                [given],
                0,
            )
        )
    if isinstance(given, str):
        return rng.choice((given[:-1], given + "x", given.upper(), given[::-1], given + "\x00", [given]))
    return rng.choice((None, [given], str(given)))


def raw(rng: random.Random, data: bytes) -> bytes:
    """Bits flipped, bytes cut out, doubled, moved or put in."""
    result = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 5, 20))):
        kind, size = rng.randrange(8), len(result)
        at = rng.randrange(size + 1)
        length = min(size - at, rng.choice((1, 2, 4, 8, 64, 1000)))
        if kind == 0 and size:
            result[at % size] ^= 1 << rng.randrange(8)
        elif kind == 1:
            del result[at:]
        elif kind == 2:
            del result[at : at + length]
        elif kind == 3:
            result[at:at] = rng.randbytes(rng.choice((1, 3, 100)))
        elif kind == 4:
            result[at:at] = result[at : at + length]
        elif kind == 5:
            result[at : at + length] = rng.choice((b"\x00", b"\xff")) * length
        elif kind == 6:
            result[at:at] = rng.choice((b"[" * 3000, b"9" * 5000, b"\xef\xbb\xbf", b"\r\n", b"1e400", b"NaN"))
        else:
            result[at:at] = rng.choice(WORDS).encode("utf-8", "surrogatepass")
    return bytes(result)


def place(rng: random.Random, path: Path) -> None:
    """The file itself: gone, empty, a folder, a link that leads nowhere or to itself."""
    kind = rng.randrange(5)
    path.unlink()
    if kind == 1:
        path.touch()
    elif kind == 2:
        path.mkdir()
    elif kind == 3:
        path.symlink_to("nowhere")
    elif kind == 4:
        path.symlink_to(path.name)


def write_json(path: Path, given: Any) -> None:
    path.write_bytes(json.dumps(given).encode("utf-8", "surrogatepass"))


def toml(given: Any) -> str:
    """Any tree as TOML, with null left out: a table on each line."""
    if not isinstance(given, dict):
        return f"x = {_toml(given)}\n"
    lines = [
        f"{json.dumps(key)} = {_toml(item)}" for key, item in given.items() if not isinstance(item, dict)
    ]
    for key, item in given.items():
        if isinstance(item, dict):
            lines += ["", f"[{json.dumps(key)}]"]
            lines += [f"{json.dumps(name)} = {_toml(inner)}" for name, inner in item.items()]
    return "\n".join(lines) + "\n"


def _toml(given: Any) -> str:
    if isinstance(given, dict):
        return "{" + ", ".join(f"{json.dumps(key)} = {_toml(item)}" for key, item in given.items()) + "}"
    if isinstance(given, list):
        return "[" + ", ".join(map(_toml, given)) + "]"
    if given is None:
        return '"none"'
    return json.dumps(given).replace("NaN", "nan").replace("Infinity", "inf")


def word(rng: random.Random) -> str:
    """A word of a command line: no byte 0, which no system passes on."""
    text = str(rng.choice(NUMBERS)) if rng.random() < 0.5 else rng.choice(WORDS)
    return text.replace("\x00", "").replace("\ud800", "\udcff")[
        :4000
    ]  # a byte that is no UTF-8 comes like this
