"""The pages as data: their links, headings and code blocks."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
FENCE = re.compile(r'^( *)```(\w+)?(?: title="([^"]+)")?[^\n]*\n(.*?)^\1```', re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    page: Path
    language: str
    title: str
    text: str


def blocks(page: Path) -> list[Block]:
    """The fenced code of a page."""
    return [
        Block(page, found[2] or "", found[3] or "", found[4]) for found in FENCE.finditer(page.read_text())
    ]


def prose(page: Path) -> str:
    """The page without code."""
    return re.sub(r"^    .*$|`[^`\n]*`", "", FENCE.sub("", page.read_text()), flags=re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """What `#...` may name: headings, as MkDocs and GitHub both spell them."""
    headings = re.findall(r"^#+ +(.*)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    plain = [re.sub(r"\[([^]]*)\]\([^)]*\)|[`*]", r"\1", heading) for heading in headings]
    return {re.sub(r"[\s]+", "-", re.sub(r"[^\w\s-]", "", text.lower()).strip()) for text in plain}


def commands(page: Path, program: str) -> list[str]:
    """Lines of code that start with `program`, continued lines joined, comments and loose ends cut off."""
    text = "\n".join(block.text for block in blocks(page) if block.language in ("sh", "bash"))
    text += "\n" + "\n".join(re.findall(r"^    (.*)$", FENCE.sub("", page.read_text()), re.MULTILINE))
    joined = re.sub(r"\s*\\\n\s*", " ", text)
    lines = [re.split(r"\s+#| \| | > | && ", line.strip())[0] for line in joined.splitlines()]
    return [line for line in lines if line.split()[:1] == [program]]
