"""A run names its code wherever it runs: in a checkout, and from a copy that nobody installed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

from slipstream import __version__
from slipstream.train import provenance

ASK = (
    "import json; from slipstream.train import provenance as p; "
    "print(json.dumps([p.versions(), p.commit(), p.source_fingerprint()]))"
)


def test_a_copy_of_the_files_knows_its_version_and_fingerprint_but_no_commit(tmp_path):
    """As on a machine that got the files alone: no metadata of an installed package, no repository."""
    shutil.copytree(provenance.HOME, tmp_path / "slipstream", ignore=shutil.ignore_patterns("__pycache__"))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])}
    done = subprocess.run(
        [sys.executable, "-c", ASK], env=environment, cwd=tmp_path, capture_output=True, text=True, check=True
    )
    versions, commit, source = json.loads(done.stdout)
    assert versions["slipstream"] == __version__
    assert commit is None
    assert source == provenance.source_fingerprint()


def test_the_version_needs_no_installed_package(monkeypatch):
    monkeypatch.setattr(provenance, "_version", lambda package: None)
    assert provenance.versions()["slipstream"] == __version__


def test_every_byte_and_every_name_counts(tmp_path):
    def fingerprint(**files: str) -> str:
        home = tmp_path / str(len(list(tmp_path.iterdir())))
        home.mkdir()
        for name, text in files.items():
            (home / f"{name}.py").write_text(text)
        return provenance.source_fingerprint(home)

    prints = [
        fingerprint(a="x", b="y"),
        fingerprint(a="x", b="z"),
        fingerprint(a="x", c="y"),
        fingerprint(a="xy"),
    ]
    assert len(set(prints)) == 4
    assert fingerprint(b="y", a="x") == prints[0]


def test_a_checkout_names_its_commit_and_says_when_files_differ(tmp_path):
    def git(*words: str) -> str:
        who = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
        return subprocess.run(
            ["git", "-C", str(tmp_path), *who, *words], check=True, capture_output=True, text=True
        ).stdout.strip()

    (tmp_path / "__init__.py").write_text("")
    git("init", "--quiet")
    assert provenance.commit(tmp_path) is None  # nothing is committed
    git("add", ".")
    git("commit", "--quiet", "-m", "first")
    head = git("rev-parse", "HEAD")
    assert provenance.commit(tmp_path) == head
    (tmp_path / "__init__.py").write_text("changed = True\n")
    assert provenance.commit(tmp_path) == f"{head}-dirty"
