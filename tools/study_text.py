"""The text of our studies, out of a public source: `study_text.py FOLDER OUT`.

FOLDER is the folder `text` of github.com/jason-feng/wikiVisual at commit
1c0fac92f29f17c1603bfffbe864e0dfdff66897: English Wikipedia of 2015 as WikiExtractor left it. OUT gets train.txt and
valid.txt, documents parted by a line with one form feed. Which pages, and in what order, is in
`studies/text_pages.json`: pages of some length that are no lists, years or disambiguations, shuffled; 6 MB are for
validation.

The text of Wikipedia is its authors', CC BY-SA 3.0: https://en.wikipedia.org/?curid=PAGE&action=history names them.
"""

from __future__ import annotations

import hashlib
import html
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

PAGES = Path(__file__).parent.parent / "studies" / "text_pages.json"
SEPARATOR = "\n\f\n"
OPENING = re.compile(r'<doc id="(\d+)" url="[^"]*" title=".*">')
BREAK = re.compile(r"<br ?/?>")
# A line with any of these is left-over markup, a table, a formula that is missing, or a link.
MARKUP = re.compile(
    r'^[!<]|\[\[|\]\]|\{\{|\}\}|\{\||\|\}|\|\||formula_\d|https?://|style="|class="|colspan="'
)
TAG = re.compile(r"</?[a-zA-Z][^<>]*>")
EMPTY = re.compile(r"\s*\(\s*[,;]*\s*\)")  # brackets out of which a template was taken
OPENED = re.compile(r"\(\s*[;,]\s*")
HEADING_WORDS = 8


def clean(lines: list[str]) -> list[str]:
    """Of one page, without what is no prose; headings at its end, which nothing follows, too."""
    kept = [line for line in map(_line, BREAK.sub("\n", "\n".join(lines)).split("\n")) if line]
    while len(kept) > 1 and kept[-1].endswith(".") and len(kept[-1].split()) < HEADING_WORDS:
        kept.pop()
    return kept


def _line(line: str) -> str:
    if MARKUP.search(line):
        return ""
    line = html.unescape(line)
    for blank in ("\xa0", "\u200b", "\ufeff"):
        line = line.replace(blank, " ")
    line = OPENED.sub("(", EMPTY.sub("", TAG.sub("", line))).replace('""', "")
    return re.sub(r"[ \t]+", " ", line).strip()


def pages(folder: Path) -> Iterator[tuple[int, list[str]]]:
    """(number, lines) of every page, in the order of the files."""
    for path in sorted(folder.glob("*/wiki_*")):
        number, lines = 0, []
        for line in path.read_text(encoding="utf-8").split("\n"):
            if opened := OPENING.fullmatch(line):
                number, lines = int(opened[1]), []
            elif line == "</doc>":
                yield number, lines
            else:
                lines.append(line)


def write(folder: Path, out: Path, wanted: dict[str, dict]) -> dict[str, str]:
    """The files of each split; their SHA-256."""
    texts = {number: "\n".join(clean(lines)) for number, lines in pages(folder)}
    out.mkdir(parents=True, exist_ok=True)
    found = {}
    for split, chosen in wanted.items():
        if missing := [number for number in chosen["pages"] if number not in texts]:
            sys.exit(
                f"{folder} lacks page {missing[0]} and {len(missing) - 1} more. Is it the folder of that commit?"
            )
        text = SEPARATOR.join(texts[number] for number in chosen["pages"]) + "\n"
        (out / f"{split}.txt").write_text(text, encoding="utf-8", newline="\n")
        found[split] = hashlib.sha256(text.encode()).hexdigest()
    return found


if __name__ == "__main__":
    listed = json.loads(PAGES.read_text())
    for name, digest in write(Path(sys.argv[1]), Path(sys.argv[2]), listed).items():
        if digest != listed[name]["sha256"]:
            sys.exit(f"{name}.txt is not what it should be ({digest}). Is it the folder of that commit?")
        same = "to the last byte" if digest == listed[name]["studies"] else "but for a few lines of 28 pages"
        print(f"{sys.argv[2]}/{name}.txt: the text of the studies, {same}")
