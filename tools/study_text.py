"""The text of our studies, out of a public source.

    python tools/study_text.py data/study_text

It fetches one commit of a public repository, whose folder `text` is English Wikipedia of 2015 as WikiExtractor left it,
and writes train.txt and valid.txt: documents parted by a line with one form feed. Which pages, and in what order, is in
`studies/text_pages.json`: pages of some length that are no lists, years or disambiguations, shuffled; 6 MB are for
validation. So are the SHA-256 of both files, and nothing else is left under their names.

The text of Wikipedia is its authors', CC BY-SA 3.0: https://en.wikipedia.org/?curid=PAGE&action=history names them.
"""

from __future__ import annotations

import argparse
import hashlib
import html
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

REPOSITORY = "https://github.com/jason-feng/wikiVisual"
REVISION = "1c0fac92f29f17c1603bfffbe864e0dfdff66897"
FOLDER = "text"
FETCHED_MB, WRITTEN_MB = 600, 220  # on the disk while it works; the second stays
PAGES = Path(__file__).parent.parent / "studies" / "text_pages.json"
SOURCE = f"The source is the folder `{FOLDER}` of {REPOSITORY} at commit {REVISION}."
SEPARATOR = b"\n\f\n"
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
    files = sorted(folder.glob("*/wiki_*"))
    if not files:
        sys.exit(f"{folder} holds no pages (*/wiki_*). {SOURCE}")
    for path in files:
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
    chosen = {number for split in wanted.values() for number in split["pages"]}
    try:
        texts = {
            number: "\n".join(clean(lines)).encode() for number, lines in pages(folder) if number in chosen
        }
    except UnicodeDecodeError as error:
        sys.exit(f"{folder} holds pages that are no UTF-8 ({error}). {SOURCE}")
    found = {}
    for split, listed in wanted.items():
        if missing := [number for number in listed["pages"] if number not in texts]:
            sys.exit(f"{folder} lacks page {missing[0]} and {len(missing) - 1} more. {SOURCE}")
        text = SEPARATOR.join(texts[number] for number in listed["pages"]) + b"\n"
        (out / f"{split}.txt").write_bytes(text)
        found[split] = hashlib.sha256(text).hexdigest()
    return found


def fetch(repository: str, into: Path) -> Path:
    """The folder of the pages: REVISION alone is fetched, without the history before it."""
    if shutil.which("git") is None:
        sys.exit(
            f"git is not installed, and the source is fetched with it. Install git, or give --folder. {SOURCE}"
        )
    if Path(repository).exists():  # git is run elsewhere
        repository = str(Path(repository).resolve())
    steps = {
        "init": ["--quiet"],
        "fetch": ["--depth", "1", repository, REVISION],
        "checkout": ["--quiet", REVISION, "--", FOLDER],
    }
    for name, words in steps.items():
        # A repository that is gone is an error, not a question for a password; the bytes are not to be changed.
        command = ["git", "-C", str(into), "-c", "core.autocrlf=false", name, *words]
        if subprocess.run(command, env=os.environ | {"GIT_TERMINAL_PROMPT": "0"}).returncode:
            sys.exit(
                f"git {name} of {repository} failed; its words are above. It needs the network and {FETCHED_MB} MB "
                "of disk. Without a network give a copy: --repository, or --folder."
            )
    return into / FOLDER


def make(out: Path, folder: Path | None, repository: str) -> None:
    """Both files are checked before they have their names; what is there and right is not made again."""
    listed = json.loads(PAGES.read_text())
    if not all(_digest(out / f"{name}.txt") == listed[name]["sha256"] for name in listed):
        if folder is not None and not folder.is_dir():
            sys.exit(f"There is no folder {folder}. {SOURCE}")
        out.mkdir(parents=True, exist_ok=True)
        needed = WRITTEN_MB + (FETCHED_MB if folder is None else 0)
        if (free := shutil.disk_usage(out).free // 10**6) < needed:
            sys.exit(
                f"The disk of {out} has {free} MB left, and this needs {needed}. Free some, or name another OUT."
            )
        with TemporaryDirectory(dir=out, prefix=".making-") as work:
            source = folder or fetch(repository, Path(work))
            for name, digest in write(source, Path(work), listed).items():
                if digest != listed[name]["sha256"]:
                    sys.exit(f"{name}.txt is not what it should be (SHA-256 {digest}). {SOURCE}")
            for name in listed:
                (Path(work) / f"{name}.txt").replace(out / f"{name}.txt")
    for name, split in listed.items():
        same = (
            "to the last byte" if split["sha256"] == split["studies"] else "but for a few lines of 28 pages"
        )
        print(f"{out}/{name}.txt: the text of the studies, {same} (SHA-256 {split['sha256'][:12]}…)")
    print("The text is its authors', CC BY-SA 3.0. Next, a few minutes each on two cores:")
    for vocabulary, place in ((16384, "data/wiki16k"), (8192, "data/wiki8k")):
        files = f"{out}/train.txt --valid {out}/valid.txt"
        print(f"    slipstream data prepare {files} --vocab {vocabulary} --out {place}")
    print("Then a study: docs/study.md, or at once")
    print("    slipstream study run studies/a-core.toml --workers 4")


def _digest(path: Path) -> str | None:
    if not path.is_file():
        return None
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0], epilog=f"{SOURCE} It needs 1 GB of disk while it works."
    )
    parser.add_argument("out", type=Path, metavar="OUT", help="gets train.txt and valid.txt")
    parser.add_argument("--folder", type=Path, help="the pages, where they are at hand: nothing is fetched")
    parser.add_argument("--repository", default=REPOSITORY, help="a copy of the source")
    given = parser.parse_args(words)
    try:
        make(given.out, given.folder, given.repository)
    except OSError as error:
        place = error.filename or given.out
        sys.exit(f"{place}: {error.strerror}. Free the disk if it is full, or name another OUT.")


if __name__ == "__main__":
    main()
