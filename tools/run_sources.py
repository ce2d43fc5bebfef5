"""Which commit made each published run, by the fingerprint of the code that ran.

    python tools/run_sources.py

A run of an export names the commit of its checkout and the fingerprint of its package (`slipstream.train.provenance`).
The fingerprint decides, since a checkout may differ from its commit: the run's own commit where that has this
fingerprint, else the first that does. Packages of old commits are read from git's objects; nothing is checked out.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

from slipstream.errors import UserError
from slipstream.study.results import Result, read_export
from slipstream.train.provenance import DIRTY, fingerprint

ROOT = Path(__file__).parent.parent
EXPORTS = ROOT / "docs" / "results"
PACKAGE = "src/slipstream"
NOTHING, NOWHERE = "not noted", "in no commit"
LETTERS = 7  # of a commit

Runs = Mapping[str, Iterable[Result]]  # by the name of their export


class History:
    """The package in every commit that touched it, as fingerprints."""

    def __init__(self, root: Path = ROOT) -> None:
        self._git = ["git", "-C", str(root)]
        log = ["log", "--full-history", "--format=%ct %H", "HEAD", "--", PACKAGE]
        whole = self._words("rev-parse", "--is-shallow-repository") == "false"
        touched = self._words(*log).splitlines() if whole else []
        if not touched:
            raise UserError(
                f"{root} has no history of its files. Clone the repository, or git fetch --unshallow."
            )
        self._blobs: dict[str, bytes] = {}
        self._folders: dict[str, dict[str, str]] = {}
        self._fingerprints: dict[str, str] = {}  # by the id of the package's folder
        self._makers: dict[tuple[str, str], str] = {}
        self.first: dict[str, str] = {}  # fingerprint -> the oldest commit that has it
        with subprocess.Popen(
            [*self._git, "cat-file", "--batch"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as self._objects:
            for _, commit in sorted((int(line.split()[0]), line.split()[1]) for line in touched):
                if found := self._package(commit):
                    self.first.setdefault(found, commit)

    def fingerprint(self, commit: str) -> str | None:
        """None: there is no such commit, or it has no package."""
        folder = self._words("rev-parse", "--verify", "--quiet", f"{commit}:{PACKAGE}")
        return self._fingerprints.get(folder)

    def made(self, commit: str, source: str) -> str:
        """The commit of a run that names these two; NOTHING where it names none, NOWHERE where none is that code."""
        if not source:
            return NOTHING
        if (commit, source) not in self._makers:
            own = commit.removesuffix(DIRTY)
            its = own and self.fingerprint(own) == source
            self._makers[commit, source] = own if its else self.first.get(source, NOWHERE)
        return self._makers[commit, source]

    def _package(self, commit: str) -> str | None:
        found = self._read(f"{commit}:{PACKAGE}")
        if found is None:
            return None
        folder, entries = found
        if folder not in self._fingerprints:
            files = {name: at for name, at in self._files(folder, entries).items() if name.endswith(".py")}
            self._fingerprints[folder] = fingerprint({name: self._blob(at) for name, at in files.items()})
        return self._fingerprints[folder]

    def _files(self, folder: str, entries: bytes) -> dict[str, str]:
        """The blobs of a folder by their paths below it. An entry is `MODE NAME`, a zero and the bytes of an id."""
        if folder not in self._folders:
            files: dict[str, str] = {}
            width, at = len(folder) // 2, 0
            while at < len(entries):
                end = entries.index(0, at)
                mode, name = entries[at:end].decode().split(" ", 1)
                at = end + 1 + width
                held = entries[end + 1 : at].hex()
                if mode == "40000":
                    inside = self._folders.get(held) or self._files(held, self._blob(held))
                    files |= {f"{name}/{path}": blob for path, blob in inside.items()}
                else:
                    files[name] = held
            self._folders[folder] = files
        return self._folders[folder]

    def _blob(self, name: str) -> bytes:
        if name not in self._blobs:
            found = self._read(name)
            assert found is not None, f"git has no {name}"
            self._blobs[name] = found[1]
        return self._blobs[name]

    def _read(self, name: str) -> tuple[str, bytes] | None:
        """The id and the bytes of an object; None: there is none of that name."""
        wire = self._objects
        assert wire.stdin is not None
        assert wire.stdout is not None
        wire.stdin.write(f"{name}\n".encode())
        wire.stdin.flush()
        words = wire.stdout.readline().decode().split()
        if words[-1] == "missing":
            return None
        text = wire.stdout.read(int(words[2]))
        wire.stdout.read(1)
        return words[0], text

    def _words(self, *words: str) -> str:
        try:
            done = subprocess.run([*self._git, *words], capture_output=True, text=True)
        except OSError as error:
            raise UserError("git is not installed, and the history is read with it. Install git.") from error
        return done.stdout.strip()


def rows(runs: Runs, history: History) -> list[str]:
    """A row for each export that names some code; one for all the others."""
    found = ["| study | runs | made by |", "|---|---|---|"]
    silent = Counter()
    for name, results in sorted(runs.items()):
        makers = Counter(history.made(result.commit, result.source) for result in results)
        if set(makers) == {NOTHING}:
            silent[name] = makers.total()
            continue
        ordered = sorted(makers.items(), key=lambda item: (item[0] in (NOTHING, NOWHERE), -item[1], item[0]))
        cells = ", ".join(f"{_short(maker)}: {number}" for maker, number in ordered)
        found.append(f"| {name} | {makers.total()} | {cells} |")
    if silent:
        names = ", ".join(f"{name} {number}" for name, number in silent.items())
        found.append(f"| {names} | {silent.total()} | {NOTHING} |")
    return found


def summary(runs: Runs, history: History) -> str:
    """Of all exports together. Studies share runs: each counts once."""
    once = {(result.digest, result.data): result for results in runs.values() for result in results}
    parts = []
    for where, on_cpu in (("on a GPU", False), ("on a CPU", True)):
        made = [history.made(r.commit, r.source) for r in once.values() if (r.device == "cpu") == on_cpu]
        kinds = Counter(maker if maker in (NOTHING, NOWHERE) else "by a known commit" for maker in made)
        counts = ", ".join(f"{number} {kind}" for kind, number in sorted(kinds.items()))
        parts.append(f"{len(made)} {where} ({counts or 'none'})")
    return f"Runs, each counted once: {' and '.join(parts)}."


def published(folder: Path = EXPORTS) -> dict[str, list[Result]]:
    return {
        path.name.removesuffix(".jsonl.gz"): list(read_export(path))
        for path in sorted(folder.glob("*.jsonl.gz"))
    }


def _short(maker: str) -> str:
    return maker if maker in (NOTHING, NOWHERE) else maker[:LETTERS]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("folder", nargs="?", type=Path, default=EXPORTS, help="holds exports (docs/results)")
    folder = parser.parse_args().folder
    try:
        runs, history = published(folder), History()
    except UserError as error:
        sys.exit(str(error))
    if not runs:
        sys.exit(f"{folder} holds no *.jsonl.gz. Name a folder with exports of studies.")
    print("\n".join([*rows(runs, history), "", summary(runs, history)]))


if __name__ == "__main__":
    main()
